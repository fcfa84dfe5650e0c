"""Messages in and out are counted per exchange, whatever way they take."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.broker.amqp import Connection, Publishes
from shardmq.broker.model.changes import BindingPut, ExchangeDelete, ExchangePut, QueuePut
from shardmq.shardd.wire.codec import TARGETS, Published, Routes
from tests.amqp.bytes_of import publish, received, shake_hands
from tests.support.fake_publishing import Links, Publisher, catalog, events_of, publishing_of

ENDS = [
    ("", "a"), ("", "nobody"), ("direct", "k1"), ("direct", "k2"), ("direct", "k3"),
    ("headers", ""), ("all", "x"), ("all", "y"), ("spread", "x"), ("spread", "y"), ("spread", "z"),
    ("keeps", "k"), ("keeps", "nobody"),
]  # fmt: skip
LARGE = b"x" * (40 << 10)
MESSAGE = st.tuples(
    st.sampled_from([1, 2, 3]),
    st.sampled_from(ENDS),
    st.sampled_from(
        [{}, {}, {}, {"headers": {"one": 1}}, {"headers": {"CC": ["k2"]}}, {"headers": {"CC": 5}}]
    ),
    st.booleans(),
)


def made() -> Any:
    found = catalog()
    for change in (
        ExchangePut("/", "all", "fanout"),
        BindingPut("/", "all", "queue", "a", ""), BindingPut("/", "all", "queue", "b", ""),
        ExchangePut("/", "spread", "x-consistent-hash"),
        BindingPut("/", "spread", "queue", "a", "1"), BindingPut("/", "spread", "queue", "b", "2"),
        ExchangePut("/", "keeps", "x-recent-history"), BindingPut("/", "keeps", "queue", "a", ""),
    ):  # fmt: skip
        found.apply(change)
    return found


def exchange_of(stored: bytes) -> str:
    return stored[9 : 9 + stored[8]].decode()


@settings(max_examples=200)
@given(
    st.lists(MESSAGE, max_size=14),
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_what_is_counted_is_what_came_and_what_was_stored(
    messages: list[Any], overs: list[bool], size: int
) -> None:
    """`size`: so many messages are read at once."""
    links = Links()
    publishing = publishing_of(made(), links)
    client, turns = Publisher(publishing), iter(overs * 100)
    for at in range(0, len(messages), size):
        for event in events_of(messages[at : at + size]):
            event.lasting = True
            while event.done < event.count:
                client.publish(event, lambda: next(turns))
    came, closed = Counter[str](), set()
    for channel, (exchange, _), properties, _ in messages:
        if properties.get("headers") == {"CC": 5}:
            closed.add(channel)
        elif channel not in closed:
            came[exchange] += 1
    left: Counter[str] = Counter()
    for _, queues, stored in links.stored():
        left[exchange_of(stored)] += len(queues)
    counted = {
        exchange: rest
        for vhost, exchange, *rest in publishing.exchange_counts.report()
        if vhost == "/"
    }
    assert counted == {exchange: [count, left[exchange]] for exchange, count in came.items()}


def test_large_messages_are_counted_though_their_bodies_stay_where_they_were_read() -> None:
    links = Links()
    publishing = publishing_of(made(), links)
    client = Publisher(publishing)
    for _ in range(2):  # the first is decided when its route is learnt
        for end in (("direct", "k1"), ("spread", "x"), ("direct", "k3")):
            connection = Connection(server_properties={})
            shake_hands(connection, channels=1)
            (event,) = received(connection, b"".join(publish(1, *end, LARGE)))
            assert isinstance(event, Publishes)
            event.lasting = True
            client.publish(event)
    assert sorted(publishing.exchange_counts.report()) == [
        ("/", "direct", 4, 4),
        ("/", "spread", 2, 2),
    ]


def test_the_counts_of_an_exchange_that_goes_go_with_it_and_others_stay() -> None:
    known, links = made(), Links()
    publishing = publishing_of(known, links)
    client = Publisher(publishing)

    def play() -> list[tuple[str, str, int, int]]:
        for event in events_of(
            [(1, end, {}, False) for end in (("all", ""), ("direct", "k1"), ("spread", "x"))]
        ):
            client.publish(event)
        return sorted(publishing.exchange_counts.report())

    assert play() == [("/", "all", 1, 2), ("/", "direct", 1, 2), ("/", "spread", 1, 1)]
    known.apply(QueuePut("/", "c", 9, 0))
    publishing.catalog_changed(something_went=False)
    assert play() == [("/", "all", 2, 4), ("/", "direct", 2, 4), ("/", "spread", 2, 2)]
    known.apply(ExchangeDelete("/", "all"))
    publishing.catalog_changed()
    assert [name for _, name, *_ in publishing.exchange_counts.report()] == ["direct", "spread"]
    known.apply(ExchangePut("/", "all", "fanout"))
    publishing.catalog_changed(something_went=False)
    assert play() == [("/", "all", 1, 0), ("/", "direct", 3, 6), ("/", "spread", 3, 3)]


@pytest.mark.parametrize("exchanges", [1, 8, 9, 100])
def test_users_of_a_vhost_share_counters_that_move_when_they_grow(exchanges: int) -> None:
    published = Published()
    routes = [Routes(seed, published) for seed in (1, 2)]
    for number in range(exchanges):
        name = b"%d" % number
        routes[number % 2].learn(bytes([len(name)]) + name + b"\0\0", TARGETS, [(0, [1])], False, 1)
        published.add(name, number + 1, 2 * number)
    expected = {b"%d" % number: (number + 1, 2 * number) for number in range(exchanges)}
    assert published.report() == expected
    for each in routes:
        each.clear()
    published.forget(lambda name: int(name) % 3 == 0)
    assert published.report() == {
        name: counts for name, counts in expected.items() if int(name) % 3
    }
