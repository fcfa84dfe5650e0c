"""A browser is no way around the login.

Passwords do not travel readably, and every call is answered in JSON.
"""

from __future__ import annotations

import msgspec
import pytest

from shardmq.broker.controller.management import csrf
from shardmq.broker.controller.management.app import RESOURCES
from tests.http_api.conftest import Api


async def test_every_answer_forbids_frames_and_guessing_of_types(api: Api) -> None:
    for path, login in (
        ("/api/overview", api.login),
        ("/api/nothing", api.login),
        ("/", None),
        ("/api/users", None),
    ):
        api.login = login
        await api.call("GET", path)
        assert api.headers["X-Frame-Options"] == "DENY", path
        assert "frame-ancestors 'none'" in api.headers["Content-Security-Policy"]
        assert api.headers["X-Content-Type-Options"] == "nosniff"
        assert "aiohttp" not in api.headers["Server"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://evil.example", "Content-Type": "text/plain"},
    ],
)
async def test_another_sites_page_changes_nothing(api: Api, headers: dict[str, str]) -> None:
    for method, path in (
        ("PUT", "/api/queues/%2F/q"),
        ("DELETE", "/api/vhosts/%2F"),
        ("POST", "/api/definitions"),
    ):
        status, found = await api.call(method, path, {}, headers=headers)
        assert (status, found["error"]) == (403, "forbidden")
    assert await api.get("/api/queues") == []
    assert await api.get("/api/vhosts/%2F")


async def test_our_own_page_and_what_is_no_browser_may_change(api: Api) -> None:
    own = str(api.client.make_url("/"))[:-1]
    for name, headers in (
        ("a", {"Origin": own}),
        ("b", {"Sec-Fetch-Site": "same-origin"}),
        ("c", {}),
    ):
        assert (await api.call("PUT", f"/api/queues/%2F/{name}", {}, headers=headers))[0] == 201


async def test_a_password_is_not_taken_readably_from_another_host(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csrf, "is_loopback", lambda host: False)
    status, found = await api.call("GET", "/api/overview")
    assert (status, found["error"]) == (403, "tls_required")
    assert "WWW-Authenticate" not in api.headers
    config = msgspec.structs.replace(api.context.config, http_without_tls=True)
    object.__setattr__(api.context, "config_now", lambda: config)
    assert (await api.call("GET", "/api/overview"))[0] == 200


async def test_head_is_get_without_its_body_and_options_tells_the_methods(api: Api) -> None:
    for path in ("/api/overview", "/api/queues", "/api/definitions"):
        assert await api.call("HEAD", path) == (200, "")
    api.login = None
    assert (await api.call("OPTIONS", "/api/queues/%2F/q"))[0] == 200
    assert api.headers["Allow"] == "DELETE, GET, HEAD, OPTIONS, PUT"


TAKES_JSON = [
    ("PUT", "/api/queues/%2F/q"), ("PUT", "/api/exchanges/%2F/e"), ("PUT", "/api/vhosts/v"),
    ("PUT", "/api/users/u"), ("PUT", "/api/policies/%2F/p"),
    ("PUT", "/api/parameters/federation/%2F/p"), ("POST", "/api/definitions"),
    ("PUT", "/api/permissions/%2F/guest"), ("PUT", "/api/vhost-limits/%2F/max-queues"),
    ("PUT", "/api/cluster-name"), ("PUT", "/api/global-parameters/g"),
    ("POST", "/api/users/bulk-delete"), ("POST", "/api/queues/%2F/q/get"),
    ("POST", "/api/exchanges/%2F/amq.direct/publish"), ("POST", "/api/queues/%2F/q/move"),
    ("PUT", "/api/topic-permissions/%2F/guest"),
]  # fmt: skip
BROKEN = [
    b"{", b"[]", b"3", b'"x"', b"\xff\xfe", b"{" * 100_000, b"[" * 100_000,
    b'{"arguments": ' + b'{"a":' * 2000 + b"1" + b"}" * 2001, b"\0",
]  # fmt: skip


async def test_a_body_that_is_no_object_is_400_and_changes_nothing(api: Api) -> None:
    before = api.context.catalog.version
    for method, path in TAKES_JSON:
        for body in BROKEN:
            status, found = await api.call(method, path, body)
            assert status == 400, (method, path, body[:40], found)
            assert found["reason"], (method, path)
    assert api.context.catalog.version == before


KEPT = [
    ("PUT", "/api/queues/%2F/new", "arguments", {}),
    ("PUT", "/api/exchanges/%2F/new", "arguments", {"type": "direct"}),
    ("POST", "/api/bindings/%2F/e/amq.headers/q/q", "arguments", {}),
    ("PUT", "/api/parameters/federation/%2F/p", "value", {}),
    ("PUT", "/api/global-parameters/g", "value", {}),
    ("PUT", "/api/policies/%2F/p", "definition", {"pattern": "x"}),
    ("PUT", "/api/operator-policies/%2F/p", "definition", {"pattern": "x"}),
]  # fmt: skip
NOT_KEPT = [
    {"a": 1 << 64}, {"a": -(1 << 63) - 1}, {"a": 10**30}, {"a": [{"b": 1 << 64}]},
    {"max-length": 1 << 64},
    {"x-max-length": 10**30},
]  # fmt: skip


async def test_values_that_nothing_can_keep_are_400_and_change_nothing(api: Api) -> None:
    assert (await api.call("PUT", "/api/queues/%2F/q", {}))[0] == 201
    before = api.context.catalog.version
    deep: object = 1
    for _ in range(102):
        deep = {"a": deep}
    for method, path, where, rest in KEPT:
        for value in [
            *NOT_KEPT,
            deep,
            {"a": deep},
            *([{"k" * 256: 1}] if where == "arguments" else []),
        ]:
            status, found = await api.call(method, path, {**rest, where: value})
            assert status == 400, (method, path, str(value)[:40], found)
            assert found["reason"], (method, path)
    for key in ("k" * 256, "\u20ac" * 86):
        assert (await api.call("POST", "/api/bindings/%2F/e/amq.direct/q/q", {"routing_key": key}))[
            0
        ] == 400
    assert api.context.catalog.version == before


async def test_a_huge_body_is_413_before_it_is_read(api: Api) -> None:
    before = api.context.catalog.version
    for method, path in TAKES_JSON:
        if path == "/api/definitions":
            continue
        status, found = await api.call(method, path, b" " * (9 << 20))
        assert (status, found["error"]) == (413, "payload_too_large"), path
    assert api.context.catalog.version == before


def test_no_handler_reads_a_body_without_a_bound() -> None:
    """aiohttp's `request.read`, `json` and `text` have a limit and an answer of their own.

    Ours is `Call.raw_body`.
    """
    for resource in RESOURCES:
        assert resource.__file__ is not None
        with open(resource.__file__) as file:
            text = file.read()
        assert not any(f"request.{name}()" in text for name in ("read", "json", "text", "post")), (
            resource
        )
