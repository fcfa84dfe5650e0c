"""The route cache gives the same routes as the catalog, also for new keys."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.front_door.publish.route_cache import KeyExchange
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import BindingPut, ExchangePut, QueuePut, VhostPut
from shardmq.broker.routing import goes_by_key, route

WORDS = st.sampled_from(["a", "b", "*", "#"])
PATTERNS = st.lists(WORDS, max_size=3).map(".".join)
KEYS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=3).map(".".join)
BINDINGS = st.lists(
    st.tuples(st.sampled_from(["e", "f"]), st.sampled_from(["q1", "q2", "q3", "f"]), PATTERNS),
    max_size=8,
)
ARGUMENTS = st.sampled_from(
    [{}, {}, {"alternate-exchange": "f"}, {"x-persist-messages": 5}, {"x-delayed-exchange": True}]
)


def made(kind: str, arguments: dict[str, Any], bindings: list[tuple[str, str, str]]) -> Vhost:
    catalog = Catalog()
    catalog.apply(VhostPut("/"))
    for number, name in enumerate(("q1", "q2", "q3", "amq.persistent.e", "amq.delayed.e")):
        catalog.apply(QueuePut("/", name, number + 1, 0))
    catalog.apply(ExchangePut("/", "e", kind, arguments=arguments))
    catalog.apply(ExchangePut("/", "f", "fanout"))
    for source, destination, key in bindings:
        catalog.apply(
            BindingPut("/", source, "exchange" if destination == "f" else "queue", destination, key)
        )
    return catalog.vhosts["/"]


@given(
    st.sampled_from(["direct", "fanout", "topic", "headers", "x-random"]),
    ARGUMENTS,
    BINDINGS,
    st.lists(KEYS),
)
def test_an_exchange_that_is_alone_chooses_the_queues_that_routing_finds(
    kind: str, arguments: dict[str, Any], bindings: list[tuple[str, str, str]], keys: list[str]
) -> None:
    vhost = made(kind, arguments, bindings)
    alone = KeyExchange.of(vhost, "e")
    if alone is None:
        assert (
            kind in ("headers", "x-random")
            or arguments
            or ("e", "f") in {each[:2] for each in bindings}
        )
        return
    assert goes_by_key(vhost.table, "e") and alone.is_topic == (kind == "topic")
    for key in keys:
        routed = route(vhost.table, "e", key)
        assert (alone.queues(key), ()) == (routed.queues, routed.kept)


def test_the_default_exchange_is_alone() -> None:
    alone = KeyExchange.of(made("direct", {}, []), "")
    assert alone is not None and [alone.queues(key) for key in ("q1", "none")] == [("q1",), ()]
