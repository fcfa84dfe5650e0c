"""No schedule of faults makes the rules of copies break a promise; broken rules are convicted."""

from __future__ import annotations

import random

import pytest

from shardmq.cluster.rules import Follower, Leader
from tests.cluster.broken_rules import BROKEN, world_of
from tests.cluster.simulation import Node, World, play

SCHEDULES = 2000
TORTURE_SCHEDULES = 200_000
QUIET_SCHEDULES = 200


class QuietWorld(World):
    """Nodes without faults whose leader writes nothing by itself. All are in sync all the same."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.is_quiet = True
        self.loss = self.doubles = self.pace = 0.0

    def fault(self) -> None:
        pass

    def fault_old_leader(self, node: Node) -> None:
        pass


class LosesASnapshot(QuietWorld):
    """Each follower gets nothing for its first comparison, but for pings."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.lost: set[str] = set()

    def snapshot(self, node: Node, to: str, session: int) -> None:
        if to in self.lost:
            super().snapshot(node, to, session)
        elif to in node.wires:
            self.lost.add(to)
            self.lose(node.wires[to], to, alone=True)


class WritesDuringComparisons(QuietWorld):
    """The only changes come while a follower is compared."""

    def snapshot(self, node: Node, to: str, session: int) -> None:
        super().snapshot(node, to, session)
        for _ in range(3):
            after = 0.2 * self.random.random()
            self.at(self.now + after, self.in_life(node, lambda: self.write(node)))


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


@pytest.mark.parametrize(
    "kind", [LosesASnapshot, WritesDuringComparisons], ids=lambda kind: kind.__name__
)
def test_all_nodes_come_in_sync_although_nothing_more_is_written(
    pytestconfig: pytest.Config, kind: type[World]
) -> None:
    broken = [
        text for seed in seeds_of(pytestconfig, QUIET_SCHEDULES) if (text := play(seed, kind))
    ]
    assert broken == []


def test_a_seed_repeats_its_schedule() -> None:
    traces = []
    for _ in range(2):
        world = World(7)
        world.trace = []
        world.run()
        traces.append(world.trace)
    assert traces[0] == traces[1]
