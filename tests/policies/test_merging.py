"""One policy of each kind holds for an object, merged by RabbitMQ's rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.model import policies
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    AnyChange,
    ExchangePut,
    ParameterDelete,
    ParameterPut,
    QueuePut,
    VhostPut,
)
from shardmq.broker.model.policies import Policies
from shardmq.broker.routing import route
from tests.support.catalogs import rebuilt
from tests.support.changes import any_change
from tests.support.proving import proving

NUMBERS = ("max-length", "max-length-bytes", "message-ttl", "expires", "consumer-timeout")
WORDS = ("overflow", "dead-letter-exchange", "dead-letter-routing-key", "queue-mode")


def put(
    name: str, definition: dict[str, Any], component: str = "policy", **more: Any
) -> ParameterPut:
    value = {"pattern": ".*", "definition": definition, "priority": 0, "apply-to": "all"} | more
    return ParameterPut(
        "/", component, name, {key.replace("_", "-"): item for key, item in value.items()}
    )


def catalog_of(*changes: AnyChange) -> Catalog:
    catalog = Catalog()
    catalog.apply(VhostPut("/"))
    for change in changes:
        catalog.apply(change)
    return catalog


def queue(name: str = "q", **arguments: Any) -> QueuePut:
    named = {f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}
    return QueuePut("/", name, 1, 0, arguments=named)


def values() -> st.SearchStrategy[dict[str, Any]]:
    numbers = {key: st.integers(0, 5) for key in NUMBERS}
    words = {key: st.sampled_from(["a", "b"]) for key in WORDS}
    return st.fixed_dictionaries({}, optional={**numbers, **words})


def naive(
    arguments: dict[str, Any], policy: dict[str, Any], operator: dict[str, Any]
) -> dict[str, Any]:
    """Merge by RabbitMQ's rules, one key at a time.

    The operator policy goes over the policy, the arguments go over both.
    """
    made = {}
    for key in (*NUMBERS, *WORDS):
        said = [each[key] for each in (policy, operator) if key in each]
        if said and key in NUMBERS:
            made[f"x-{key}"] = min(said)
        elif said:
            made[f"x-{key}"] = said[-1]
        own = arguments.get(f"x-{key}")
        if own is not None:
            lower = key in NUMBERS and f"x-{key}" in made
            made[f"x-{key}"] = min(own, made[f"x-{key}"]) if lower else own
    return made


@pytest.mark.row("C3.4", "C3.5", "J2")
@given(values(), values(), values())
def test_a_merge_is_what_the_rules_say_key_by_key(
    own: dict[str, Any], policy: dict[str, Any], operator: dict[str, Any]
) -> None:
    arguments = {f"x-{key}": value for key, value in own.items()}
    catalog = catalog_of(QueuePut("/", "q", 1, 0, arguments=arguments))
    if policy:
        catalog.apply(put("p", policy))
    if operator:
        catalog.apply(put("o", operator, "operator_policy"))
    found = catalog.queue("/", "q")
    assert found is not None
    assert catalog.queue_arguments(found) == naive(arguments, policy, operator)
    assert found.arguments == arguments, "what was declared stays"


@pytest.mark.row("C3.7", "J1")
@given(st.lists(any_change(), max_size=60))
def test_what_applies_does_not_depend_on_what_was_there_first(history: list[AnyChange]) -> None:
    catalog = catalog_of(*history)
    copy = rebuilt(catalog.version, catalog.changes())
    for name, vhost in catalog.vhosts.items():
        other = copy.vhosts[name]
        for each in vhost.queues.values():
            assert vhost.queue_arguments(each) == other.queue_arguments(each)
        for exchange in vhost.exchanges.values():
            assert vhost.exchange_arguments(exchange) == other.exchange_arguments(exchange)
            if exchange.name:
                in_table = vhost.table.exchange(exchange.name).attributes.arguments
                assert in_table == vhost.exchange_arguments(exchange)


CHOICES: list[tuple[str, str, list[ParameterPut], str | None]] = [
    (
        "C3.6",
        "highest priority",
        [put("a", {"max-length": 1}, priority=1), put("b", {"max-length": 2}, priority=9)],
        "b",
    ),
    ("C3.6", "ties by name", [put("b", {"max-length": 1}), put("a", {"max-length": 2})], "a"),
    (
        "C3.6",
        "pattern",
        [put("a", {"max-length": 1}, pattern="^x", priority=9), put("b", {"max-length": 2})],
        "b",
    ),
    ("J1", "unanchored pattern", [put("a", {"max-length": 1}, pattern="rder")], "a"),
    ("C3.6", "exchanges", [put("a", {"max-length": 1}, apply_to="exchanges")], None),
    ("C3.6", "queues", [put("a", {"max-length": 1}, apply_to="queues")], "a"),
    ("C3.6", "classic_queues", [put("a", {"max-length": 1}, apply_to="classic_queues")], "a"),
    ("C3.6", "quorum_queues", [put("a", {"max-length": 1}, apply_to="quorum_queues")], None),
    ("C3.6", "streams", [put("a", {"max-length": 1}, apply_to="streams")], None),
    (
        "C3.6",
        "other vhost",
        [ParameterPut("v", "policy", "a", put("a", {"max-length": 1}).value)],
        None,
    ),
    (
        "C3.6",
        "streams' keys",
        [put("a", {"max-age": "1D"}, priority=9), put("b", {"max-length": 1})],
        "b",
    ),
    ("C3.6", "operator alone", [put("a", {"max-length": 1}, "operator_policy")], None),
]


@pytest.mark.parametrize(("puts", "name"), [proving(*choice) for choice in CHOICES])
def test_one_policy_applies(puts: list[ParameterPut], name: str | None) -> None:
    catalog = catalog_of(VhostPut("v"), queue("orders"), *puts)
    vhost, found = catalog.vhosts["/"], catalog.queue("/", "orders")
    assert found is not None
    assert vhost.policies_of(found).policy == name


@pytest.mark.row("C1.10")
@pytest.mark.parametrize(
    ("declared", "policy", "effective"),
    [
        pytest.param(5, -1, 5, id="no limit by policy"),
        pytest.param(-1, 3, 3, id="no limit by argument"),
        pytest.param(-1, -1, -1, id="none at all"),
        pytest.param(5, 3, 3, id="the lower one"),
    ],
)
def test_a_negative_delivery_limit_is_none(declared: int, policy: int, effective: int) -> None:
    catalog = catalog_of(queue(delivery_limit=declared), put("p", {"delivery-limit": policy}))
    found = catalog.queue("/", "q")
    assert found is not None
    assert catalog.queue_arguments(found)["x-delivery-limit"] == effective


@pytest.mark.row("B1.14", "C3.1", "C3.7")
def test_an_alternate_by_policy_routes_at_once_and_no_longer_when_it_is_cleared() -> None:
    catalog = catalog_of(ExchangePut("/", "e", "direct"), queue())
    vhost = catalog.vhosts["/"]
    vhost.table = vhost.table.with_binding("amq.fanout", "queue", "q", "")
    assert route(vhost.table, "e", "k").queues == ()
    catalog.apply(put("p", {"alternate-exchange": "amq.fanout"}, pattern="^e$"))
    assert route(vhost.table, "e", "k").queues == ("q",)
    catalog.apply(put("p", {"alternate-exchange": "amq.direct"}, pattern="^e$"))
    assert route(vhost.table, "e", "k").queues == ()
    catalog.apply(put("p", {"alternate-exchange": "amq.fanout"}, pattern="^e$"))
    catalog.apply(ParameterDelete("/", "policy", "p"))
    assert route(vhost.table, "e", "k").queues == ()


@pytest.mark.row("B1.14")
def test_an_alternate_that_was_declared_wins() -> None:
    catalog = catalog_of(put("p", {"alternate-exchange": "by.policy"}))
    declared = ExchangePut("/", "e", "direct", arguments={"alternate-exchange": "declared"})
    catalog.apply(declared)
    vhost = catalog.vhosts["/"]
    assert vhost.exchange_arguments(declared)["alternate-exchange"] == "declared"
    assert vhost.table.exchange("e").attributes.alternate == "declared"


@pytest.mark.parametrize(
    "value",
    [
        None, [], "x", {}, {"pattern": "a"}, {"pattern": "(", "definition": {"max-length": 1}},
        {"pattern": 3, "definition": {}}, {"pattern": "a", "definition": []},
        {"pattern": "a", "definition": {}, "priority": "1"},
        {"pattern": "a", "definition": {}, "apply-to": "x"},
    ],
)  # fmt: skip
def test_what_is_no_policy_applies_to_nothing(value: Any) -> None:
    assert not Policies([ParameterPut("/", "policy", "p", value)])


def test_queues_of_direct_replies_have_no_policy() -> None:
    catalog = catalog_of(queue("amq.rabbitmq.reply-to.g1.x"), put("p", {"max-length": 0}))
    found = catalog.queue("/", "amq.rabbitmq.reply-to.g1.x")
    assert found is not None
    assert catalog.queue_arguments(found) == {}


def test_keys_of_queues_do_not_reach_exchanges_nor_the_other_way_round() -> None:
    definition = {"max-length": 3, "alternate-exchange": "a", "ha-mode": "all"}
    assert policies.queue_arguments({}, definition) == {"x-max-length": 3}
    assert policies.exchange_arguments({}, definition) == {"alternate-exchange": "a"}


@given(st.lists(any_change(), max_size=30), st.lists(any_change(), max_size=10))
def test_what_may_differ_is_all_that_does(history: list[AnyChange], more: list[AnyChange]) -> None:
    catalog = catalog_of(*history)
    before = catalog.vhosts["/"].policies if "/" in catalog.vhosts else Policies()
    for change in more:
        catalog.apply(change)
    after = catalog.vhosts["/"].policies if "/" in catalog.vhosts else Policies()
    for kind in ("exchange", "classic", "quorum"):
        for name in ("a", "b", "ab", "c"):
            if before.of(kind, name) != after.of(kind, name):
                assert after.may_differ(before)(kind, name)
