"""No schedule of faults makes the rules of copies break a promise; broken rules are convicted."""

from __future__ import annotations

import random

import pytest

from shardmq.cluster.rules import Follower, Leader
from tests.cluster.broken_rules import BROKEN, world_of
from tests.cluster.simulation import World, play

SCHEDULES = 2000
TORTURE_SCHEDULES = 200_000


def seeds_of(config: pytest.Config, count: int) -> range:
    first = random.Random(config.option.seed).randrange(1 << 40)
    return range(first, first + count)


@pytest.mark.row("K1", "K3", "K4")
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(SCHEDULES, id="usual"),
        pytest.param(
            TORTURE_SCHEDULES,
            id="torture",
            marks=[pytest.mark.torture, pytest.mark.timeout(3 * 3600)],
        ),
    ],
)
def test_in_no_schedule_something_confirmed_is_lost_or_two_nodes_lead(
    pytestconfig: pytest.Config, count: int
) -> None:
    seeds = seeds_of(pytestconfig, count)
    print(f"schedules from seed {seeds.start}; to see one: tests.cluster.simulation.play(SEED)")
    broken = [text for seed in seeds if (text := play(seed))]
    assert broken == []


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_rules_that_are_broken_in_one_point_are_convicted(
    pytestconfig: pytest.Config, kind: type[Leader] | type[Follower] | type[World]
) -> None:
    world = world_of(kind)
    assert any(play(seed, world) for seed in seeds_of(pytestconfig, SCHEDULES))


def test_a_seed_repeats_its_schedule() -> None:
    traces = []
    for _ in range(2):
        world = World(7)
        world.trace = []
        world.run()
        traces.append(world.trace)
    assert traces[0] == traces[1]
