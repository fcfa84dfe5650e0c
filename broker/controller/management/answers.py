"""Answers, as JSON but for metrics: whole, or written slice by slice where they may be long."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

from aiohttp import web

from broker.controller.management.call import to_json
from broker.controller.management.turns import Turns

SLICE_ROWS = 60  # made and written before others have a turn
JSON = "application/json"


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=to_json(value), status=status, content_type=JSON, headers=headers)


async def streamed_list(request: web.Request, slices: AsyncIterator[list[Any]]) -> web.StreamResponse:
    """A list as it comes; a short one whole."""
    first: list[Any] = await anext(slices, [])
    second = await anext(slices, None)
    if second is None:
        return json_response(first)
    if request.method == "HEAD":
        return web.Response(content_type=JSON)
    response = await _begun(request)
    await response.write(b"[" + _inner(first) + b"," + _inner(second))
    async for rows in slices:
        await response.write(b"," + _inner(rows) if rows else b"")
    await response.write(b"]")
    await response.write_eof()
    return response


async def streamed_object(
    request: web.Request, parts: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> web.StreamResponse:
    """An object whose iterators are written as lists. What they yield must stand on its own."""
    if request.method == "HEAD":
        return web.Response(content_type=JSON, headers=headers)
    response = await _begun(request, headers)
    lead, turns = b"{", Turns()
    for name, value in parts.items():
        await response.write(lead + to_json(name) + b":")
        if isinstance(value, Iterator):
            await _write_list(response, value, turns)
        else:
            await response.write(to_json(value))
        lead = b","
    await response.write(b"}" if lead == b"," else b"{}")
    await response.write_eof()
    return response


async def streamed_text(request: web.Request, parts: AsyncIterator[bytes], content_type: str) -> web.StreamResponse:
    first = await anext(parts, b"")  # what fails at once is an answer of its own
    response = web.StreamResponse(headers={"Content-Type": content_type})
    await response.prepare(request)
    if request.method != "HEAD":
        await response.write(first)
    async for part in parts:
        if request.method != "HEAD":
            await response.write(part)
    await response.write_eof()
    return response


async def _write_list(response: web.StreamResponse, rows: Iterable[Any], turns: Turns) -> None:
    rest, lead = iter(rows), b"["
    while part := list(itertools.islice(rest, SLICE_ROWS)):
        await response.write(lead + _inner(part))
        lead = b","
        await turns.others_first()
    await response.write(b"[]" if lead == b"[" else b"]")


async def _begun(request: web.Request, headers: Mapping[str, str] | None = None) -> web.StreamResponse:
    response = web.StreamResponse(headers=headers)
    response.content_type = JSON
    await response.prepare(request)
    return response


def _inner(rows: list[Any]) -> bytes:
    return to_json(rows)[1:-1]
