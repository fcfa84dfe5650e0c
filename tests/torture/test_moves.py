"""Queues move to and fro through many rounds of kills, and through many played histories."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kill_rounds import started
from tests.support.moving_rounds import MovingRounds
from tests.support.moving_world import World, play
from tests.support.stream_moving_world import StreamWorld

pytestmark = [pytest.mark.torture, pytest.mark.timeout(3600)]


@pytest.mark.broker
@pytest.mark.parametrize("front_doors", [2, 0])
def test_every_promise_holds_while_queues_move_through_rounds_of_kills(
    tmp_path: Path, request: pytest.FixtureRequest, front_doors: int
) -> None:
    seed, rounds = request.config.option.seed, request.config.option.rounds
    print(f"to play the same kills: make torture ARGS='--seed {seed} --rounds {rounds} -k moves'")
    with started(tmp_path, front_doors=front_doors) as broker:
        print(MovingRounds(broker, seed).run(rounds))


@pytest.mark.parametrize("world", [World, StreamWorld], ids=["queue", "stream"])
def test_order_and_messages_survive_in_many_histories(
    request: pytest.FixtureRequest, world: type[World]
) -> None:
    first = request.config.option.seed
    for seed in range(first, first + request.config.option.histories):
        try:
            play(seed, of=world)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
