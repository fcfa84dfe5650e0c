"""The command `shardctl top`: rates, processes, shards and queues, refreshed until Ctrl-C."""

from __future__ import annotations

import time
from contextlib import nullcontext

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from shardmq.supervisor.cli.api import Api, Rows
from shardmq.supervisor.cli.show import table

# The counters whose rates are shown, and the words for them.
COUNTERS = {"publish": "in", "deliver_get": "out", "ack": "acked"}
PROCESSES = ["name", "state", "restarts", "rss MB", "fds", "status"]
SHARDS = ["shard", "queues", "messages", "cpu %", "disk MB", "alarm"]
OBJECTS = ("connections", "channels", "consumers", "queues")
QUEUES = ["vhost", "name", "shard", "ready", "unacked", "consumers"]
HEIGHT_FIXED = 12  # The lines of the screen that show no queue, process or shard.


class Rates:
    """The rates of counters between two polls of the broker."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._at = 0.0

    def rate(self, now: float, counters: dict[str, float]) -> dict[str, float]:
        """Return the rate of each counter per second since the poll before.

        A rate is 0 at the first poll, and if the counter has begun from 0 again.

        Args:
            now: The time in seconds, on a clock that never goes back.
            counters: The values of the counters by name.
        """
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
    interval: float = typer.Option(
        2.0, "--interval", "-d", min=0.2, help="Seconds between two polls."
    ),
    count: int = typer.Option(0, "--count", "-c", min=0, help="Number of polls. 0: until Ctrl-C."),
) -> None:
    """Watch rates, processes, shards and the fullest queues.

    In a file or pipe the polls follow each other.
    """
    console, rates, polls = Console(), Rates(), 0
    with (
        Live(console=console, auto_refresh=False, screen=True)
        if console.is_terminal
        else nullcontext() as live
    ):
        try:
            while True:
                screen = _screen(api, rates, console.height)
                if live is None:
                    console.print(screen)
                else:
                    live.update(screen, refresh=True)
                polls += 1
                if count and polls >= count:
                    break
                time.sleep(interval)
        except KeyboardInterrupt:
            return


def _screen(api: Api, rates: Rates, height: int) -> Group:
    """Poll the broker and return the screen."""
    overview, processes, shards = api.get("overview"), api.get("processes"), api.get("shards")
    most = max(5, height - HEIGHT_FIXED - len(processes) - len(shards))
    queues = api.get("queues", sort="messages", sort_reverse="true", page="1", page_size=str(most))
    stats = overview.get("message_stats", {})
    counters = {shown: float(stats.get(name, 0)) for name, shown in COUNTERS.items()}
    cpu = {
        f"shard {row['shard']}": 100 * row["cpu_seconds"]
        for row in shards
        if row.get("cpu_seconds") is not None
    }
    per_second = rates.rate(time.monotonic(), counters | cpu)
    totals, objects = overview["queue_totals"], overview["object_totals"]
    head = "   ".join([
        f"{totals['messages_ready']:,} ready, {totals['messages_unacknowledged']:,} unacked",
        ", ".join(f"{per_second[name]:,.0f}/s {name}" for name in COUNTERS.values()),
        ", ".join(f"{objects[name]:,} {name}" for name in OBJECTS),
    ])  # fmt: skip
    for row in processes:
        row |= {"rss MB": (row.get("rss_bytes") or 0) / 1e6, "fds": row.get("fd_used")}
    for row in shards:
        row["messages"] = row.get("live_messages")
        row["disk MB"] = (row.get("disk_bytes") or 0) / 1e6
        row["cpu %"] = per_second.get(f"shard {row['shard']}")
    for row in queues["items"]:
        row["ready"] = row.get("messages_ready")
        row["unacked"] = row.get("messages_unacknowledged")
    return Group(
        Text(head, style="bold"), "", table(Rows(processes, PROCESSES)), "",
        table(Rows(shards, SHARDS)), "", table(Rows(queues["items"], QUEUES)),
    )  # fmt: skip
