"""Settings that can be changed by HTTP, alarms where they are looked for, and who may call without a password."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp import web

from broker.controller.management import app
from broker.controller.memory import LOW_ON_MEMORY
from supervisor import notify
from tests.management.conftest import CONNECTION, Api


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the supervisor is asked for."""
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


async def test_alarms_are_in_health_nodes_and_metrics(api: Api) -> None:
    api.context.memory.alarm = LOW_ON_MEMORY
    api.context.presence.connections_max = 1
    status, said = await api.call("GET", "/api/health/checks/alarms")
    assert status == 503 and said["alarms"] == [{"alarm": LOW_ON_MEMORY}]
    (node,) = await api.get("/api/nodes")
    assert node["mem_alarm"] and node["alarms"] == [LOW_ON_MEMORY] and node["connections_max"] == 1
    lines = (await api.get("/metrics")).splitlines()
    assert "rabbitmq_alarms_memory_used_watermark 1.0" in lines and "shardmq_connections_max 1.0" in lines
    api.context.memory.alarm = ""
    said = await api.get("/api/health/checks/alarms")
    assert said["warnings"] == [{"warning": "1 connections of 1 allowed"}]


async def test_a_process_short_of_files_is_an_alarm(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "broker.controller.management.processes.open_files", lambda pid: (95, 100) if pid == 1 else (5, 100)
    )
    status, said = await api.call("GET", "/api/health/checks/alarms")
    assert status == 503 and said["alarms"] == [{"process": "shard-0", "alarm": "file_descriptor_limit"}]
    assert "rabbitmq_alarms_file_descriptor_limit 1.0" in (await api.get("/metrics")).splitlines()


async def test_every_address_is_a_listener_of_its_own(api: Api) -> None:
    found = [(one["protocol"], one["ip_address"], one["port"]) for one in (await api.get("/api/overview"))["listeners"]]
    assert found == [("amqp", "127.0.0.1", 5672), ("amqp", "::1", 5672), ("http", "127.0.0.1", 15672)]


async def test_on_this_hosts_socket_all_may_be_done_without_a_password_and_by_tcp_nothing(
    api: Api, tmp_path: Path
) -> None:
    runner = web.AppRunner(app.api_app(api.context))
    await runner.setup()
    path = tmp_path / app.LOCAL_SOCKET
    path.write_text("left by a life before")
    await app._serve_here(runner, str(path))
    assert path.stat().st_mode & 0o777 == 0o660
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as local:
        async with local.put("http://x/api/vhosts/new") as answer:
            assert answer.status == 201
        # Nobody has a permission in it yet.
        async with local.put("http://x/api/queues/new/q", data=json.dumps({"durable": True})) as answer:
            assert answer.status == 201
        async with local.get("http://x/api/queues/new") as answer:
            assert [row["name"] for row in await answer.json()] == ["q"]
        async with local.delete(f"http://x/api/connections/{quote(CONNECTION)}") as answer:
            assert answer.status == 204
    await runner.cleanup()
    api.login = None
    assert (await api.call("PUT", "/api/vhosts/other", {}))[0] == 401
