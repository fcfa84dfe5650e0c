"""Processes are killed at random moments while queues move under load, with one ledger over all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kill_rounds import started
from tests.support.moving_rounds import MovingRounds

pytestmark = [pytest.mark.broker, pytest.mark.crash]

ROUNDS = 8


@pytest.mark.timeout(600)
def test_every_promise_holds_while_queues_move_and_processes_die(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with started(tmp_path) as broker:
        counts = MovingRounds(broker, request.config.option.seed).run(ROUNDS)
        print(counts)
        assert counts["moves"] > 3 and counts["confirmed"] > 1000
