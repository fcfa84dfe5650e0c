"""The shard queues follow arguments and policies, and every message finds a shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.controller.decisions.decision import Decision
from shardmq.broker.controller.decisions.decisions import Decisions
from shardmq.broker.controller.requests import Closed, Settled
from shardmq.broker.controller.resharding.shard_sets import NODE
from shardmq.broker.controller.resharding.states import hold_of
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import (
    ACTIVE,
    DRAINING,
    KEPT,
    OPEN,
    AnyChange,
    BindingPut,
    ParameterDelete,
    ParameterPut,
    QueueDelete,
    QueuePut,
    VhostPut,
)
from shardmq.broker.model.checks import Refusal
from shardmq.broker.model.values import SHARDS_PER_EXCHANGE_MAX
from shardmq.broker.routing import route
from shardmq.broker.routing.placement import NodeShards, Placement
from shardmq.broker.shared.control import ExchangeDeclare, ExchangeRemove, QueueDeclare, QueueRemove
from tests.support.catalogs import rebuilt

SHARDS = 4
HASH = "x-modulus-hash"


class World:
    """The controller's decisions, without the log and the links."""

    def __init__(self, shards: int = SHARDS, nodes: Iterable[NodeShards] = ()) -> None:
        self.placement = Placement(range(shards), nodes)
        self.catalog = Catalog()
        self.catalog.apply(VhostPut("/"))
        self._last_id = 0
        self.decisions = Decisions(self.catalog, self._new_id, lambda: "name", self.placement)
        self.follows = True  # changes of the number go through at once
        self.watch: str | None = None  # an exchange that must have a route after each single change

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    @property
    def vhost(self) -> Vhost:
        return self.catalog.vhosts["/"]

    def ask(self, request: Any) -> Decision:
        before = self.vhost.policies
        # The carrier tells the shards that these hold back.
        there = {queue.name for queue in self.vhost.queues.values() if hold_of(queue) == OPEN}
        decision = self.decisions.decide(request, "")
        self._apply(decision.changes)
        more = self.decisions.reshape(decision, before)
        self._apply(more.changes)
        decision.create += more.create
        decision.drop += more.drop
        decision.notes += more.notes
        if not isinstance(request, Closed | Settled):
            told = {put.name for put in decision.create if put.name in there}
            decision.create = [put for put in decision.create if put.name not in told]
            if self.follows:
                self.carry_through(decision)
        return decision

    def carry_through(self, decision: Decision) -> None:
        """Do the work of resharding.py, with shards and front doors that answer at once."""
        for exchange in self.vhost.part_exchanges():
            while any(hold_of(queue) for queue in self.vhost.parts(exchange)):
                ids = frozenset(queue.id for queue in self.vhost.parts(exchange))
                for step in (
                    self.ask(Closed("/", exchange, ids)),
                    self.ask(Settled("/", exchange)),
                ):
                    decision.notes += step.notes

    def restart(self) -> Decision:
        decision = self.decisions.restore()
        there = set(self.vhost.queues)
        self._apply(decision.changes)
        decision.create = [put for put in decision.create if put.name not in there]
        self.carry_through(decision)
        return decision

    def _apply(self, changes: list[AnyChange]) -> None:
        for change in changes:
            self.catalog.apply(change)
            if self.watch is not None:
                assert route(self.vhost.table, self.watch, "k").queues, f"no route after {change}"

    def declare(
        self, name: str = "e", type: str = HASH, durable: bool = True, **arguments: Any
    ) -> Decision:
        named = {key.replace("_", "-"): value for key, value in arguments.items()}
        return self.ask(ExchangeDeclare("/", name, type, durable, False, False, named))

    def policy(self, name: str = "p", pattern: str = "^e$", **definition: Any) -> Decision:
        named = {key.replace("_", "-"): value for key, value in definition.items()}
        return self.ask(
            ParameterPut(
                "/", "policy", name, {"pattern": pattern, "definition": named, "priority": 0}
            )
        )

    def clear(self, name: str = "p") -> Decision:
        return self.ask(ParameterDelete("/", "policy", name))

    def states(self, exchange: str = "e") -> list[str]:
        return [part.part.state for part in self.vhost.parts(exchange) if part.part is not None]

    def bound(self, exchange: str = "e") -> list[tuple[str, str]]:
        return sorted(
            (binding.destination, binding.routing_key)
            for binding in self.vhost.bindings_from(exchange)
        )


