"""A body of very many values is refused before it is decoded; a long text is none."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.controller.management import call
from shardmq.broker.controller.management.call import values_in
from shardmq.broker.model.tables import VALUES_MAX
from tests.http_api.conftest import Api

TEXTS = st.text('a\\",[]{}: é', max_size=8)
JSON = st.recursive(
    st.one_of(st.none(), st.integers(), TEXTS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def counted(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    items = list(value.values()) if isinstance(value, dict) else value
    return max(1, len(items)) + sum(map(counted, items))


@given(JSON, st.booleans())
def test_values_are_counted_without_decoding(value: Any, escapes: bool) -> None:
    assert values_in(json.dumps(value, ensure_ascii=escapes).encode()) == counted(value)


MANY = {
    "numbers": b"[" + b"1," * (VALUES_MAX + 1) + b"1]",
    "objects": b"[" + b"{}," * (VALUES_MAX + 1) + b"{}]",
    "texts": b"[" + b'"",' * (4 * VALUES_MAX + 1) + b'""]',
    "fields": json.dumps(dict.fromkeys(range(VALUES_MAX + 1), "")).encode(),
    "fault": b"[" + b"1," * (VALUES_MAX + 1) + b'\\"',
}


@pytest.mark.parametrize("value", MANY.values(), ids=MANY)
async def test_very_many_values_are_refused_before_they_are_decoded(
    api: Api, monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    decoded: list[int] = []
    real = msgspec.json.decode
    monkeypatch.setattr(
        call.msgspec.json, "decode", lambda raw: (decoded.append(len(raw)), real(raw))[1]
    )
    path = "/api/global-parameters/many"
    status, found = await api.call("PUT", path, b'{"value": ' + value + b"}")
    assert (status, found["reason"]) == (400, "more than 131072 values")
    assert not decoded
    assert (await api.call("PUT", path, b'{"value": [1,2]}'))[0] == 201
    assert decoded == [16]


async def test_a_long_text_and_many_values_below_the_limit_are_taken(api: Api) -> None:
    path = "/api/global-parameters/many"
    for value in ('a,"\\[{' * 400_000, [1] * (VALUES_MAX - 1)):
        assert (await api.call("PUT", path, {"value": value}))[0] in (201, 204)
        assert (await api.get(path))["value"] == value
