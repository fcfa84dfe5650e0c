"""Test calls that the page came with: load of shards, who holds messages, searches, and logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import stat
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shardmq.broker.controller.management.resources.logs import (
    LIVE_MAX,
    ROWS_MAX,
    TAIL_BYTES_MAX,
    last_lines,
)
from shardmq.broker.shared.control import DoorReport
from shardmq.supervisor import logs
from tests.http_api.conftest import CONNECTION, OWNER, Api
from tests.support.real_broker import PATIENCE_S

# -- load ------------------------------------------------------------------------------------------


async def test_the_load_of_a_shard_is_that_of_its_queues(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr(api.context.stats, "_clock", lambda: now)
    for name in "abcde":
        await api.call("PUT", f"/api/queues/%2F/{name}", {})
    placed = {row["name"]: row["shard"] for row in await api.get("/api/queues")}
    now += 10
    api.shards.process[0] |= {"cpu_seconds": 1.0, "syncs": 4.0, "gone_published": 7.0}
    await api.get("/api/shards/load")
    now += 4
    api.shards.published += 10
    api.shards.process[0] = {"rss_bytes": 1.0, "cpu_seconds": 2.0, "gone_published": 10.0}
    rows = await api.get("/api/shards/load")
    for row in rows:
        here = sum(shard == row["shard"] for shard in placed.values())
        assert (row["queues"], row["messages_ready"], row["messages_unacknowledged"]) == (
            here,
            3 * here,
            here,
        )
        assert (row["messages"], row["message_bytes"], row["consumers"]) == (
            4 * here,
            40 * here,
            here,
        )
        gone = 3 if row["shard"] == 0 else 0  # by queues that are deleted: it was work all the same
        assert row["publish_per_s"] == pytest.approx((10 * here + gone) / 4)
    assert rows[0]["cpu"] == pytest.approx(1 / 4)


async def test_a_silent_shard_is_there_without_numbers(api: Api) -> None:
    api.shards.silent = True
    rows = await api.get("/api/shards/load")
    assert [row["shard"] for row in rows] == [0, 1]
    assert all("messages" not in row for row in rows)


async def test_queues_of_a_shard_are_those_placed_there_page_by_page(api: Api) -> None:
    for number in range(12):
        await api.call("PUT", f"/api/queues/%2F/{number:02}", {})
    every = await api.get("/api/queues")
    seen = []
    for shard in (0, 1):
        here = sorted(row["name"] for row in every if row["shard"] == shard)
        assert [row["name"] for row in await api.get(f"/api/shards/{shard}/queues")] == here
        page = await api.get(
            f"/api/shards/{shard}/queues?page=1&page_size=2&sort=name&sort_reverse=true"
        )
        assert [row["name"] for row in page["items"]] == here[::-1][:2] and page[
            "total_count"
        ] == len(here)
        seen += here
    assert len(seen) == 12
    for absent in ("2", "x", "-1", "00"):
        assert (await api.call("GET", f"/api/shards/{absent}/queues"))[0] == 404


# -- logs ------------------------------------------------------------------------------------------


def row(time: float, process: str, message: str = "m", **more: Any) -> dict[str, Any]:
    return {
        "time": time,
        "level": "info",
        "process": process,
        "logger": "l",
        "message": message,
        **more,
    }


def write(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    (folder / f"log-{name}").write_text("".join(json.dumps(one) + "\n" for one in rows))


async def test_lines_of_all_processes_come_in_the_order_of_time(api: Api, tmp_path: Path) -> None:
    write(tmp_path, "shard-0", row(1.0, "shard-0"), row(4.0, "shard-0", exception="Traceback"))
    write(tmp_path, "shard-0.1", row(0.5, "shard-0", "of the file before"))
    write(tmp_path, "controller", row(2.0, "controller", "<b>ü"), row(3.0, "controller"))
    found = await api.get("/api/logs")
    assert [one["time"] for one in found] == [0.5, 1.0, 2.0, 3.0, 4.0]
    assert found[2]["message"] == "<b>ü" and found[4]["exception"] == "Traceback"
    assert [one["time"] for one in await api.get("/api/logs?since=2.0")] == [3.0, 4.0]
    assert (await api.call("GET", "/api/logs?since=yesterday"))[0] == 400


async def test_only_an_administrator_reads_the_logs(api: Api) -> None:
    await api.call("PUT", "/api/users/m", {"password": "m", "tags": "monitoring"})
    api.login = ("m", "m")
    assert (await api.call("GET", "/api/logs"))[0] == 401


LOGIN = {"Authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="}


async def test_the_log_comes_as_events_what_there_is_and_what_follows(
    api: Api, tmp_path: Path
) -> None:
    write(tmp_path, "shard-0", row(1.0, "shard-0"), row(2.0, "shard-0", "a\nb"))
    async with asyncio.timeout(PATIENCE_S), api.client.get("/api/livelog", headers=LOGIN) as answer:
        assert answer.content_type == "text/event-stream"
        first, second = [await event(answer) for _ in range(2)]
        assert first == (1.0, row(1.0, "shard-0")) and second == (2.0, row(2.0, "shard-0", "a\nb"))
        write(tmp_path, "controller", row(3.0, "controller"))
        assert await event(answer) == (3.0, row(3.0, "controller"))
    async with (
        asyncio.timeout(PATIENCE_S),
        api.client.get("/api/livelog", headers=LOGIN | {"Last-Event-ID": "2.0"}) as answer,
    ):
        assert await event(answer) == (3.0, row(3.0, "controller"))


async def event(answer: aiohttp.ClientResponse) -> tuple[float, Any]:
    lines = [await answer.content.readline() for _ in range(3)]
    assert lines[0].startswith(b"id: ") and lines[1].startswith(b"data: ") and lines[2] == b"\n"
    return float(lines[0][4:]), json.loads(lines[1][6:])


async def test_few_read_the_log_as_it_comes(api: Api) -> None:
    async with asyncio.timeout(PATIENCE_S), contextlib.AsyncExitStack() as those:
        for _ in range(LIVE_MAX):
            await those.enter_async_context(api.client.get("/api/livelog", headers=LOGIN))
        assert (await api.call("GET", "/api/livelog"))[0] == 503
        assert (await api.call("GET", "/api/livelog", headers={"Last-Event-ID": "now"}))[0] == 400


def test_what_is_cut_or_damaged_is_left_out_and_the_newest_are_kept(tmp_path: Path) -> None:
    many = [row(float(i), "a", "x" * 50) for i in range(3 * ROWS_MAX)]
    write(tmp_path, "a", *many)
    text = (tmp_path / "log-a").read_bytes()
    assert len(text) > TAIL_BYTES_MAX
    (tmp_path / "log-b").write_bytes(
        b'\xff\n{"time": "x"}\n[]\n3\n{"time": 1}\n'
        + json.dumps(row(9e9, "b")).encode()
        + b'\n{"ti'
    )
    found = last_lines(tmp_path)
    assert len(found) <= ROWS_MAX
    assert [one["process"] for one in found[-2:]] == ["a", "b"]
    assert found[-2]["time"] == many[-1]["time"]
    assert [one["time"] for one in found] == sorted(one["time"] for one in found)


def test_a_process_keeps_its_last_lines_and_no_more(tmp_path: Path) -> None:
    handler = logs.keep(str(tmp_path), "shard-7")
    try:
        for number in range(20_000):
            handler.handle(logging.LogRecord("l", logging.INFO, "f", 1, "line %d", (number,), None))
    finally:
        logs.keep_no_more(handler)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["log-shard-7", "log-shard-7.1"]
    assert all(path.stat().st_size <= logs.KEPT_BYTES_MAX for path in files)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert last_lines(tmp_path)[-1]["message"] == "line 19999"


def test_a_log_that_cannot_be_kept_harms_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = logs.keep(str(tmp_path / "absent"), "shard-7")
    try:
        handler.handle(logging.LogRecord("l", logging.INFO, "f", 1, "line", (), None))
    finally:
        logs.keep_no_more(handler)
    assert capfd.readouterr().err == ""


# -- rates -----------------------------------------------------------------------------------------


async def test_looks_at_totals_alone_take_no_connections_rate_away(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, received = 1_000.0, 100
    monkeypatch.setattr(api.context.stats, "_clock", lambda: now)

    async def reports(totals_only: bool = False) -> list[DoorReport]:
        row = {"owner": OWNER, "recv_oct": received, "send_oct": 0}
        return [DoorReport(1, [] if totals_only else [row], [], {})]

    monkeypatch.setattr(api.doors, "reports", reports)
    await api.get("/api/connections")
    for _ in range(3):
        now, received = now + 2, received + 10
        await api.get("/api/overview")
    now += 2
    (row,) = await api.get("/api/connections")
    assert row["recv_oct_details"]["rate"] == pytest.approx(30 / 8)


# -- who holds messages, and how lists are searched ------------------------------------------------


async def test_who_holds_unacknowledged_messages_is_listed_the_oldest_one_first(api: Api) -> None:
    await api.call("PUT", "/api/queues/%2F/q", {})
    held = {"channel": 1, "consumer_tag": "tag"}
    here = {"connection_name": CONNECTION, "channel_name": f"{CONNECTION} (1)"}
    gone = {"connection_name": None, "channel_name": None}
    assert await api.get("/api/queues/%2F/q/unacked/consumers") == [
        {**held, **gone, "messages_unacknowledged": 2, "unacked_for": 20},
        {**held, **here, "messages_unacknowledged": 1, "unacked_for": 10},
    ]
    assert (await api.call("GET", "/api/queues/%2F/x/unacked/consumers"))[0] == 404


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("consumers?name=TAG", 1), ("consumers?name=Q", 1), ("consumers?name=5000", 1),
        ("consumers?name=guest", 0), ("consumers?name=^t.g$&use_regex=true", 1),
        ("connections?name=ME", 1), ("connections?name=5000", 1), ("connections?name=guest", 0),
    ],
)  # fmt: skip
async def test_consumers_are_searched_by_tag_queue_and_channel_connections_by_both_names(
    api: Api, where: str, found: int
) -> None:
    await api.call("PUT", "/api/queues/%2F/q", {})
    assert len(await api.get(f"/api/{where}")) == found
