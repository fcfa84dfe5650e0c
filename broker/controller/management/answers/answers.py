"""Answers as JSON: whole, or slice by slice where they may be long."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from aiohttp import web

from shardmq.broker.controller.management.answers.turns import Turns
from shardmq.broker.controller.management.call import to_json

SLICE_ROWS = 60  # made before others have a turn
JSON = "application/json"


class Document(NamedTuple):
    """An object whose long parts are iterators, which stand on their own; and headers beside it."""

    parts: Mapping[str, Any]
    headers: Mapping[str, str] = {}


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(body=to_json(value), status=status, content_type=JSON, headers=headers)


async def at_once(value: bytes) -> AsyncGenerator[bytes]:
    """Yield what is not made in slices."""
    yield value


async def json_list(slices: AsyncIterator[list[Any]]) -> AsyncGenerator[bytes]:
    """Yield a list whose rows come in slices."""
    lead = b"["
    async for rows in slices:
        if rows:
            yield lead + _inner(rows)
            lead = b","
    yield b"[]" if lead == b"[" else b"]"


async def json_object(parts: Mapping[str, Any]) -> AsyncGenerator[bytes]:
    """Yield an object. Its iterators are written as lists; their items must stand on their own."""
    lead, turns = b"{", Turns()
    for name, value in parts.items():
        yield lead + to_json(name) + b":"
        if isinstance(value, Iterator):
            async for part in json_list(_slices(value, turns)):
                yield part
        else:
            yield to_json(value)
        lead = b","
    yield b"}" if lead == b"," else b"{}"


async def _slices(rows: Iterable[Any], turns: Turns) -> AsyncIterator[list[Any]]:
    rest = iter(rows)
    while part := list(itertools.islice(rest, SLICE_ROWS)):
        yield part
        await turns.others_first()


def _inner(rows: list[Any]) -> bytes:
    return to_json(rows)[1:-1]