def sharding(index: int, exchange: str = "e") -> str:
    return f"sharding: {exchange} - {NODE} - {index}"


def stream(index: int, exchange: str = "e") -> str:
    return f"stream: {exchange} - {NODE} - {index}"


# -- made by arguments -----------------------------------------------------------------------------


@pytest.mark.row("E2.3", "E2.4", "E2.5")
def test_an_exchange_with_x_shards_has_so_many_queues_one_on_each_shard_process() -> None:
    world = World()
    decision = world.declare(x_shards=SHARDS)
    assert world.vhost.shard_queues("e") == tuple(sharding(i) for i in range(SHARDS))
    queues = world.vhost.parts("e")
    assert decision.create == queues
    assert sorted(queue.shard for queue in queues) == list(range(SHARDS))
    assert all(
        queue.durable and not queue.auto_delete and not queue.owner and not queue.arguments
        for queue in queues
    )
    assert world.bound() == [(sharding(i), "") for i in range(SHARDS)]


@pytest.mark.parametrize("number", [1, 3, 5, 64])
def test_shard_queues_are_spread_evenly_whatever_their_number(number: int) -> None:
    world = World()
    world.declare(x_shards=number)
    loads = Counter(queue.shard for queue in world.vhost.parts("e"))
    assert max(loads.values()) - min(loads[shard] for shard in range(SHARDS)) <= 1


def test_exchanges_of_one_shard_are_not_all_on_the_same_process() -> None:
    world = World()
    for i in range(40):
        world.declare(f"e{i}", x_shards=1)
    assert {world.vhost.parts(f"e{i}")[0].shard for i in range(40)} == set(range(SHARDS))


def test_auto_is_one_for_each_shard_process() -> None:
    world = World()
    world.declare("a", x_shards="auto")
    world.declare("b", x_super_stream=True)
    world.declare("c", x_super_stream=3)
    assert [len(world.vhost.shard_queues(name)) for name in "abc"] == [SHARDS, SHARDS, 3]
    assert world.vhost.shard_queues("c")[0] == stream(0, "c")


def test_an_exchange_without_it_has_none() -> None:
    world = World()
    world.declare()
    assert world.vhost.shard_queues("e") == ()
    assert world.vhost.shard_queues("missing") == ()


