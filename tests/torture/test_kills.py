"""The broker keeps its promises through many rounds of kill -9 under load.

One ledger covers all rounds.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kill_rounds import Rounds, started
from tests.support.real_broker import SOURCE

pytestmark = [pytest.mark.torture, pytest.mark.timeout(3600)]


@pytest.mark.broker
@pytest.mark.parametrize("front_doors", [2, 0])
def test_every_promise_holds_through_rounds_of_kills(
    tmp_path: Path, request: pytest.FixtureRequest, front_doors: int
) -> None:
    seed, rounds = request.config.option.seed, request.config.option.rounds
    print(f"to play the same kills: make torture ARGS='--seed {seed} --rounds {rounds} -k rounds'")
    with started(tmp_path, front_doors=front_doors) as broker:
        print(Rounds(broker, seed).run(rounds))
    command = [sys.executable, "-m", "shardmq.shardd.store.tools", "verify", str(broker.data_dir)]
    verified = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True)
    assert verified.returncode == 0, verified.stdout + verified.stderr
