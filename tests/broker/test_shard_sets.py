"""Stream exchanges: the shard queues follow what arguments and policies say, and no message ever finds no shard."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from broker.catalog import Catalog, Vhost
from broker.changes import (
    AnyChange,
    ParameterDelete,
    ParameterPut,
    QueuePut,
    VhostPut,
)
from broker.checks import Refusal
from broker.control import ExchangeDeclare
from broker.controller.decisions import Decision, Decisions
from broker.controller.policies import SHARDS_PER_EXCHANGE_MAX
from broker.controller.shard_sets import NODE
from broker.routing import route

SHARDS = 4
HASH = "x-modulus-hash"


class World:
    """The controller's decisions, without the log and the links."""

    def __init__(self, shards: int = SHARDS) -> None:
        self.catalog = Catalog()
        self.catalog.apply(VhostPut("/"))
        self._last_id = 0
        self.decisions = Decisions(self.catalog, self._new_id, lambda: "name", lambda vhost, name: 0, shards)
        self.watch: str | None = None  # an exchange that must have a route after each single change

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    @property
    def vhost(self) -> Vhost:
        return self.catalog.vhosts["/"]

    def ask(self, request: Any) -> Decision:
        before = self.vhost.policies
        decision = self.decisions.decide(request, "")
        self._apply(decision.changes)
        more = self.decisions.reshape(decision.changes, before)
        self._apply(more.changes)
        decision.create += more.create
        decision.drop += more.drop
        decision.notes += more.notes
        return decision

    def restart(self) -> Decision:
        decision = self.decisions.restore()
        self._apply(decision.changes)
        return decision

    def _apply(self, changes: list[AnyChange]) -> None:
        for change in changes:
            self.catalog.apply(change)
            if self.watch is not None:
                assert route(self.vhost.table, self.watch, "k").queues, f"no route after {change}"

    def declare(self, name: str = "e", type: str = HASH, durable: bool = True, **arguments: Any) -> Decision:
        named = {key.replace("_", "-"): value for key, value in arguments.items()}
        return self.ask(ExchangeDeclare("/", name, type, durable, False, False, named))

    def policy(self, name: str = "p", pattern: str = "^e$", **definition: Any) -> Decision:
        named = {key.replace("_", "-"): value for key, value in definition.items()}
        return self.ask(ParameterPut("/", "policy", name, {"pattern": pattern, "definition": named, "priority": 0}))

    def clear(self, name: str = "p") -> Decision:
        return self.ask(ParameterDelete("/", "policy", name))

    def states(self, exchange: str = "e") -> list[str]:
        return [part.part.state for part in self.vhost.parts(exchange) if part.part is not None]

    def bound(self, exchange: str = "e") -> list[tuple[str, str]]:
        return sorted((binding.destination, binding.routing_key) for binding in self.vhost.bindings_from(exchange))


def sharding(index: int, exchange: str = "e") -> str:
    return f"sharding: {exchange} - {NODE} - {index}"


def stream(index: int, exchange: str = "e") -> str:
    return f"stream: {exchange} - {NODE} - {index}"


# -- made by arguments ------------------------------------------------------------------------------------


@pytest.mark.row("E2.3", "E2.4", "E2.5")
def test_an_exchange_with_x_shards_has_so_many_queues_one_on_each_shard_process() -> None:
    world = World()
    decision = world.declare(x_shards=SHARDS)
    assert world.vhost.shard_queues("e") == tuple(sharding(i) for i in range(SHARDS))
    queues = world.vhost.parts("e")
    assert decision.create == queues
    assert sorted(queue.shard for queue in queues) == list(range(SHARDS))
    assert all(queue.durable and not queue.auto_delete and not queue.owner and not queue.arguments for queue in queues)
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
        ({"x_shards": 10**9}, f"x-shards should not exceed {SHARDS_PER_EXCHANGE_MAX}, actually was 1000000000"),
        ({"x_super_stream": 0}, "x-super-stream should be greater than 0, actually was 0"),
        ({"x_shards": 1, "x_shard_arguments": 3}, "x-shard-arguments should be a table, actually was 3"),
        ({"x_shards": 1, "x_shard_routing_key": 3}, "x-shard-routing-key should be a string, actually was 3"),
        ({"x_shards": 1, "x_shards_when_gone": "x"}, 'x-shards-when-gone: <<"x">> is none of drain, keep, delete'),
        (
            {"x_shards": 1, "x_shard_arguments": {"x-max-length": -1}},
            "invalid arg 'x-max-length' for queue 'e' in vhost '/': {value_negative,-1}",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_made(arguments: dict[str, Any], text: str) -> None:
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
    copy = Catalog.rebuilt(0, reversed_queues(world.catalog.changes()))
    assert copy.vhosts["/"].shard_queues("e") == tuple(sharding(i) for i in range(12))
    assert copy.vhosts["/"].shard_queues("f") == world.vhost.shard_queues("f")


def reversed_queues(changes: list[AnyChange]) -> list[AnyChange]:
    """Queues in another order than they were made in."""
    queues = iter([change for change in changes if isinstance(change, QueuePut)][::-1])
    return [next(queues) if isinstance(change, QueuePut) else change for change in changes]
