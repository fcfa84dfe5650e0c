"""Bodies in JSON, whole or slice by slice where they may be long."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from aiohttp import web

from shardmq.broker.controller.management.call import to_json
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork

SLICE_ROWS = 60  # written before the processor is offered
JSON = "application/json"


class Document(NamedTuple):
    """An object to be written part by part, and HTTP headers for its response.

    A part that may be long is an iterator. It must not depend on what changes while it is read.
    """

    parts: Mapping[str, Any]
    headers: Mapping[str, str] = {}


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(body=to_json(value), status=status, content_type=JSON, headers=headers)


async def json_list(slices: AsyncIterator[list[Any]]) -> AsyncGenerator[bytes]:
    """Yield a list whose rows come in slices."""
    lead = b"["
    async for rows in slices:
        if rows:
            yield lead + to_json(rows)[1:-1]
            lead = b","
    yield b"[]" if lead == b"[" else b"]"


async def json_object(parts: Mapping[str, Any]) -> AsyncGenerator[bytes]:
    """Yield an object. Iterators of rows, and of slices of rows, are written as lists in slices."""
    lead, work = b"{", SlicedWork()
    for name, value in parts.items():
        yield lead + to_json(name) + b":"
        if isinstance(value, Iterator):
            async for part in json_list(_slices(value, work)):
                yield part
        elif isinstance(value, AsyncIterator):
            async for part in json_list(value):
                yield part
        else:
            yield to_json(value)
        lead = b","
    yield b"}" if lead == b"," else b"{}"


async def _slices(rows: Iterable[Any], work: SlicedWork) -> AsyncIterator[list[Any]]:
    rest = iter(rows)
    while part := list(itertools.islice(rest, SLICE_ROWS)):
        yield part
        await work.yield_to_others()
