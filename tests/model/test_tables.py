"""An accepted AMQP table comes back from the log as it was; any other is refused by name."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.broker.amqp.methods import decode_table, encode_table
from shardmq.broker.model import tables

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(allow_nan=False), st.text(max_size=20), st.binary(max_size=20),
)  # fmt: skip
KEYS = (
    st.text(max_size=20)
    | st.integers(0, 300).map(lambda size: "k" * size)
    | st.integers(0, 90).map("\u20ac".__mul__)
)
TABLES = st.dictionaries(
    KEYS,
    st.recursive(
        SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=8
    ),
)


@settings(max_examples=50)
@given(TABLES)
def test_what_is_let_in_comes_back_as_it_was_and_only_that_is_let_in(table: dict[str, Any]) -> None:
    if tables.fault_in(table):
        with pytest.raises((ValueError, struct.error)):
            encode_table(table)
    else:
        assert decode_table(encode_table(table)) == table


def nested(depth: int, kind: type) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


@pytest.mark.parametrize("kind", [list, dict])
def test_the_depth_that_is_let_in_is_the_one_that_is_read(kind: type) -> None:
    deepest = {"a": nested(100, kind)}
    assert tables.fault_in(deepest) == ""
    assert decode_table(encode_table(deepest)) == deepest
    for deeper in (101, 5000):
        assert tables.fault_in({"a": nested(deeper, kind)}) == "tables nested more than 100 deep"


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({"a": 1 << 64}, "an integer of more than 64 bits"),
        ({"a": [{"b": -(1 << 63) - 1}]}, "an integer of more than 64 bits"),
        (10**5000, "an integer of more than 64 bits"),
        ({"k" * 256: 1}, "a key of more than 255 bytes"),
        ({"a": {"\u20ac" * 86: 1}}, "a key of more than 255 bytes"),
        ({"k" * 255: [True, None, 1.5, "text" * 1000]}, ""),
        ({"a": [1] * (tables.VALUES_MAX - 1)}, ""),
        ({"a": [1] * tables.VALUES_MAX}, "more than 131072 values"),
        ([{}] * tables.VALUES_MAX, ""),
        ([[1], [2, {"a": None}]] * (tables.VALUES_MAX // 5), "more than 131072 values"),
    ],
    ids=itertools.count(),
)
def test_a_fault_is_named(value: Any, fault: str) -> None:
    assert tables.fault_in(value) == fault
