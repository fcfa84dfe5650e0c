"""Absurd numbers, texts and nesting never give a 500 or a line in the log."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

import pytest

from shardmq.broker.controller.management.app import RESOURCES
from shardmq.broker.controller.management.responses.openapi import LIVE, PART, document
from tests.http_api.conftest import Api

TEXTS = (
    "9" * 5000, "-" + "9" * 5000, "0" * 5000 + "1", str(1 << 64), "-1", "0", "²", "٣", "1e999",
    "nan", "inf", "0x10", "1_0", "+1", " 1", "", "%00", "1.5",
)  # fmt: skip
DEEP, VERY_DEEP = 500, 100_000
# As they stand in a body; json.dumps would refuse some.
VALUES = (
    "9" * 5000, "-" + "9" * 5000, str(1 << 63), str(1 << 64), "1e999", "-1e400", "1." + "1" * 5000,
    "-0", "null", '"' + "9" * 5000 + '"', '"' + "x" * 300_000 + '"', '"\\u0000"', '"²"',
    "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * VERY_DEEP + "]" * VERY_DEEP,
    '{"a":' + "9" * 5000 + "}", '{"a":' + str(1 << 64) + "}",
    '{"x-max-length":' + str(1 << 64) + "}", '{"max-length":' + "9" * 5000 + "}",
    '{"number":' + "9" * 400 + "}", '{"0":{"next":' + str(1 << 70) + "}}", "[" + "9" * 5000 + "]",
)  # fmt: skip
PARTS = {"port", "within", "channel", "shard"}  # of paths, that are numbers
PARAMETERS = (
    "page", "page_size", "count", "since", "from", "to", "after", "wait_ms", "timestamp", "seq",
    "filter", "id", "if-unused", "columns", "sort", "name",
)  # fmt: skip
METRICS_PARAMETERS = ("family", "vhost", "queue", "top", "prefix")
# Routes that read many of the parameters: here each parameter meets each text in every run.
CLOSELY = {
    "/api/queues", "/api/overview", "/api/logs", "/api/channels", "/api/shards/load",
    "/api/streams/{vhost}/{name}", "/api/streams/{vhost}/{name}/offset-for-time",
    "/api/streams/{vhost}/{name}/{shard}/arrow", "/api/queues/{vhost}/{queue}/contents",
    "/api/exchanges/{vhost}/{exchange}/ring",
}  # fmt: skip
LONG_BYTES = 50_000  # values that are longer stand in one field of each body in most runs
THERE = {
    "vhost": "%2F", "queue": "q", "exchange": "e", "source": "e", "destination": "q", "kind": "q",
    "end": "source", "name": "e", "user": "guest", "component": "shards",
    "node": "shardmq@localhost", "unit": "days",
}  # fmt: skip
# Ends what the others need, or does not end.
LEFT_OUT = {
    ("DELETE", "/api/users/{user}"),
    ("DELETE", "/api/vhosts/{vhost}"),
    ("POST", "/api/users/bulk-delete"),
}


def path_of(path: str, **parts: str) -> str:
    return PART.sub(lambda part: parts.get(part[1], THERE.get(part[1], "1")), path)


def of_paths_and_queries(every: bool) -> Iterator[tuple[str, str]]:
    """Yield calls with absurd parts and parameters.

    With `every`, each parameter of each route meets many texts; else each meets one, in turn, but
    for the parameters of CLOSELY.
    """
    turn = itertools.cycle(TEXTS)
    for resource in RESOURCES:
        for route in resource.ROUTES:
            if (route.method, route.path) in LEFT_OUT or route.path == LIVE:
                continue
            for name in PARTS & {found[0] for found in PART.findall(route.path)}:
                for text in TEXTS:
                    yield route.method, path_of(route.path, **{name: quote(text) or "%20"})
            # Nothing that is there goes: who destroys is refused for what is not known, or names a
            # number.
            for name in PARAMETERS if route.method == "GET" or route.query else ():
                texts: Iterable[str] = (next(turn),)
                if every or route.path in CLOSELY:
                    texts = TEXTS[:6] if name not in ("count", "page") else TEXTS
                for text in texts:
                    yield route.method, f"{path_of(route.path)}?{name}={quote(text)}"
    for name in METRICS_PARAMETERS:
        for text in TEXTS:
            yield "GET", f"/metrics/detailed?family=queue_metrics&{name}={quote(text)}"


def body_of(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, str]:
    """Return a valid body of a request, with each value as JSON."""
    schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    found = {}
    for name, about in schema.get("properties", {}).items():
        kind = about.get("type", "string" if "enum" in about else "")
        values = {"string": '"a"', "integer": "1", "boolean": "true", "object": "{}", "array": "[]"}
        found[name] = f'"{about["enum"][0]}"' if "enum" in about else values.get(kind, "1")
    return found


def of_bodies(every: bool) -> Iterator[tuple[str, str, bytes]]:
    """Yield calls with absurd bodies, and with an absurd value in each field of a right body.

    Without `every`, a long value is in one of the fields alone, in turn.
    """
    about = document((route for resource in RESOURCES for route in resource.ROUTES), "1")
    turn = itertools.count()
    for path, methods in about["paths"].items():
        for method, operation in methods.items():
            if "requestBody" not in operation or (method.upper(), path) in LEFT_OUT:
                continue
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            right = body_of(schema, about["components"]["schemas"])
            for value in VALUES:
                yield method.upper(), path_of(path), value.encode()
                names = [*right]
                if not every and len(value) > LONG_BYTES and names:
                    names = [names[next(turn) % len(names)]]
                for name in names:
                    body = {**right, name: value}
                    yield method.upper(), path_of(path), _object(body)


def _object(body: dict[str, str]) -> bytes:
    return ("{" + ",".join(f'"{name}":{value}' for name, value in body.items()) + "}").encode()


@pytest.fixture
async def made(api: Api) -> Api:
    await api.call("PUT", "/api/queues/%2F/q", {})
    await api.call(
        "PUT", "/api/exchanges/%2F/e", {"type": "x-modulus-hash", "arguments": {"x-shards": 2}}
    )
    return api


EVERY = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=(pytest.mark.torture, pytest.mark.timeout(900)))]
)


@EVERY
async def test_no_path_and_no_query_is_too_absurd_to_be_answered(
    made: Api, caplog: pytest.LogCaptureFixture, every: bool
) -> None:
    calls = list(of_paths_and_queries(every))
    assert len(calls) > 500
    for method, path in calls:
        status, found = await made.call(method, path)
        assert status != 500, (method, path[:200], found)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@EVERY
async def test_no_body_is_too_absurd_to_be_answered(
    made: Api, caplog: pytest.LogCaptureFixture, every: bool
) -> None:
    calls = list(of_bodies(every))
    assert len(calls) > 500
    for method, path, body in calls:
        status, found = await made.call(method, path, body)
        assert status != 500, (method, path, body[:200], found)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert (await made.get("/api/whoami"))["name"] == "guest"
    assert await made.get("/api/definitions"), "what was taken can be shown"
