"""Random topologies: routing agrees with a naive walk, and old tables stay as they were."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.broker.routing import (
    Message,
    NoSuchDestination,
    NoSuchExchange,
    RoutingTable,
    goes_always_alike,
    goes_by_key,
    route,
    route_message,
)
from tests.routing.test_matching import naive

EXCHANGES = ["e", "f", "g", "h"]
QUEUES = ["p", "q", "r"]
KEYS = ["a", "b", "#", "p"]
ends = st.one_of(
    st.tuples(st.just("queue"), st.sampled_from(QUEUES)),
    st.tuples(st.just("exchange"), st.sampled_from(EXCHANGES)),
)
bindings = st.tuples(
    st.sampled_from(EXCHANGES),
    ends,
    st.sampled_from(KEYS),
    st.sampled_from([{}, {"n": 1}, {"n": True}]),
)
changes = st.one_of(
    st.tuples(
        st.just("exchange+"),
        st.sampled_from(EXCHANGES),
        st.sampled_from(["direct", "fanout", "topic", "headers"]),
        st.sampled_from([None, *EXCHANGES, "nowhere"]),
    ),
    st.tuples(st.just("exchange-"), st.sampled_from(["", *EXCHANGES])),
    st.tuples(st.sampled_from(["queue+", "queue-"]), st.sampled_from(QUEUES)),
    st.tuples(st.sampled_from(["bind+", "bind+", "bind+", "bind-"]), bindings),
)
histories = st.lists(changes, max_size=40)


class Plain:
    """A table as two dictionaries and a list, copied at each change."""

    def __init__(self) -> None:
        self.exchanges: dict[str, tuple[str, str | None]] = {"": ("direct", None)}
        self.queues: set[str] = set()
        self.bindings: list[tuple[str, str, str, str, str]] = []

    def after(self, change: tuple) -> Plain:
        new = Plain()
        new.exchanges, new.queues, new.bindings = (
            dict(self.exchanges),
            set(self.queues),
            list(self.bindings),
        )
        new.change(*change)
        return new

    def change(self, what: str, *of) -> None:
        if what == "exchange+":
            self.exchanges[of[0]] = (of[1], of[2])
        elif what == "exchange-" and of[0]:
            self.exchanges.pop(of[0], None)
            self.bindings = [
                b for b in self.bindings if b[0] != of[0] and b[1:3] != ("exchange", of[0])
            ]
        elif what == "queue+":
            self.queues.add(of[0])
        elif what == "queue-":
            self.queues.discard(of[0])
            self.bindings = [b for b in self.bindings if b[1:3] != ("queue", of[0])]
        elif what.startswith("bind"):
            source, (kind, destination), key, arguments = of[0]
            binding = (source, kind, destination, key, repr(arguments))
            if what == "bind-":
                self.bindings = [b for b in self.bindings if b != binding]
            elif self.can_bind(source, kind, destination) and binding not in self.bindings:
                self.bindings.append(binding)

    def can_bind(self, source: str, kind: str, destination: str) -> bool:
        return source in self.exchanges and destination in (
            self.queues if kind == "queue" else self.exchanges
        )

    def route(self, exchange: str, keys: list[str], headers: dict) -> set[str]:
        seen: set[str] = set()
        return self.walk(exchange, keys, headers, seen)

    def walk(self, exchange: str, keys: list[str], headers: dict, seen: set[str]) -> set[str]:
        if exchange in seen or exchange not in self.exchanges:
            return set()
        seen.add(exchange)
        type, alternate = self.exchanges[exchange]
        implied = [("", "queue", queue, queue, "{}") for queue in self.queues]
        here = [b for b in self.bindings + implied if b[0] == exchange]
        hit = [b for b in here if any(naive(type, b[3], eval(b[4]), key, headers) for key in keys)]
        found = {b[2] for b in hit if b[1] == "queue"}
        following = [b[2] for b in hit if b[1] == "exchange"] or (
            [alternate] if alternate and not hit else []
        )
        return found.union(*(self.walk(name, keys, headers, seen) for name in following))


def changed(table: RoutingTable, plain: Plain, what: str, *of) -> RoutingTable:
    if what == "exchange+":
        return table.with_exchange(of[0], of[1], {"alternate-exchange": of[2]} if of[2] else {})
    if what == "exchange-":
        return table.without_exchange(of[0])
    if what == "queue+":
        return table.with_queue(of[0])
    if what == "queue-":
        return table.without_queue(of[0])
    source, (kind, destination), key, arguments = of[0]
    if what == "bind-":
        return table.without_binding(source, kind, destination, key, arguments)
    if plain.can_bind(source, kind, destination):
        return table.with_binding(source, kind, destination, key, arguments)
    with pytest.raises(NoSuchDestination if source in plain.exchanges else NoSuchExchange):
        table.with_binding(source, kind, destination, key, arguments)
    return table


def agree(table: RoutingTable, plain: Plain, headers: dict) -> None:
    for exchange in ["", *EXCHANGES]:
        for key in ("a", "p"):
            if exchange not in plain.exchanges:
                with pytest.raises(NoSuchExchange):
                    route(table, exchange, key, headers)
                continue
            routed = route(table, exchange, key, headers)
            assert routed.queues == tuple(sorted(plain.route(exchange, [key], headers)))
            more = route_message(table, exchange, Message(key, headers, more_keys=("b", "p")))
            assert more.queues == tuple(sorted(plain.route(exchange, [key, "b", "p"], headers)))
            if goes_by_key(table, exchange):
                assert routed == route(table, exchange, key, {"other": 1})
            if goes_always_alike(table, exchange):
                assert routed == route(table, exchange, "any other", {"other": 1})


@settings(max_examples=150, deadline=None)
@given(histories, st.sampled_from([{}, {"n": 1}, {"n": True}]), st.randoms())
def test_routes_like_a_naive_walk_in_every_table_of_a_history_read_in_any_order(
    history, headers, random
) -> None:
    versions = [(RoutingTable.empty(), Plain())]
    for change in history:
        table, plain = random.choice(versions) if random.random() < 0.1 else versions[-1]
        versions.append((changed(table, plain, *change), plain.after(change)))
    random.shuffle(versions)
    for table, plain in versions[:12]:
        agree(table, plain, headers)


def test_a_cycle_of_exchanges_and_alternates_ends() -> None:
    table = RoutingTable.empty().with_exchange("e", "fanout", {}).with_exchange("f", "fanout", {})
    table = table.with_binding("e", "exchange", "f", "").with_binding("f", "exchange", "e", "")
    assert route(table, "e", "k").queues == ()
    table = RoutingTable.empty().with_exchange("e", "direct", {"alternate-exchange": "e"})
    assert route(table, "e", "k").queues == ()


def test_each_exchange_on_the_way_looks_at_all_keys_of_a_message() -> None:
    table = (
        RoutingTable.empty()
        .with_exchange("e", "direct", {"alternate-exchange": "a"})
        .with_exchange("f", "topic")
    )
    table = table.with_exchange("a", "fanout").with_queue("q").with_queue("missed")
    table = table.with_binding("e", "exchange", "f", "first").with_binding(
        "f", "queue", "q", "second"
    )
    table = table.with_binding("a", "queue", "missed", "")
    assert route_message(table, "e", Message("", more_keys=("first", "second"))).queues == ("q",)
    assert route_message(table, "e", Message("", more_keys=("second",))).queues == ("missed",)


def test_a_queue_bound_twice_gets_one_copy_until_the_last_binding_goes() -> None:
    table = RoutingTable.empty().with_exchange("e", "direct", {}).with_queue("q")
    table = table.with_binding("e", "queue", "q", "k").with_binding(
        "e", "queue", "q", "k", {"n": 1}
    )
    assert route(table, "e", "k").queues == ("q",)
    table = table.without_binding("e", "queue", "q", "k")
    assert route(table, "e", "k").queues == ("q",)
    assert route(table.without_binding("e", "queue", "q", "k", {"n": 1}), "e", "k").queues == ()


def test_what_changes_nothing_gives_the_same_table() -> None:
    table = (
        RoutingTable.empty()
        .with_exchange("e", "direct", {})
        .with_queue("q")
        .with_binding("e", "queue", "q", "k")
    )
    assert table.with_queue("q") is table
    assert table.with_exchange("e", "direct", {}) is table
    assert table.with_exchange("", "direct", {}) is table
    assert table.with_binding("e", "queue", "q", "k") is table
    assert table.without_binding("e", "queue", "q", "other") is table
    assert table.without_binding("", "queue", "q", "q") is table


def test_a_hundred_thousand_versions_may_be_kept_and_let_go() -> None:
    first = table = RoutingTable.empty().with_exchange("e", "direct", {})
    for number in range(50_000):
        table = table.with_queue(f"q{number}")
    assert route(first, "", "q1").queues == ()
    assert route(table, "", "q1").queues == ("q1",)
    del first, table
