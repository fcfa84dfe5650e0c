"""x-death is what RabbitMQ's rule says, whatever headers the message came with; the rest of it is not touched."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands

from broker.amqp import deaths, properties
from tests.reference import deaths as reference

NAMES = st.sampled_from(["a", "b", "häufig"])
REASONS = st.sampled_from(["expired", "rejected", "maxlen", "delivery_limit"])
VALUES = st.one_of(st.integers(-(1 << 31), (1 << 31) - 1), st.text(max_size=5), st.booleans(), st.none())
TABLES = st.fixed_dictionaries(
    {},
    optional={
        "queue": NAMES,
        "reason": REASONS,
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
        "other": VALUES,
    },
)


def props_of(**what: Any) -> bytes:
    return commands.Basic.Properties(**what).marshal()


@given(HEADERS, st.none() | st.just("5000"), NAMES, REASONS, st.integers(0, (1 << 32) - 1), st.booleans())
def test_the_headers_of_the_copy_are_those_of_the_rule(
    headers: dict[str, Any], expiration: str | None, queue: str, reason: str, time_s: int, without_cc: bool
) -> None:
    props = props_of(headers=headers or None, expiration=expiration, message_id="m", delivery_mode=2)
    before = properties.read(props).headers or {}
    found = deaths.record(props, deaths.Death(queue, reason, time_s, "ex", "key"), without_cc=without_cc)
    said = properties.read(found.props)
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
    assert said.headers == expected
    assert (said.expiration, said.message_id, said.delivery_mode) == (None, "m", 2)
    assert found.deaths[0] == (queue, reason) and len(found.deaths) == len(expected["x-death"])


def test_counts_are_64_bit_and_times_are_timestamps_for_clients_that_look_at_types() -> None:
    death = deaths.Death("q", "expired", 1_700_000_000, "", "q")
    found = deaths.record(props_of(expiration="100"), death, without_cc=False)
    assert b"\x05countl" + (1).to_bytes(8, "big") in found.props
    assert b"\x04timeT" + (1_700_000_000).to_bytes(8, "big") in found.props
    assert b"\x13original-expirationS\0\0\0\x03100" in found.props


def test_a_message_that_dies_a_hundred_times_in_the_same_way_carries_one_table() -> None:
    props = props_of(headers={"mine": 1})
    for second in range(100):
        props = deaths.record(props, deaths.Death("q", "rejected", second, "e", "k"), without_cc=False).props
    (table,) = (properties.read(props).headers or {})["x-death"]
    assert table["count"] == 100 and int(table["time"].timestamp()) == 0


@given(NAMES, st.lists(st.tuples(NAMES, REASONS), max_size=6))
def test_a_cycle_is_one_that_nobody_rejected_in(queue: str, died: list[tuple[str, str]]) -> None:
    assert deaths.is_cycle(queue, died) == reference.comes_round(queue, died)


@pytest.mark.parametrize("without", ["", "expiration", "message_id"])
def test_headers_find_their_place_among_the_other_properties(without: str) -> None:
    everything = {"content_type": "a", "priority": 3, "expiration": "7", "message_id": "m", "user_id": "u"}
    props = properties.with_headers(props_of(**everything), b"\x01hS\0\0\0\x01v", without=without)
    said = properties.read(props)
    assert said.headers == {"h": "v"}
    assert {name: getattr(said, name) for name in everything} == {
        name: None if name == without else value for name, value in everything.items()
    }
