"""Processes are killed at random moments under load, with one ledger over all rounds.

`make torture` plays many more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kill_rounds import Rounds, started

pytestmark = [pytest.mark.broker, pytest.mark.crash]

ROUNDS = 10
CANARY_ROUNDS = 4
CANARY_QUIET_S = 8.0  # what is missing there never comes


@pytest.mark.timeout(600)
def test_every_promise_holds_through_rounds_of_kills(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = request.config.option.seed
    print(f"to play the same kills: make torture ARGS='--seed {seed} --rounds {ROUNDS} -k rounds'")
    with started(tmp_path) as broker:
        counts = Rounds(broker, seed).run(ROUNDS)
        print(counts)
        assert (
            counts["deaths"] >= ROUNDS
            and counts["confirmed"] > 1000
            and counts["delivered"] >= counts["confirmed"]
        )


@pytest.mark.torture  # tests/recovery/test_kills.py has one in each run
@pytest.mark.timeout(600)
def test_a_broker_that_confirms_before_it_stores_is_caught_by_them(tmp_path: Path) -> None:
    with started(tmp_path, command=("tests.support.hasty_broker",)) as broker:
        with pytest.raises(AssertionError, match="confirmed messages were never delivered"):
            Rounds(broker, 1, {"both shards": 1, "everything": 1}, CANARY_QUIET_S).run(
                CANARY_ROUNDS, rest_each=1
            )
