"""Test settings that HTTP can change, alarms, and calls that need no password."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from aiohttp import web

from shardmq.broker.controller.management import app
from shardmq.broker.controller.memory import LOW_ON_MEMORY
from shardmq.broker.shared.config import Tls
from shardmq.supervisor import notify
from tests.http_api.conftest import CONNECTION, OWNER, Api
from tests.support.certificates import Authority


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the list of requests to the supervisor, which grows with each request."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(notify, "setting", lambda key, value: found.append((key, value)))
    return found


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("log_level", "debug", '"debug"'),
        ("shards.disk_free_min_bytes", 7, "7"),
        ("memory.high_watermark", 0.5, "0.5"),
        ("memory.high_watermark_bytes", 0, "0"),
    ],
)
async def test_a_setting_is_asked_of_the_supervisor_as_its_file_would_say_it(
    api: Api, asked: list[tuple[str, str]], name: str, value: Any, said: str
) -> None:
    assert (await api.call("PUT", f"/api/settings/{name}", {"value": value}))[0] == 204
    assert asked == [(name, said)]


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("data_dir", {"value": "/x"}, 404),
        ("log_level", {"value": "loud"}, 400),
        ("log_level", {}, 400),
        ("log_level", {"value": ["debug"]}, 400),
        ("shards.disk_free_min_bytes", {"value": -1}, 400),
        ("shards.disk_free_min_bytes", {"value": True}, 400),
        ("shards.disk_free_min_bytes", {"value": "1"}, 400),
        ("memory.high_watermark", {"value": 1.5}, 400),
    ],
)
async def test_what_is_no_such_setting_or_value_asks_nothing(
    api: Api, asked: list[tuple[str, str]], name: str, body: dict[str, Any], status: int
) -> None:
    found, said = await api.call("PUT", f"/api/settings/{name}", body)
    assert (found, asked) == (status, []) and said["reason"]


@pytest.mark.parametrize("alarm", ["low on disk", LOW_ON_MEMORY])
async def test_what_would_publish_is_refused_at_once_while_publishers_are_blocked(
    api: Api, alarm: str
) -> None:
    for queue in ("a", "b"):
        await api.call("PUT", f"/api/queues/%2F/{queue}", {})
    if alarm == LOW_ON_MEMORY:
        api.context.memory.alarm = alarm
    else:
        api.shards.shards[0].alarm = alarm
    message = {"routing_key": "a", "properties": {}, "payload": "", "payload_encoding": "string"}
    for path, body in (
        ("exchanges/%2F/amq.default/publish", message),
        ("queues/%2F/a/move", {"destination": "b"}),
    ):
        status, said = await api.call("POST", f"/api/{path}", body)
        assert (status, said["error"]) == (503, "unavailable")
        assert said["reason"] == f"publishers are blocked: {alarm}"
    status, said = await api.call("GET", "/api/aliveness-test/%2F")
    assert (status, said["reason"]) == (503, f"publishers are blocked: {alarm}")


async def test_the_answer_to_a_wrong_value_says_what_it_must_be(api: Api) -> None:
    _, said = await api.call("PUT", "/api/settings/memory.high_watermark", {"value": 2})
    assert said["reason"] == "value must be a part of the memory, 0 to 1"


@pytest.mark.row("M1.9", "N13")
async def test_alarms_are_in_health_nodes_and_metrics(api: Api) -> None:
    api.context.memory.alarm = LOW_ON_MEMORY
    api.context.presence.connections_max = 1
    status, said = await api.call("GET", "/api/health/checks/alarms")
    assert status == 503 and said["alarms"] == [{"alarm": LOW_ON_MEMORY}]
    (node,) = await api.get("/api/nodes")
    assert node["mem_alarm"] and node["alarms"] == [LOW_ON_MEMORY] and node["connections_max"] == 1
    lines = (await api.get("/metrics")).splitlines()
    assert (
        "rabbitmq_alarms_memory_used_watermark 1.0" in lines
        and "shardmq_connections_max 1.0" in lines
    )
    api.context.memory.alarm = ""
    said = await api.get("/api/health/checks/alarms")
    assert said["warnings"] == [{"warning": "1 connections of 1 allowed"}]


@pytest.mark.row("I8", "I9", "G3.1")
async def test_limits_of_the_broker_vhosts_and_users_are_in_health_and_metrics(api: Api) -> None:
    presence = api.context.presence
    assert (await api.get("/api/health/checks/below-node-connection-limit"))["limit"] == "infinity"
    presence.connections_max, presence.channels_max = 1, 100
    presence.has_channels(OWNER, 95)
    for path in (
        "vhost-limits/%2F/max-connections",
        "vhost-limits/%2F/max-queues",
        "user-limits/guest/max-channels",
    ):
        assert (await api.call("PUT", f"/api/{path}", {"value": 100 if "channels" in path else 1}))[
            0
        ] == 204
    assert (await api.call("PUT", "/api/user-limits/guest/max-connections", {"value": -1}))[
        0
    ] == 204  # none
    warned = [row["warning"] for row in (await api.get("/api/health/checks/alarms"))["warnings"]]
    assert warned == [
        "1 connections of 1 allowed",
        "95 channels of 100 allowed",
        "1 connections of 1 allowed in vhost '/'",
        "95 channels of 100 allowed of user 'guest'",
    ]
    lines = (await api.get("/metrics")).splitlines()
    assert 'shardmq_limit_used{kind="channels",name="guest",of="user"} 95.0' in lines
    assert 'shardmq_limit{kind="queues",name="/",of="vhost"} 1.0' in lines
    assert 'shardmq_limit_used{kind="queues",name="/",of="vhost"} 0.0' in lines
    status, said = await api.call("GET", "/api/health/checks/below-node-connection-limit")
    assert (status, said["connections"], said["limit"]) == (503, 1, 1)


def tell_settings(api: Api, **told: Any) -> None:
    """As a reload does."""
    config = msgspec.structs.replace(api.context.config, **told)
    object.__setattr__(api.context, "config_now", lambda: config)


@pytest.mark.row("G3.1")
async def test_a_certificate_that_ends_soon_is_told_before_it_does(
    api: Api, tmp_path: Path
) -> None:
    path = str(Authority(tmp_path).make("host.pem", "CN=host"))  # good for two days
    tell_settings(api, tls=Tls(cert=path))
    check = "/api/health/checks/certificate-expiration"
    assert await api.get(f"{check}/1/days") == {"status": "ok"}
    status, said = await api.call("GET", f"{check}/1/week")
    assert (status, [one["certificate"] for one in said["expired"]]) == (503, [path])
    Path(path).write_text("no certificate")
    assert (await api.call("GET", f"{check}/1/days"))[0] == 503
    for wrong in ("x/days", "1/eons", "9999999/days"):
        assert (await api.call("GET", f"{check}/{wrong}"))[0] == 400


async def test_a_process_short_of_files_is_an_alarm(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shardmq.broker.controller.node_facts.open_files",
        lambda pid: (95, 100) if pid == 1 else (5, 100),
    )
    status, said = await api.call("GET", "/api/health/checks/alarms")
    assert status == 503 and said["alarms"] == [
        {"process": "shard-0", "alarm": "file_descriptor_limit"}
    ]
    assert "rabbitmq_alarms_file_descriptor_limit 1.0" in (await api.get("/metrics")).splitlines()


async def test_every_address_is_a_listener_of_its_own(api: Api) -> None:
    found = [
        (one["protocol"], one["ip_address"], one["port"])
        for one in (await api.get("/api/overview"))["listeners"]
    ]
    assert found == [
        ("amqp", "127.0.0.1", 5672),
        ("amqp", "::1", 5672),
        ("http", "127.0.0.1", 15672),
    ]


async def test_on_this_hosts_socket_all_may_be_done_without_a_password_and_by_tcp_nothing(
    api: Api, tmp_path: Path
) -> None:
    runner = web.AppRunner(app.api_app(api.context))
    await runner.setup()
    path = tmp_path / app.LOCAL_SOCKET
    path.write_text("left by a life before")
    await app.serve_shardctl(runner, str(path))
    assert path.stat().st_mode & 0o777 == 0o660
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as local:
        async with local.put("http://x/api/vhosts/new") as answer:
            assert answer.status == 201
        # Nobody has a permission in it yet.
        async with local.put(
            "http://x/api/queues/new/q", data=json.dumps({"durable": True})
        ) as answer:
            assert answer.status == 201
        async with local.get("http://x/api/queues/new") as answer:
            assert [row["name"] for row in await answer.json()] == ["q"]
        async with local.delete(f"http://x/api/connections/{quote(CONNECTION)}") as answer:
            assert answer.status == 204
    await runner.cleanup()
    api.login = None
    assert (await api.call("PUT", "/api/vhosts/other", {}))[0] == 401
