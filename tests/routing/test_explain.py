"""What is explained is what happens: the same queues, by the same steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.controller.resharding.routes import table_of
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import (
    AnyChange,
    BindingPut,
    ExchangePut,
    ParameterPut,
    QueuePut,
    VhostPut,
)
from shardmq.broker.routing import Message, NoSuchExchange, route_message
from shardmq.broker.routing.explain import explain, ring
from shardmq.broker.routing.matching import Target
from tests.support.catalogs import rebuilt
from tests.support.changes import any_change

HASH = "x-consistent-hash"


def vhost_of(*changes: AnyChange) -> Vhost:
    catalog = Catalog()
    for change in (VhostPut("/"), *changes):
        catalog.apply(change)
    return catalog.vhosts.get("/") or rebuilt(0, [VhostPut("/")]).vhosts["/"]


def hash_exchange(weights: list[str], type: str = HASH, **arguments: str) -> Vhost:
    named = {key.replace("_", "-"): value for key, value in arguments.items()}
    queues = [QueuePut("/", f"q{i}", i, 0) for i in range(len(weights))]
    bindings = [BindingPut("/", "e", "queue", f"q{i}", weight) for i, weight in enumerate(weights)]
    return vhost_of(ExchangePut("/", "e", type, arguments=named), *queues, *bindings)


@given(
    st.lists(any_change(), max_size=60),
    st.sampled_from(["a", "b", "c", "amq.topic"]),
    st.sampled_from("k1x"),
)
def test_the_table_made_for_one_exchange_routes_as_the_whole_one(
    history: list[AnyChange], exchange: str, key: str
) -> None:
    vhost = vhost_of(*history)
    message = Message(key, {"x": 1})
    small = table_of(vhost, exchange)
    if exchange not in vhost.exchanges:
        with pytest.raises(NoSuchExchange):
            explain(small, exchange, message)
        return
    explained = explain(small, exchange, message)
    assert explained.queues == route_message(vhost.table, exchange, message).queues
    reached = {
        target.name
        for hop in explained.hops
        for target in hop.destinations
        if target.kind == "queue"
    }
    assert reached == set(explained.queues)


@pytest.mark.parametrize("algorithm", ["ring", "jump"])
def test_a_hash_exchange_tells_what_it_hashed_and_who_won(algorithm: str) -> None:
    vhost = hash_exchange(["1", "2"], hash_header="customer", x_algorithm=algorithm)
    explained = explain(table_of(vhost, "e"), "e", Message("k", {"customer": "one"}))
    (hop,) = explained.hops
    assert hop.hash is not None
    assert (hop.hash.by, hop.hash.hashed, hop.hash.among) == ("header customer", b"one", 2)
    assert [target.name for target in hop.destinations] == list(explained.queues)


def test_chance_is_told_as_all_that_may_be() -> None:
    explained = explain(
        table_of(hash_exchange(["", ""], "x-random"), "e"), "e", Message("k", draw=7)
    )
    assert explained.hops[0].by_chance
    assert explained.hops[0].destinations == (Target("queue", "q0"), Target("queue", "q1"))
    assert len(explained.queues) == 1


def test_the_alternate_that_a_policy_names_is_followed() -> None:
    policy = {"pattern": "^e$", "definition": {"alternate-exchange": "amq.fanout"}}
    vhost = vhost_of(
        ExchangePut("/", "e", "direct"),
        QueuePut("/", "q", 1, 0),
        BindingPut("/", "amq.fanout", "queue", "q", ""),
        ParameterPut("/", "policy", "p", policy),
    )
    explained = explain(table_of(vhost, "e"), "e", Message("k"))
    assert [(hop.exchange, hop.alternate) for hop in explained.hops] == [
        ("e", "amq.fanout"),
        ("amq.fanout", None),
    ]
    assert explained.queues == ("q",)


def test_the_default_exchange_leads_to_the_queue_of_that_name() -> None:
    vhost = vhost_of(QueuePut("/", "q", 1, 0))
    assert explain(table_of(vhost, "", "q"), "", Message("q")).queues == ("q",)
    assert explain(table_of(vhost, "", "x"), "", Message("x")).queues == ()


def test_the_ring_tells_weights_and_shares() -> None:
    shares = ring(table_of(hash_exchange(["1", "3"]), "e"), "e")
    assert shares is not None
    assert [(share.target.name, share.weight, share.share) for share in shares] == [
        ("q0", 1, 0.25),
        ("q1", 3, 0.75),
    ]
    assert ring(table_of(vhost_of(), "amq.topic"), "amq.topic") is None
    assert ring(table_of(vhost_of(ExchangePut("/", "e", HASH)), "e"), "e") == []