@pytest.mark.row("E2.2")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"x_shards": 0}, "x-shards should be greater than 0, actually was 0"),
        ({"x_shards": -3}, "x-shards should be greater than 0, actually was -3"),
        ({"x_shards": 1.5}, "x-shards should be a whole number, actually was 1.5"),
        ({"x_shards": True}, "x-shards should be a number, actually was true"),
        ({"x_shards": "two"}, 'x-shards should be a number, actually was <<"two">>'),
        (
            {"x_shards": 10**9},
            f"x-shards should not exceed {SHARDS_PER_EXCHANGE_MAX}, actually was 1000000000",
        ),
        ({"x_super_stream": 0}, "x-super-stream should be greater than 0, actually was 0"),
        (
            {"x_shards": 1, "x_shard_arguments": 3},
            "x-shard-arguments should be a table, actually was 3",
        ),
        (
            {"x_shards": 1, "x_shard_routing_key": 3},
            "x-shard-routing-key should be a string, actually was 3",
        ),
        (
            {"x_shards": 1, "x_shards_when_gone": "x"},
            'x-shards-when-gone: <<"x">> is none of drain, merge, keep, delete',
        ),
        (
            {"x_shards": 1, "durable": False, "x_shard_arguments": {"x-queue-type": "stream"}},
            "invalid property 'non-durable' for queue 'e' in vhost '/'",
        ),
        (
            {"x_shards": 1, "x_shard_arguments": {"x-max-length": -1}},
            "invalid arg 'x-max-length' for queue 'e' in vhost '/': {value_negative,-1}",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_made(
    arguments: dict[str, Any], text: str
) -> None:
    world = World()
    with pytest.raises(Refusal) as refused:
        world.declare(**arguments)
    assert (refused.value.code, refused.value.text) == (406, text)
    assert not world.vhost.queues
    assert "e" not in world.vhost.exchanges


def test_a_name_too_long_for_a_queue_is_refused() -> None:
    with pytest.raises(Refusal) as refused:
        World().declare("e" * 240, x_shards=2)
    assert refused.value.code == 406


def test_the_vhosts_limit_of_queues_holds() -> None:
    world = World()
    world.catalog.apply(ParameterPut("/", "vhost-limits", "limits", {"max-queues": 3}))
    with pytest.raises(Refusal) as refused:
        world.declare(x_shards=4)
    assert refused.value.text == "queue limit in vhost '/' (3) is reached"
    world.declare(x_shards=3)
    assert len(world.vhost.shard_queues("e")) == 3


def test_the_queues_get_the_arguments_said_for_them() -> None:
    world = World()
    world.declare(x_shards=2, x_shard_arguments={"x-max-length": 5})
    assert [queue.arguments for queue in world.vhost.parts("e")] == [{"x-max-length": 5}] * 2
    world.declare("t", durable=False, x_shards=2)
    assert [queue.durable for queue in world.vhost.parts("t")] == [False] * 2


def test_a_redeclare_with_another_number_is_another_exchange() -> None:
    world = World()
    world.declare(x_shards=2)
    world.declare(x_shards=2)
    with pytest.raises(Refusal) as refused:
        world.declare(x_shards=3)
    assert "inequivalent arg 'x-shards' for exchange 'e' in vhost '/'" in refused.value.text


def test_the_catalogs_copy_knows_the_same_sets() -> None:
    world = World()
    world.declare(x_shards=12)
    world.declare("f", x_shards=3)
    copy = rebuilt(0, reversed_queues(world.catalog.changes()))
    assert copy.vhosts["/"].shard_queues("e") == tuple(sharding(i) for i in range(12))
    assert copy.vhosts["/"].shard_queues("f") == world.vhost.shard_queues("f")


def reversed_queues(changes: list[AnyChange]) -> list[AnyChange]:
    """Queues in another order than they were made in."""
    queues = iter([change for change in changes if isinstance(change, QueuePut)][::-1])
    return [next(queues) if isinstance(change, QueuePut) else change for change in changes]


# -- made by a policy, as rabbitmq_sharding --------------------------------------------------------


@pytest.mark.row("E2.22", "E2.1", "E2.2", "E2.3")
@pytest.mark.parametrize(
    "type", ["x-consistent-hash", "x-modulus-hash", "x-random", "fanout", "direct", "headers"]
)
@pytest.mark.parametrize("policy_first", [True, False])
def test_shard_empty_routing_key(type: str, policy_first: bool) -> None:
    world = World()
    if policy_first:
        world.policy(shards_per_node=3)
        world.declare(type=type)
    else:
        world.declare(type=type)
        world.policy(shards_per_node=3)
    key = "1" if type == "x-consistent-hash" else ""
    assert world.bound() == [(sharding(i), key) for i in range(3)]


@pytest.mark.row("E2.22", "E2.5", "J15", "C3.3")
def test_shard_queue_creation() -> None:
    world = World()
    world.declare("other")
    world.declare()
    decision = world.policy(shards_per_node=3, routing_key="1234")
    assert [queue.name for queue in decision.create] == [sharding(i) for i in range(3)]
    assert world.vhost.shard_queues("other") == ()


@pytest.mark.row("E2.22")
def test_shard_queue_creation2_of_an_exchange_declared_under_the_policy() -> None:
    world = World()
    world.policy(shards_per_node=3)
    decision = world.declare()
    assert [queue.name for queue in decision.create] == [sharding(i) for i in range(3)]


@pytest.mark.row("E2.22", "E2.13")
def test_shard_update_spn() -> None:
    world = World()
    world.declare()
    world.policy(shards_per_node=3)
    before = world.vhost.parts("e")
    world.watch = "e"
    decision = world.policy(shards_per_node=5)
    assert [queue.name for queue in decision.create] == [sharding(3), sharding(4)]
    assert world.vhost.parts("e")[:3] == before
    assert len(world.bound()) == 5
    loads = Counter(queue.shard for queue in world.vhost.parts("e"))
    assert max(loads.values()) - min(loads[shard] for shard in range(SHARDS)) <= 1


@pytest.mark.row("E2.22", "E2.14")
def test_shard_decrease_spn_keeps_queues_in_the_set_until_they_are_empty() -> None:
    world = World()
    world.declare()
    world.policy(shards_per_node=5)
    world.watch = "e"
    decision = world.policy(shards_per_node=3)
    assert len(world.vhost.shard_queues("e")) == 5
    assert world.states() == 3 * [ACTIVE] + 2 * [DRAINING]
    assert world.bound() == [(sharding(i), "") for i in range(3)]
    assert len(decision.notes) == 2
    assert not decision.drop
    world.ask(QueueRemove("/", sharding(4), if_unused=False, if_empty=False))
    assert len(world.vhost.shard_queues("e")) == 4
    world.policy(shards_per_node=4)
    assert world.states() == 4 * [ACTIVE]
    assert len(world.bound()) == 4


@pytest.mark.row("E2.22", "E2.16", "E1.14")
@pytest.mark.parametrize("type", ["x-modulus-hash", "x-consistent-hash", "fanout"])
def test_shard_update_routing_key_leaves_no_moment_without_bindings(type: str) -> None:
    world = World()
    world.declare(type=type)
    world.policy(shards_per_node=3, routing_key="1234")
    world.watch = "e"
    decision = world.policy(shards_per_node=3, routing_key="4321")
    assert world.bound() == [(sharding(i), "4321") for i in range(3)]
    assert not decision.create


def test_bindings_made_by_hand_stay() -> None:
    world = World()
    world.declare()
    world.policy(shards_per_node=2, routing_key="1")
    world.catalog.apply(BindingPut("/", "e", "queue", sharding(0), "mine"))
    world.policy(shards_per_node=2, routing_key="2")
    assert world.bound() == [(sharding(0), "2"), (sharding(0), "mine"), (sharding(1), "2")]


@pytest.mark.row("E2.15")
@pytest.mark.parametrize(
    ("choice", "state"), [(None, DRAINING), ("drain", DRAINING), ("keep", KEPT), ("delete", None)]
)
@pytest.mark.parametrize("end", ["policy cleared", "exchange deleted"])
def test_what_becomes_of_the_shards_is_an_explicit_choice(
    choice: str | None, state: str | None, end: str
) -> None:
    world = World()
    world.declare()
    more = {} if choice is None else {"shards_when_gone": choice}
    world.policy(shards_per_node=2, **more)
    queues = world.vhost.parts("e")
    decision = (
        world.clear()
        if end == "policy cleared"
        else world.ask(ExchangeRemove("/", "e", if_unused=True))
    )
    assert world.states() == ([] if state is None else [state] * 2)
    assert decision.drop == (queues if state is None else [])
    assert len(decision.notes) == 1  # never silently
    assert not list(world.vhost.bindings())
    assert world.vhost.shard_queues("e") == (() if end == "exchange deleted" or state is None
                                             else tuple(
        queue.name for queue in queues))  # fmt: skip


def test_an_exchange_that_is_deleted_leaves_none_to_drain_into() -> None:
    world = World()
    world.declare()
    world.policy(shards_per_node=2, shards_when_gone="merge")
    world.ask(ExchangeRemove("/", "e", if_unused=True))
    assert world.states() == [DRAINING] * 2


@pytest.mark.parametrize("type", ["x-consistent-hash", HASH])
def test_shards_drain_into_one_that_stays_where_that_is_chosen(type: str) -> None:
    world = World()
    world.declare(type=type)
    world.policy(shards_per_node=3, routing_key="7", shards_when_gone="merge")
    queues = world.vhost.parts("e")
    world.watch = "e"
    decision = world.clear()
    # All queues are others where keys move between those that stay.
    assert (
        sorted(world.states()) == [ACTIVE] + [DRAINING] * 3
        if type == HASH
        else [ACTIVE] + [DRAINING] * 2
    )
    assert decision.notes
    assert len(world.bound()) == 1
    assert {queue.name for queue in queues} <= set(world.vhost.shard_queues("e"))
    before = world.bound()
    world.restart()
    assert world.bound() == before
    world.watch = None
    world.ask(ParameterDelete("/", "shards", "e"))
    assert set(world.states()) == {DRAINING}
    assert not world.bound()


@pytest.mark.parametrize(("type", "told"), [("fanout", True), ("direct", True), (HASH, False)])
def test_who_shards_an_exchange_that_spreads_nothing_is_told(type: str, told: bool) -> None:
    world = World()
    world.declare(type=type)
    notes = world.policy(shards_per_node=3).notes
    assert [f"of type {type}" in note for note in notes] == [True] * told


def test_the_arguments_of_the_exchange_say_it_too() -> None:
    world = World()
    world.declare(x_shards=2, x_shards_when_gone="delete")
    assert len(world.ask(ExchangeRemove("/", "e", if_unused=True)).drop) == 2
    assert not world.vhost.queues


def test_an_exchange_in_use_by_others_is_not_deleted_if_unused() -> None:
    world = World()
    world.declare(x_shards=2)
    world.catalog.apply(QueuePut("/", "q", 99, 0))
    world.catalog.apply(BindingPut("/", "e", "queue", "q", ""))
    with pytest.raises(Refusal) as refused:
        world.ask(ExchangeRemove("/", "e", if_unused=True))
    assert refused.value.text == "exchange 'e' in vhost '/' in use"


def test_an_exchange_that_comes_back_gets_its_old_shards() -> None:
    world = World()
    world.declare(x_shards=3)
    before = world.vhost.parts("e")
    world.ask(ExchangeRemove("/", "e", if_unused=False))
    assert not world.declare(x_shards=3).create
    assert world.vhost.parts("e") == before


def test_a_policy_that_loses_to_a_stronger_one_releases_its_shards() -> None:
    world = World()
    world.declare()
    world.policy(shards_per_node=2)
    value = {"pattern": "^e$", "definition": {"alternate-exchange": "amq.fanout"}, "priority": 9}
    world.ask(ParameterPut("/", "policy", "strong", value))
    assert world.states() == [DRAINING] * 2
    world.clear("strong")
    assert world.states() == [ACTIVE] * 2


def test_what_the_exchange_itself_says_goes_before_a_policy() -> None:
    world = World()
    world.policy(shards_per_node=3)
    world.declare(x_shards=2)
    assert len(world.vhost.shard_queues("e")) == 2


def test_the_default_exchange_is_never_a_stream_exchange() -> None:
    world = World()
    world.policy(pattern="", shards_per_node=1)
    assert not world.vhost.shard_queues("")
    assert not world.vhost.shard_queues("amq.rabbitmq.trace")
    assert world.vhost.shard_queues("amq.topic") == (sharding(0, "amq.topic"),)


def test_a_limit_of_the_vhost_leaves_a_policy_with_fewer_shards_and_says_so() -> None:
    world = World()
    world.catalog.apply(ParameterPut("/", "vhost-limits", "limits", {"max-queues": 2}))
    world.declare()
    decision = world.policy(shards_per_node=4)
    assert len(world.vhost.shard_queues("e")) == 2
    assert len(decision.notes) == 2


# -- made by a definition, as the plugin before it -------------------------------------------------


def parameter(world: World, component: str, name: str, value: Any) -> Decision:
    return world.ask(ParameterPut("/", component, name, value))


@pytest.mark.row("E1.1", "E1.2", "E1.5", "E1.7")
@pytest.mark.parametrize("type", ["x-random", "x-consistent-hash"])
def test_a_stream_definition_that_a_policy_names(type: str) -> None:
    world = World()
    world.declare(type=type)
    said = {"local-username": "guest", "shards-per-node": 2, "routing-key": "1234"}
    parameter(world, "stream-definition", "my_stream", said)
    decision = world.policy(stream_definition="my_stream")
    assert world.bound() == [(stream(i), "1234") for i in range(2)]
    assert all(queue.durable for queue in decision.create)


@pytest.mark.row("E1.3", "E1.4")
def test_definition_then_global_then_default() -> None:
    world = World()
    world.declare(type="x-consistent-hash")
    world.policy(stream_definition="my_stream")
    assert world.bound() == [(stream(0), "10000")]
    parameter(world, "stream", "shards-per-node", 2)
    parameter(world, "stream", "routing-key", "4321")
    assert world.bound() == [(stream(i), "4321") for i in range(2)]
    parameter(world, "stream-definition", "my_stream", {"shards-per-node": 3})
    assert world.bound() == [(stream(i), "4321") for i in range(3)]
    parameter(world, "stream-definition", "my_stream", {"shards-per-node": 3, "routing-key": "1"})
    assert world.bound() == [(stream(i), "1") for i in range(3)]
    world.ask(ParameterDelete("/", "stream-definition", "my_stream"))
    assert world.bound() == [(stream(i), "4321") for i in range(2)]
    assert world.states() == [ACTIVE, ACTIVE, DRAINING]


@pytest.mark.row("E1.14")
def test_a_changed_definition_changes_the_exchanges_without_a_moment_without_bindings() -> None:
    world = World()
    world.declare()
    parameter(world, "stream-definition", "d", {"shards-per-node": 2, "routing-key": "1"})
    world.policy(stream_definition="d")
    world.watch = "e"
    parameter(world, "stream-definition", "d", {"shards-per-node": 4, "routing-key": "2"})
    assert world.bound() == [(stream(i), "2") for i in range(4)]


def test_another_way_of_making_it_makes_other_queues_and_drains_the_old_ones() -> None:
    world = World()
    world.declare()
    world.policy(shards_per_node=2)
    world.watch = "e"
    world.policy(stream_definition="d")
    assert world.bound() == [(stream(0), "10000")]
    assert world.vhost.shard_queues("e") == (sharding(0), stream(0), sharding(1))


@pytest.mark.row("E1.15")
def test_exchanges_of_one_name_in_two_vhosts_are_two() -> None:
    world = World()
    world.catalog.apply(VhostPut("other"))
    world.declare(x_shards=2)
    world.ask(ExchangeDeclare("other", "e", HASH, True, False, False, {"x-shards": 3}))
    assert len(world.vhost.shard_queues("e")) == 2
    assert len(world.catalog.vhosts["other"].shard_queues("e")) == 3


# -- at the start, and beside other queues ---------------------------------------------------------


@pytest.mark.row("E2.5", "K11")
def test_missing_shard_queues_and_bindings_are_made_again_at_the_start() -> None:
    world = World()
    world.declare(x_shards=3)
    world.catalog.apply(QueueDelete("/", sharding(1)))
    decision = world.restart()
    assert [queue.name for queue in decision.create] == [sharding(1)]
    assert len(world.bound()) == 3
    assert not world.restart().changes


@pytest.mark.row("E1.11", "K11")
def test_a_start_with_more_shard_processes_gives_auto_more_shards() -> None:
    world = World(2)
    world.declare(x_shards="auto")
    world.decisions = Decisions(world.catalog, lambda: 100, lambda: "name", Placement(range(3)))
    world.restart()
    assert sorted(queue.shard for queue in world.vhost.parts("e")) == [0, 1, 2]


def test_shards_whose_reason_went_while_the_broker_was_down_are_released_at_the_start() -> None:
    world = World()
    world.declare()
    world.policy(shards_per_node=2)
    world.catalog.apply(ParameterDelete("/", "policy", "p"))
    decision = world.restart()
    assert world.states() == [DRAINING] * 2
    assert decision.notes


def test_a_queue_that_is_there_already_becomes_the_shard_with_what_is_in_it() -> None:
    world = World()
    world.ask(QueueDeclare("/", sharding(1), True, False, False, {}))
    there = world.vhost.queues[sharding(1)]
    decision = world.declare(x_shards=2)
    assert [queue.name for queue in decision.create] == [sharding(0)]
    assert world.vhost.queues[sharding(1)].id == there.id
    assert len(world.vhost.shard_queues("e")) == 2


def test_an_exclusive_queue_is_nobody_elses_shard() -> None:
    world = World()
    world.catalog.apply(QueuePut("/", sharding(1), 9, 0, owner="0.1.1"))
    decision = world.declare(x_shards=2)
    assert world.vhost.shard_queues("e") == (sharding(0),)
    assert decision.notes


# -- any history -----------------------------------------------------------------------------------

NUMBERS = st.sampled_from([1, 2, 3, 5, "auto"])
STEPS = st.one_of(
    st.tuples(st.just("policy"), NUMBERS, st.sampled_from(["1", "2"])),
    st.tuples(st.just("definition"), NUMBERS, st.sampled_from(["1", "2"])),
    st.tuples(st.just("named"), st.none(), st.none()),
    st.tuples(st.just("clear"), st.none(), st.none()),
    st.tuples(st.just("remove"), st.integers(0, 4), st.none()),
    st.tuples(st.just("restart"), st.none(), st.none()),
)


@given(st.lists(STEPS, max_size=12))
def test_after_any_history_the_active_shards_are_those_wanted_and_no_queue_is_lost(
    steps: list[Any],
) -> None:
    world = World()
    world.declare()
    wanted: tuple[str, Any, str] | None = None  # by what: its number and key
    said: tuple[Any, str] = (1, "10000")  # by the definition
    removed: set[str] = set()
    for what, number, key in steps:
        there = set(world.vhost.queues)
        match what:
            case "policy":
                world.policy(shards_per_node=number, routing_key=key)
                wanted = ("sharding", number, key)
            case "definition":
                parameter(
                    world, "stream-definition", "d", {"shards-per-node": number, "routing-key": key}
                )
                said = (number, key)
                wanted = ("stream", *said) if wanted and wanted[0] == "stream" else wanted
            case "named":
                world.policy(stream_definition="d")
                wanted = ("stream", *said)
            case "clear" if ("/", "policy", "p") in world.catalog.parameters:
                world.clear()
                wanted = None
            case "remove":
                gone = sharding(number)
                world.ask(QueueRemove("/", gone, if_unused=False, if_empty=False))
                there.discard(gone)
                removed.add(gone)
            case "restart":
                world.restart()
        assert there <= set(world.vhost.queues)
        if what in ("policy", "named", "restart"):
            removed.clear()
        if wanted is None:
            expected: set[str] = set()
        else:
            count = SHARDS if wanted[1] == "auto" else wanted[1]
            expected = {f"{wanted[0]}: e - {NODE} - {i}" for i in range(count)}
        active = {
            part.name
            for part in world.vhost.parts("e")
            if part.part is not None and part.part.state == ACTIVE
        }
        assert active | (removed & expected) == expected
        assert world.bound() == sorted((name, wanted[2] if wanted else "") for name in active)
        again = rebuilt(0, world.catalog.changes()).vhosts["/"]
        assert again.shard_queues("e") == world.vhost.shard_queues("e")
