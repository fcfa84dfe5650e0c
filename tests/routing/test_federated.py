"""An exchange of type x-federation-upstream holds back what has come too far."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shardmq.broker.routing import Message, goes_by_key, route_message
from shardmq.broker.routing.federated import exchange_fault
from shardmq.broker.routing.table import RoutingTable

HISTORIES = 500
TYPE = "x-federation-upstream"
NAMES, VHOSTS = ("a", "b", "c"), ("/", "v")


def table(arguments: dict[str, Any]) -> RoutingTable:
    """Return a table as RabbitMQ makes it: a topic exchange, then this one, then a queue."""
    return (
        RoutingTable.empty()
        .with_exchange("topic", "topic")
        .with_exchange("up", TYPE, arguments, internal=True)
        .with_queue("q")
        .with_bindings("topic", "exchange", "up", [("k.*", {})])
        .with_bindings("up", "queue", "q", [("", {})])
    )


@pytest.mark.row("B1.12", "J12")
def test_any_history_of_a_message_goes_where_rabbitmqs_rule_says(
    pytestconfig: pytest.Config,
) -> None:
    for history in range(HISTORIES):
        chance = random.Random(pytestconfig.option.seed + history)
        hops, own = chance.randrange(4), (chance.choice(NAMES), chance.choice(VHOSTS))
        arguments: dict[str, Any] = {"x-max-hops": hops}
        if chance.random() < 0.8:
            arguments |= {"x-downstream-name": own[0], "x-downstream-vhost": own[1]}
        been = [(chance.choice(NAMES), chance.choice(VHOSTS)) for _ in range(chance.randrange(4))]
        came: Any = [{"cluster-name": name, "vhost": vhost} for name, vhost in been]
        headers = {"x-received-from": chance.choice([came, came, came, "no list"])}
        if chance.random() < 0.2:
            headers = {}
        goes = True
        if isinstance(headers.get("x-received-from"), list):
            knows = "x-downstream-name" in arguments
            goes = len(been) < hops and not (knows and own in been)
        routed = route_message(table(arguments), "topic", Message("k.x", headers))
        assert routed.queues == (("q",) if goes else ()), history


@pytest.mark.row("B1.12")
def test_the_routing_key_alone_does_not_decide_and_bad_entries_harm_nothing() -> None:
    made = table({"x-max-hops": 9, "x-downstream-name": "a", "x-downstream-vhost": "/"})
    assert not goes_by_key(made, "topic")
    for entry in (3, "a", None, [], {}, {"cluster-name": "a"}, {"cluster-name": ["a"]}):
        message = Message("k.x", {"x-received-from": [entry]})
        assert route_message(made, "topic", message).queues == ("q",)


@pytest.mark.row("B1.12")
@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({}, "Argument x-max-hops missing"),
        ({"x-max-hops": "1"}, "Argument x-max-hops must be of type long"),
        ({"x-max-hops": True}, "Argument x-max-hops must be of type long"),
        ({"x-max-hops": 1}, ""),
    ],
)
def test_the_number_of_hops_must_be_given(arguments: dict[str, Any], fault: str) -> None:
    assert exchange_fault(TYPE, arguments) == fault
    assert exchange_fault("fanout", arguments) == ""
