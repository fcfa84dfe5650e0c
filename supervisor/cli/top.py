"""shardctl top: who is busy, refreshed until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from shardmq.supervisor.cli.api import Api, Rows
from shardmq.supervisor.cli.show import table

RATES = {"publish": "in", "deliver_get": "out", "ack": "acked"}
PROCESSES = ["name", "state", "restarts", "rss MB", "fds", "status"]
SHARDS = ["shard", "queues", "messages", "cpu %", "disk MB", "alarm"]
QUEUES = ["vhost", "name", "shard", "ready", "unacked", "consumers"]
HEIGHT_FIXED = 12  # lines that are not queues


class Picture:
    """Two looks at the broker, and the rates between them."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._at = 0.0

    def rate(self, now: float, counters: dict[str, float]) -> dict[str, float]:
        """Per second since the look before; 0 at first, and where a counter began anew."""
        seconds = now - self._at
        rates = {
            name: max(0.0, value - self._before[name]) / seconds
            if name in self._before and seconds > 0
            else 0.0
            for name, value in counters.items()
        }
        self._before, self._at = counters, now
        return rates


def top(
    api: Api,
    interval: Annotated[
        float, typer.Option("--interval", "-d", min=0.2, help="Seconds between looks.")
    ] = 2.0,
    count: Annotated[
        int, typer.Option("--count", "-c", min=0, help="Looks, then the end; 0: until Ctrl-C.")
    ] = 0,
) -> None:
    """Watch rates, processes, shards and the fullest queues. Into a file or pipe: one look below the other."""
    console, picture, looks = Console(), Picture(), 0
    with (
        Live(console=console, auto_refresh=False, screen=True)
        if console.is_terminal
        else nullcontext() as live
    ):
        try:
            while True:
                shown = _look(api, picture, console.height)
                if live is None:
                    console.print(shown)
                else:
                    live.update(shown, refresh=True)
                looks += 1
                if count and looks >= count:
                    break
                time.sleep(interval)
        except KeyboardInterrupt:
            return


def _look(api: Api, picture: Picture, height: int) -> Group:
    overview, processes, shards = api.get("overview"), api.get("processes"), api.get("shards")
    most = max(5, height - HEIGHT_FIXED - len(processes) - len(shards))
    queues = api.get("queues", sort="messages", sort_reverse="true", page="1", page_size=str(most))
    stats = overview.get("message_stats", {})
    counters = {shown: float(stats.get(name, 0)) for name, shown in RATES.items()}
    cpu = {
        f"shard {row['shard']}": 100 * row["cpu_seconds"]
        for row in shards
        if row.get("cpu_seconds") is not None
    }
    rates = picture.rate(time.monotonic(), counters | cpu)
    totals, objects = overview["queue_totals"], overview["object_totals"]
    head = "   ".join([
        f"{totals['messages_ready']:,} ready, {totals['messages_unacknowledged']:,} unacked",
        ", ".join(f"{rates[name]:,.0f}/s {name}" for name in RATES.values()),
        ", ".join(f"{objects[name]:,} {name}" for name in ("connections", "channels", "consumers", "queues")),
    ])  # fmt: skip
    return Group(
        Text(head, style="bold"), "", _table(map(_process, processes), PROCESSES), "",
        _table((_shard(row, rates) for row in shards), SHARDS), "",
        _table(map(_queue, queues["items"]), QUEUES),
    )  # fmt: skip


def _table(rows: Iterable[dict[str, Any]], columns: list[str]) -> Any:
    return table(Rows(list(rows), columns))


def _process(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"rss MB": (row.get("rss_bytes") or 0) / 1e6, "fds": row.get("fd_used")}


def _shard(row: dict[str, Any], rates: dict[str, float]) -> dict[str, Any]:
    return row | {
        "messages": row.get("live_messages"),
        "disk MB": (row.get("disk_bytes") or 0) / 1e6,
        "cpu %": rates.get(f"shard {row['shard']}"),
    }


def _queue(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"ready": row.get("messages_ready"), "unacked": row.get("messages_unacknowledged")}
