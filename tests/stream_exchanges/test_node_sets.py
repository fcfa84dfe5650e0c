"""In a cluster `shards-per-node` counts for each node, and nodes come and go in order of keys."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.controller.decisions.decision import Decision
from shardmq.broker.controller.requests import NodesChanged
from shardmq.broker.controller.resharding.states import hold_of
from shardmq.broker.model.changes import (
    ACTIVE,
    CLOSING,
    DRAINED_NODES,
    DRAINING,
    OPEN,
    ParameterDelete,
    ParameterPut,
    QueuePut,
)
from shardmq.broker.routing.placement import NodeShards
from tests.stream_exchanges.test_resharding import ACTS, KILLS, Play
from tests.stream_exchanges.test_resharding import STEPS as PLAY_STEPS
from tests.stream_exchanges.test_shard_sets import World, parameter, sharding, stream
from tests.support.catalogs import rebuilt

TYPE = "x-consistent-hash"


def node(number: int, shards: int = 2, is_alive: bool = True) -> NodeShards:
    first = number * 10
    return NodeShards(number, name(number), tuple(range(first, first + shards)), is_alive)


def name(number: int) -> str:
    return f"shardmq@host-{number}"


def of(number: int, index: int, prefix: str = "sharding") -> str:
    return f"{prefix}: e - {name(number)} - {index}"


class Nodes:
    """A cluster of nodes that come and go, as the controller tells the decisions of it."""

    def __init__(self, world: World, count: int) -> None:
        self.world = world
        self.known = {number: node(number) for number in range(count)}
        self.world.placement.change(self._sorted())

    def _sorted(self) -> list[NodeShards]:
        return [self.known[number] for number in sorted(self.known)]

    def change(self) -> Decision:
        if self.world.placement.change(self._sorted()):
            return self.world.ask(NodesChanged())
        return Decision()

    def join(self, number: int) -> Decision:
        self.known[number] = node(number)
        return self.change()

    def down(self, number: int) -> Decision:
        self.known[number] = self.known[number]._replace(is_alive=False)
        return self.change()

    def forget(self, number: int) -> Decision:
        del self.known[number]
        return self.change()

    def drain(self, number: int) -> Decision:
        return self.world.ask(ParameterPut("", DRAINED_NODES, name(number), True))

    def revive(self, number: int) -> Decision:
        return self.world.ask(ParameterDelete("", DRAINED_NODES, name(number)))


def made(nodes: int = 2, shards: Any = 2, type: str = TYPE) -> tuple[World, Nodes]:
    world = World()
    cluster = Nodes(world, nodes)
    world.declare(type=type)
    world.policy(shards_per_node=shards, routing_key="1")
    world.watch = "e"
    return world, cluster


def active(world: World) -> list[str]:
    return sorted(queue.name for queue in parts(world, ACTIVE))


def parts(world: World, state: str) -> list[QueuePut]:
    return [
        queue
        for queue in world.vhost.parts("e")
        if queue.part is not None and queue.part.state == state
    ]


@pytest.mark.row("E2.22", "E2.3", "K11")
def test_each_node_has_so_many_queues_with_its_name_on_its_own_shards() -> None:
    world, _ = made(2, 3)
    assert active(world) == [of(number, index) for number in (0, 1) for index in range(3)]
    for queue in world.vhost.parts("e"):
        assert queue.shard // 10 == int(queue.name.split("host-")[1][0])
    assert {queue.shard for queue in world.vhost.parts("e")} == {0, 1, 10, 11}
    indexes = [queue.part.index for queue in world.vhost.parts("e") if queue.part is not None]
    assert indexes == list(range(6))


@pytest.mark.row("E1.5", "E1.11")
def test_a_stream_definition_counts_for_each_node_too() -> None:
    world = World()
    nodes = Nodes(world, 2)
    world.declare(type=TYPE)
    parameter(world, "stream-definition", "d", {"shards-per-node": 1, "routing-key": "1"})
    world.policy(stream_definition="d")
    nodes.join(2)
    assert active(world) == [of(number, 0, "stream") for number in range(3)]


def test_auto_is_one_for_each_shard_of_each_node() -> None:
    world = World(nodes=[node(0, 1), node(1, 3)])
    world.declare(type=TYPE)
    world.policy(shards_per_node="auto")
    assert active(world) == [of(0, 0), of(1, 0), of(1, 1), of(1, 2)]


@pytest.mark.row("E1.11", "E2.5", "K11")
def test_a_node_that_joins_brings_its_queues() -> None:
    world, nodes = made()
    before = world.vhost.parts("e")
    decision = nodes.join(2)
    assert [queue.name for queue in decision.create] == [of(2, 0), of(2, 1)]
    assert world.vhost.parts("e")[:4] == before
    assert len(world.bound()) == 6


@pytest.mark.row("E1.12", "E2.17", "K11")
@pytest.mark.parametrize("how", ["drain", "forget"])
def test_the_queues_of_a_node_that_is_drained_or_forgotten_drain(how: str) -> None:
    world, nodes = made(3)
    getattr(nodes, how)(1)
    assert active(world) == [of(0, 0), of(0, 1), of(2, 0), of(2, 1)]
    assert [queue.name for queue in parts(world, DRAINING)] == [of(1, 0), of(1, 1)]
    assert len(world.bound()) == 4


def test_a_node_that_is_drained_no_more_has_its_queues_again() -> None:
    world, nodes = made(2)
    before = active(world)
    nodes.drain(1)
    nodes.revive(1)
    assert active(world) == before and not parts(world, DRAINING)


@pytest.mark.row("E2.17")
def test_a_node_that_is_down_keeps_its_queues_and_gets_none() -> None:
    world, nodes = made(2, type="x-random")
    assert not nodes.down(1).changes
    assert len(active(world)) == 4
    world.policy(shards_per_node=3, routing_key="1")
    assert active(world) == [of(0, 0), of(0, 1), of(0, 2), of(1, 0), of(1, 1)]
    decision = nodes.join(1)
    assert [queue.name for queue in decision.create] == [of(1, 2)]


@pytest.mark.row("E2.17")
@pytest.mark.parametrize("how", ["policy", "join", "drain", "drain it", "set"])
def test_a_change_in_order_waits_for_a_node_that_is_down(how: str) -> None:
    """Its shards cannot say that they hold back, and others would hold back all that arrives."""
    world, nodes = made(3)
    before = active(world)
    nodes.down(1)
    match how:
        case "policy":
            decision = world.policy(shards_per_node=3, routing_key="1")
        case "join":
            decision = nodes.join(3)
        case "drain":
            decision = nodes.drain(2)
        case "drain it":
            decision = nodes.drain(1)
        case "set":
            decision = world.ask(ParameterPut("/", "shards", "e", {"shards-per-node": 9}))
    assert active(world) == before and not decision.create
    assert any("when the nodes that have some are back" in note for note in decision.notes)
    nodes.join(1)
    assert active(world) != before


@pytest.mark.row("E2.17")
def test_with_copies_the_queues_of_a_node_that_is_down_go_on_and_changes_wait_for_nothing() -> None:
    world, nodes = made(2)
    whole = dict(nodes.known)
    nodes.known[0] = whole[0]._replace(shards=whole[0].shards + whole[1].shards)
    nodes.known[1] = whole[1]._replace(shards=(), is_alive=False, homes=2)
    assert not nodes.change().changes
    world.policy(shards_per_node=3, routing_key="1")
    leads_none = [of(0, 0), of(0, 1), of(0, 2), of(1, 0), of(1, 1)]
    assert active(world) == leads_none
    nodes.known[1] = nodes.known[1]._replace(is_alive=True)
    nodes.change()
    assert active(world) == leads_none
    nodes.known = whole
    nodes.change()
    assert active(world) == [of(number, index) for number in (0, 1) for index in range(3)]


def test_a_change_that_has_begun_is_called_off_when_a_node_goes_down() -> None:
    world, nodes = made(2)
    before = active(world)
    world.follows = False
    nodes.join(2)
    assert [hold_of(queue) for queue in world.vhost.parts("e")] == [OPEN] * 4 + [CLOSING] * 2
    nodes.down(1)
    assert {hold_of(queue) for queue in world.vhost.parts("e")} == {OPEN}
    assert active(world) == before
    assert [queue.name for queue in parts(world, DRAINING)] == [of(2, 0), of(2, 1)]


def test_if_only_drained_nodes_are_alive_they_are_used() -> None:
    world, nodes = made(2)
    nodes.drain(0)
    nodes.down(1)
    world.declare("f", type=TYPE, x_shards=2)
    assert {queue.shard for queue in world.vhost.parts("f")} == {0, 1}


@pytest.mark.row("E2.3")
def test_a_host_without_a_cluster_keeps_its_names_and_counts() -> None:
    world = World()
    world.declare(type=TYPE)
    world.policy(shards_per_node=3)
    assert active(world) == [sharding(index) for index in range(3)]
    assert not world.ask(NodesChanged()).changes


def test_a_number_of_the_exchange_counts_for_all_nodes_together() -> None:
    world = World(nodes=[node(0), node(1)])
    world.declare(type=TYPE, x_shards=3)
    world.placement.change([node(0), node(1), node(2)])
    assert not world.ask(NodesChanged()).changes
    assert active(world) == [sharding(index) for index in range(3)]
    assert len({queue.shard for queue in world.vhost.parts("e")}) == 3


def test_a_number_that_is_set_counts_for_all_nodes_together() -> None:
    world, _ = made(2)
    world.ask(ParameterPut("/", "shards", "e", {"shards-per-node": 3}))
    assert active(world) == [sharding(index) for index in range(3)]
    world.ask(ParameterDelete("/", "shards", "e"))
    assert active(world) == [of(number, index) for number in (0, 1) for index in (0, 1)]


def test_auto_of_all_nodes_does_not_change_with_a_node_that_is_down() -> None:
    world = World(nodes=[node(0), node(1)])
    nodes = Nodes(world, 2)
    world.declare(type=TYPE, x_super_stream=True)
    assert active(world) == [stream(index) for index in range(4)]
    assert not nodes.down(1).changes
    nodes.join(1)
    nodes.join(2)
    assert len(active(world)) == 6


def test_a_controller_that_starts_while_a_node_is_down_leaves_its_queues() -> None:
    world, nodes = made(2)
    nodes.down(1)
    assert not world.restart().changes


def test_the_queues_of_a_host_become_those_of_its_node_when_it_begins_a_cluster() -> None:
    world = World()
    world.declare(type=TYPE)
    world.policy(shards_per_node=2, routing_key="1")
    world.placement.change([node(0)])
    world.restart()
    assert active(world) == [of(0, 0), of(0, 1)]
    assert [queue.name for queue in parts(world, DRAINING)] == [sharding(0), sharding(1)]


# -- any history -----------------------------------------------------------------------------------

NODES = st.integers(0, 3)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["join", "down", "forget", "drain", "revive"]), NODES),
    st.tuples(st.just("policy"), st.integers(1, 3)),
    st.tuples(st.just("restart"), st.none()),
)


@given(st.lists(STEPS, max_size=20))
def test_after_any_history_each_node_has_the_queues_that_it_is_to_have(
    steps: list[tuple[str, Any]],
) -> None:
    world, nodes = made(2, 2)
    number, drained = 2, set()
    wanted = set(active(world))
    for what, value in steps:
        if what == "policy":
            number = value
            world.policy(shards_per_node=number, routing_key="1")
        elif what == "restart":
            world.restart()
        elif what == "join":
            nodes.join(value)
        elif what == "drain":
            drained.add(value)
            nodes.drain(value)
        elif value == 0 or (value not in nodes.known and what != "revive"):
            continue  # the node of the controller is always there
        elif what == "revive" and value in drained:
            drained.discard(value)
            nodes.revive(value)
        elif what != "revive":
            getattr(nodes, what)(value)
        wanted = expected(nodes, drained, number, wanted)
        assert set(active(world)) == wanted
        assert {name for name, _ in world.bound()} == wanted
        indexes = [queue.part.index for queue in world.vhost.parts("e") if queue.part is not None]
        assert len(indexes) == len(set(indexes))
        again = rebuilt(0, world.catalog.changes())
        assert again.drained_nodes == {name(each) for each in drained}
        assert again.vhosts["/"].shard_queues("e") == world.vhost.shard_queues("e")


def expected(nodes: Nodes, drained: set[int], number: int, before: set[str]) -> set[str]:
    """Say slowly which queues there are to be; `before` are those that there were."""
    known = [each for each in nodes.known.values() if each.number not in drained]
    if not any(each.is_alive for each in known):
        known = list(nodes.known.values())
    down = {each.number for each in nodes.known.values() if not each.is_alive}
    if any(queue == of(each, index) for queue in before for each in down for index in range(3)):
        return before
    return {of(each.number, index) for each in known for index in range(number) if each.is_alive}


class NodesPlay(Play):
    """A play in which nodes join, are drained, go down and are forgotten."""

    def declare(self, kind: str, shards: int) -> Decision:
        self.nodes = Nodes(self.world, 2)
        self.world.declare(type=kind)
        return self.world.policy(shards_per_node=min(shards, 2), routing_key="1")

    def set(self, number: int) -> None:
        other = self.random.randrange(1, 4)
        is_known = other in self.nodes.known
        match number:
            case 1 | 2:
                decision = self.nodes.join(other)
            case 3 if is_known:
                decision = self.nodes.forget(other)
            case 4 if is_known:
                decision = self.nodes.down(other)
            case 5:
                decision = self.nodes.drain(other)
            case 6 if name(other) in self.world.catalog.drained_nodes:
                decision = self.nodes.revive(other)
            case _:
                return
        self._told(decision.create)


@pytest.mark.parametrize("case", range(20))
def test_keys_stay_in_order_while_nodes_come_and_go(
    case: int, request: pytest.FixtureRequest
) -> None:
    seed = request.config.option.seed + case
    chance = random.Random(seed)
    play = NodesPlay(seed, TYPE, chance.randint(1, 2))
    play.run(
        [
            (chance.choice([*ACTS, "set", *(KILLS if case % 2 else ())]), chance.randint(1, 6))
            for _ in range(PLAY_STEPS)
        ]
    )
    play.end()
    assert sum(play.seen.values()) > PLAY_STEPS // 10
