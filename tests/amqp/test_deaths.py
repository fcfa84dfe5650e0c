"""x-death follows RabbitMQ's rule, whatever headers the message came with.

The rest of the message is not touched.
"""

from __future__ import annotations

import datetime
import struct
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands

from shardmq.broker.amqp import contents, deaths, properties
from shardmq.broker.amqp.methods import decode_table, encode_table
from tests.reference import deaths as reference

NAMES = st.sampled_from(["a", "b", "häufig"])
REASONS = st.sampled_from(["expired", "rejected", "maxlen", "delivery_limit"])
VALUES = st.one_of(
    st.integers(-(1 << 31), (1 << 31) - 1), st.text(max_size=5), st.booleans(), st.none()
)
TABLES = st.fixed_dictionaries(
    {},
    optional={
        "queue": NAMES,
        "reason": st.sampled_from(["expired", "rejected"]),
        "count": st.one_of(st.integers(-3, 1 << 40), st.text(max_size=2)),
        "exchange": st.text(max_size=3),
        "more": VALUES,
    },
)
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "x-death": st.one_of(st.lists(st.one_of(TABLES, VALUES), max_size=4), VALUES),
        "x-first-death-queue": st.text(max_size=3),
        "CC": st.one_of(st.lists(st.text(max_size=3), max_size=3), VALUES),
        "BCC": st.one_of(st.lists(st.text(max_size=3), max_size=3), VALUES),
        "x-dead-letter-exchange": st.one_of(st.text(max_size=3), VALUES),
        "x-dead-letter-routing-key": st.one_of(st.text(max_size=300), VALUES),
        "other": VALUES,
    },
)


def props_of(**what: Any) -> bytes:
    return commands.Basic.Properties(**what).marshal()


@given(
    HEADERS,
    st.none() | st.just("5000"),
    NAMES,
    REASONS,
    st.integers(0, (1 << 32) - 1),
    st.booleans(),
)
def test_the_headers_of_the_copy_are_those_of_the_rule(
    headers: dict[str, Any],
    expiration: str | None,
    queue: str,
    reason: str,
    time_s: int,
    without_cc: bool,
) -> None:
    props = props_of(headers=headers or None, expiration=expiration)
    before = properties.read(props).headers or {}
    death = deaths.Death(queue, reason, time_s, "ex", "key")
    found = deaths.record(
        properties.headers_inside(props), expiration, death, without_cc=without_cc
    )
    expected = reference.headers_after(
        before,
        expiration,
        queue=queue,
        reason=reason,
        time_s=time_s,
        exchange="ex",
        key="key",
        without_cc=without_cc,
    )
    assert decode_table(found.headers) == expected
    assert decode_table(found.shown) == {
        name: value for name, value in expected.items() if name != "BCC"
    }
    more = [headers.get(name, []) for name in ("CC", "BCC")]
    assert found.more_keys == [
        key for keys in more if isinstance(keys, list) for key in keys if isinstance(key, str)
    ]
    assert found.deaths[0] == (queue, reason) and len(found.deaths) == len(expected["x-death"])


@given(HEADERS)
def test_a_message_says_by_two_headers_where_it_goes_as_far_as_they_are_names(
    headers: dict[str, Any],
) -> None:
    def name(of: str) -> str | None:
        value = headers.get(of)
        return value if isinstance(value, str) and len(value.encode()) <= 255 else None

    found = deaths.requested_route(encode_table(headers)[4:])
    assert found == (name("x-dead-letter-exchange"), name("x-dead-letter-routing-key"))


def test_counts_are_64_bit_and_times_are_timestamps_for_clients_that_look_at_types() -> None:
    death = deaths.Death("q", "expired", 1_700_000_000, "", "q")
    headers = deaths.record(b"", "100", death, without_cc=False).headers
    assert b"\x05countl" + (1).to_bytes(8, "big") in headers
    assert b"\x04timeT" + (1_700_000_000).to_bytes(8, "big") in headers
    assert b"\x13original-expirationS\0\0\0\x03100" in headers


