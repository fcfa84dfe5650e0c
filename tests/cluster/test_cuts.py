"""Connections to the shards of other nodes are cut at random moments, with one ledger over all.

Nothing that was confirmed is lost, nothing that was settled at its shard comes again, and order
holds. `make torture` plays many more rounds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cut_rounds import CutRounds, started
from tests.support.kill_load import Complaint
from tests.support.relay import Relay

pytestmark = [pytest.mark.broker, pytest.mark.crash]

ROUNDS = 10
CANARY_ROUNDS = 6
CANARY_QUIET_S = 10.0  # what is missing there never comes


def play(directory: Path, seed: int, rounds: int) -> dict[str, int]:
    playing: list[CutRounds] = []
    relay = Relay(lambda: [each.note_end() for each in playing] and None)
    try:
        with started(directory, relay) as (broker, _, _):
            playing.append(CutRounds(broker, relay, seed))
            return playing[0].run(rounds)
    finally:
        relay.close()


@pytest.mark.timeout(600)
def test_every_promise_holds_through_rounds_of_cuts(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = request.config.option.seed
    print(f"to play the same harm: make torture ARGS='--seed {seed} --rounds {ROUNDS} -k cuts'")
    counts = play(tmp_path, seed, ROUNDS)
    print(counts)
    assert counts["deaths"] >= ROUNDS and counts["confirmed"] > 1000


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_sessions_that_are_connected_again_are_caught_by_them(tmp_path: Path) -> None:
    playing: list[CutRounds] = []
    relay = Relay(lambda: [each.note_end() for each in playing] and None)
    try:
        with started(tmp_path, relay, reconnecting=True) as (broker, _, _):
            playing.append(CutRounds(broker, relay, 1, {"harm": 1}, CANARY_QUIET_S))
            with pytest.raises(
                (AssertionError, Complaint), match="never delivered|waited|no answer"
            ):
                playing[0].run(CANARY_ROUNDS, rest_each=2)
    finally:
        relay.close()
