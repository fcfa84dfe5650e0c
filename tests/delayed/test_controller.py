"""An exchange that delays has its queue before and after it is known.

A message that is due is routed once.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardmq.broker.controller.decisions.decision import Decision
from shardmq.broker.controller.decisions.decisions import Decisions
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    BindingPut,
    ExchangeDelete,
    ExchangePut,
    ParameterDelete,
    ParameterPut,
    QueueDelete,
    QueuePut,
    VhostPut,
)
from shardmq.broker.routing.placement import Placement
from shardmq.broker.shared.control import ExchangeDeclare, ExchangeRemove, Unbind
from tests.support.catalogs import rebuilt, state

DELAYED = {"x-delayed-type": "topic"}


class Bench:
    def __init__(self) -> None:
        self.catalog = Catalog()
        self.catalog.apply(VhostPut("/"))
        self._ids = iter(range(1, 100))
        self._decisions = Decisions(
            self.catalog, lambda: next(self._ids), lambda: "name", Placement([1])
        )

    def decide(self, ask: Any) -> Decision:
        decision = self._decisions.decide(ask, "")
        for change in decision.changes:
            self.catalog.apply(change)
        return decision

    def declare(
        self, name: str = "x", *, durable: bool = True, auto_delete: bool = False
    ) -> Decision:
        return self.decide(
            ExchangeDeclare("/", name, "x-delayed-message", durable, auto_delete, False, DELAYED)
        )

    def policy(self, **definition: Any) -> Decision:
        value = {"pattern": "^x", "apply-to": "exchanges", "definition": definition, "priority": 0}
        return self.decide(ParameterPut("/", "policy", "p", value))

    @property
    def queues(self) -> list[str]:
        return list(self.catalog.vhosts["/"].queues)


@pytest.mark.parametrize("durable", [True, False])
def test_its_queue_is_there_before_it_and_lasts_as_long(durable: bool) -> None:
    bench = Bench()
    decision = bench.declare(durable=durable)
    assert [type(change) for change in decision.changes] == [QueuePut, ExchangePut]
    assert [(queue.name, queue.durable) for queue in decision.create] == [
        ("amq.delayed.x", durable)
    ]
    assert bench.catalog.hidden_queue_ids() == {decision.create[0].id: "amq.delayed.x"}
    again = bench.declare(durable=durable)
    assert (again.changes, again.uses) == ([], decision.create)


def test_its_queue_goes_with_it() -> None:
    bench = Bench()
    created = bench.declare().create
    decision = bench.decide(ExchangeRemove("/", "x", False))
    assert [type(change) for change in decision.changes] == [ExchangeDelete, QueueDelete]
    assert decision.drop == created
    assert bench.queues == []


def test_its_queue_goes_with_an_exchange_that_goes_with_its_last_binding() -> None:
    bench = Bench()
    created = bench.declare(auto_delete=True).create
    for change in (QueuePut("/", "q", 50, 0), BindingPut("/", "x", "queue", "q", "k")):
        bench.catalog.apply(change)
    decision = bench.decide(Unbind("/", "x", "queue", "q", "k", {}))
    assert decision.drop == created
    assert bench.queues == ["q"]


def test_a_policy_gives_a_queue_to_each_exchange_that_delays_from_now_on_and_takes_none_away() -> (
    None
):
    bench = Bench()
    for name in ("x1", "x2", "y"):
        bench.decide(ExchangeDeclare("/", name, "direct", True, False, False, {}))
    decision = bench.policy(**{"delayed-message": True})
    assert sorted(queue.name for queue in decision.create) == ["amq.delayed.x1", "amq.delayed.x2"]
    assert isinstance(decision.changes[-1], ParameterPut)
    assert bench.policy(**{"delayed-message": True}).create == []
    assert bench.policy(**{"delayed-message": False}).create == []
    vhost = bench.catalog.vhosts["/"]
    assert not vhost.delays(vhost.exchanges["x1"])
    assert len(bench.queues) == 2
    bench.policy(**{"delayed-message": True})
    bench.decide(ParameterDelete("/", "policy", "p"))
    assert len(bench.queues) == 2
    assert bench.decide(ExchangeRemove("/", "x1", False)).drop[0].name == "amq.delayed.x1"


def test_the_limit_of_queues_does_not_count_it() -> None:
    bench = Bench()
    bench.declare()
    assert bench.catalog.vhosts["/"].hidden_queues == 1
    bench.decide(ExchangeRemove("/", "x", False))
    assert bench.catalog.vhosts["/"].hidden_queues == 0


def test_a_copy_made_of_its_changes_is_the_same() -> None:
    bench = Bench()
    bench.declare()
    copy = rebuilt(bench.catalog.version, bench.catalog.changes())
    assert state(copy) == state(bench.catalog)
    assert copy.vhosts["/"].table.exchange("x").attributes.delays == "amq.delayed.x"


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("x-delayed-message", {"x-delayed-type": "topic", "x-persist-messages": 5}),
        ("x-delayed-message", {"x-delayed-type": "x-recent-history"}),
        ("direct", {"x-delayed-exchange": True, "x-persist-ms": 5000}),
    ],
)
def test_one_that_also_keeps_messages_has_both_queues_as_long_as_it_is_there(
    kind: str, arguments: dict[str, Any]
) -> None:
    bench = Bench()
    declare = ExchangeDeclare("/", "x", kind, True, True, False, arguments)
    decision = bench.decide(declare)
    assert [queue.name for queue in decision.create] == ["amq.delayed.x", "amq.persistent.x"]
    assert bench.decide(declare).uses == decision.create
    vhost = bench.catalog.vhosts["/"]
    assert (vhost.hidden_queues, vhost.hidden_queues_of("x")) == (2, decision.create)
    assert not any(vhost.table.has_queue(queue.name) for queue in decision.create)
    for change in (QueuePut("/", "q", 50, 0), BindingPut("/", "x", "queue", "q", "k")):
        bench.catalog.apply(change)
    assert bench.decide(Unbind("/", "x", "queue", "q", "k", {})).drop == decision.create
    assert (bench.queues, vhost.hidden_queues) == (["q"], 0)