def test_tables_of_brokers_that_did_not_count_are_counted_together() -> None:
    old = [{"queue": name, "reason": "expired"} for name in ("a", "b", "a", "a")]
    inside = encode_table({"x-death": old})[4:]
    said = decode_table(
        deaths.record(
            inside, None, deaths.Death("q", "rejected", 1, "", "q"), without_cc=False
        ).headers
    )
    assert [(t["queue"], t.get("count")) for t in said["x-death"]] == [("q", 1), ("a", 3), ("b", 1)]
    said = decode_table(
        deaths.record(
            inside, None, deaths.Death("a", "expired", 1, "", "q"), without_cc=False
        ).headers
    )
    assert [(t["queue"], t.get("count")) for t in said["x-death"]] == [("a", 4), ("b", 1)]


def test_the_first_death_has_its_facts_in_rabbitmqs_order_and_later_ones_sorted() -> None:
    first = deaths.record(b"", "5", deaths.Death("q", "expired", 1, "e", "k"), without_cc=False)
    facts = ["count", "reason", "queue", "time", "exchange", "routing-keys", "original-expiration"]
    assert list(decode_table(first.headers)["x-death"][0]) == facts
    again = deaths.record(
        first.headers[4:], None, deaths.Death("r", "rejected", 2, "", "k"), without_cc=False
    )
    assert list(decode_table(again.headers)["x-death"][0]) == sorted(facts[:-1])


def test_a_message_that_dies_a_hundred_times_in_the_same_way_carries_one_table() -> None:
    headers = encode_table({"mine": 1})
    for second in range(100):
        death = deaths.Death("q", "rejected", second, "e", "k")
        headers = deaths.record(headers[4:], None, death, without_cc=False).headers
    (table,) = decode_table(headers)["x-death"]
    assert table["count"] == 100 and int(table["time"].timestamp()) == 0


@given(NAMES, st.lists(st.tuples(NAMES, REASONS), max_size=6))
def test_a_cycle_is_one_that_nobody_rejected_in(queue: str, died: list[tuple[str, str]]) -> None:
    assert deaths.is_cycle(queue, died) == reference.comes_round(queue, died)


def test_headers_find_their_place_among_the_other_properties() -> None:
    everything = {
        "content_type": "a",
        "priority": 3,
        "expiration": "7",
        "message_id": "m",
        "user_id": "u",
    }
    props = properties.with_headers(props_of(**everything), b"\x01hS\0\0\0\x01v")
    said = properties.read(props)
    assert said.headers == {"h": "v"}
    assert {name: getattr(said, name) for name in everything} == everything


SOME_PROPERTIES = st.fixed_dictionaries(
    {},
    optional={
        "content_type": st.text(max_size=3),
        "headers": HEADERS.filter(bool),
        "delivery_mode": st.integers(1, 2),
        "priority": st.integers(0, 254),
        "reply_to": st.text(max_size=3),
        "expiration": st.just("100"),
        "message_id": st.text(max_size=3),
        "timestamp": st.just(datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)),
        "app_id": st.text(max_size=3),
    },
)


@given(st.lists(st.tuples(SOME_PROPERTIES, st.binary(max_size=9)), max_size=5))
def test_letters_are_taken_apart_at_their_headers_and_expiration(
    messages: list[tuple[dict[str, Any], bytes]],
) -> None:
    names = b"\x01e\x02kk"
    wholes = [(props_of(**what), body) for what, body in messages]
    blob = b"".join(
        struct.pack("<II", len(body), len(props)) + names + props + body for props, body in wholes
    )
    found = contents.letters(blob, len(wholes))
    assert contents.split(blob, len(wholes)) == [(names, props, body) for props, body in wholes]
    for (props, body), (look, flags, before, middle, after, last) in zip(
        wholes, found, strict=True
    ):
        said = properties.read(props)
        assert look[0] == names and last == body
        assert look[2:] == (
            said.expiration and said.expiration.encode(),
            said.delivery_mode or 0,
            255 if said.priority is None else said.priority,
        )
        assert look[1] == properties.headers_inside(props)
        headers = struct.pack(">I", len(look[1])) + look[1] if said.headers is not None else b""
        expiration = b"" if look[2] is None else bytes([len(look[2])]) + look[2]
        assert struct.pack(">H", flags) + before + headers + middle + expiration + after == props


@given(st.binary(max_size=80), st.integers(0, 3))
def test_broken_letters_are_an_error_and_nothing_else(garbage: bytes, count: int) -> None:
    for data in (garbage, struct.pack("<II", 0, len(garbage)) + b"\0\0" + garbage):
        for read in (contents.letters, contents.split):
            try:
                read(data, count)
            except ValueError:
                pass
