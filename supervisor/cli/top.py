"""The command `shardctl top`: the broker on a screen that is refreshed, with keys.

rich draws the screen, as it draws the tables of shardctl; no other terminal library is needed. What
a key does is in screen_state.py. The broker sorts, filters and cuts long lists, so that a screen
costs the same with ten queues and with ten thousand.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from shardmq.supervisor.cli.api import USAGE, Api, Rows, fail
from shardmq.supervisor.cli.names import complete_vhosts
from shardmq.supervisor.cli.screen_state import (
    HELP,
    HELP_OF_CLUSTER,
    NODE,
    NODES,
    VIEWS,
    ScreenState,
)
from shardmq.supervisor.cli.show import table

# The counters whose rates are shown, and the words for them.
COUNTERS = {"publish": "in", "deliver_get": "out", "ack": "acked"}
PROCESSES = ["name", "state", "restarts", "rss MB", "fds", "status"]
SHARDS = ["shard", "queues", "messages", "cpu %", "disk MB", "alarm"]
OBJECTS = ("connections", "channels", "consumers", "queues")
HEIGHT_FIXED = 12  # The lines of the screen that show no row.
ROWS_MAX = 500  # The rows that the HTTP API gives in one page.
KEY_BYTES = 32


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


class Screen:
    """The numbers of the broker as a screen shows them."""

    def __init__(self, api: Api, state: ScreenState) -> None:
        self._api, self._state = api, state
        self._rates = Rates()
        self._per_second: dict[str, float] = {}
        self._overview: dict[str, Any] = {}
        self._processes: list[dict[str, Any]] = []
        self._shards: list[dict[str, Any]] = []
        self._nodes: list[dict[str, Any]] = []  # of a cluster

    def poll(self) -> None:
        """Ask for the totals, processes and shards, and compute the rates since the last time.

        The command ends if the state takes the broker for a cluster, and it is none.
        """
        self._overview, self._shards = self._api.get("overview"), self._api.get("shards")
        self._processes = self._api.get("processes")
        is_cluster = any(NODE.key in row for row in self._shards)
        if self._state.is_cluster and not is_cluster:
            fail("the broker is no cluster: it has no nodes to list, or to sort by", USAGE)
        self._state.is_cluster = is_cluster
        self._nodes = self._api.get("nodes") if is_cluster else []
        stats = self._overview.get("message_stats", {})
        counters = {shown: float(stats.get(name, 0)) for name, shown in COUNTERS.items()}
        cpu = {
            f"shard {row['shard']}": 100 * row["cpu_seconds"]
            for row in self._shards
            if row.get("cpu_seconds") is not None
        }
        self._per_second = self._rates.rate(time.monotonic(), counters | cpu)
        for row in self._processes:
            row |= {"rss MB": (row.get("rss_bytes") or 0) / 1e6, "fds": row.get("fd_used")}
        for row in self._shards:
            row["messages"] = row.get("live_messages")
            row["disk MB"] = (row.get("disk_bytes") or 0) / 1e6
            row["cpu %"] = self._per_second.get(f"shard {row['shard']}")
        for row in self._nodes:
            own = [shard["queues"] for shard in self._shards if shard["node"] == row["name"]]
            row |= {"state": "running" if row["running"] else "down", "queues": sum(own)}
            for shown, key, size in (
                ("memory MB", "mem_used", 1e6),
                ("disk free MB", "disk_free", 1e6),
                ("up s", "uptime", 1e3),
            ):
                row[shown] = row[key] / size if key in row else None

    def vhosts(self) -> list[str]:
        """Return the names of the vhosts."""
        return [row["name"] for row in self._api.get("vhosts")]

    def draw(self, height: int, has_keys: bool) -> Group:
        """Return the screen, after asking for the rows of the list that is in view.

        Args:
            height: The lines of the terminal.
            has_keys: Whether to show the line about the keys.
        """
        state, view = self._state, self._state.view
        totals, objects = self._overview["queue_totals"], self._overview["object_totals"]
        head = "   ".join([
            f"{totals['messages_ready']:,} ready, {totals['messages_unacknowledged']:,} unacked",
            ", ".join(f"{self._per_second[name]:,.0f}/s {name}" for name in COUNTERS.values()),
            ", ".join(f"{objects[name]:,} {name}" for name in OBJECTS),
        ])  # fmt: skip
        parts: list[Any] = [Text(head, style="bold"), Text(state.line()), ""]
        room = height - HEIGHT_FIXED
        if view.name == "overview":
            room -= len(self._processes) + len(self._shards)
            in_cluster = [NODE.shown] if state.is_cluster else []
            parts += [table(Rows(self._processes, [*PROCESSES, *in_cluster])), ""]
            parts += [table(Rows(self._shards, [*SHARDS, *in_cluster])), ""]
        rows = self._rows(min(ROWS_MAX, max(5, room)))
        parts.append(table(Rows(rows, [column.shown for column in view.columns])))
        if has_keys:
            parts += ["", Text(HELP_OF_CLUSTER if state.is_cluster else HELP, style="dim")]
        return Group(*parts)

    def _rows(self, most: int) -> list[dict[str, Any]]:
        state, view = self._state, self._state.view
        if view.is_paged:
            query = {"sort": state.column.key, "sort_reverse": str(state.is_reverse).lower()}
            query |= {"page": "1", "page_size": str(most)}
            query |= {"name": state.filter} if state.filter else {}
            rows = self._api.get(*view.path(state.vhost), **query)["items"]
        else:
            known = {"shards": self._shards, NODES.name: self._nodes}
            path = view.path(state.vhost)
            rows = known[view.name] if view.name in known else self._api.get(*path)
            rows = [row for row in rows if state.shows(row)]
            rows.sort(key=lambda row: _sortable(state.column.value(row)), reverse=state.is_reverse)
        return [{c.shown: c.value(row) for c in view.columns} for row in rows[:most]]


def _sortable(value: Any) -> tuple[bool, float, str]:
    """Return a key that sorts numbers before texts, and what is absent as the least."""
    is_text = isinstance(value, str | list)
    return is_text, -math.inf if value is None or is_text else float(value), str(value)


def top(
    api: Api,
    interval: float = typer.Option(
        2.0, "--interval", "-d", min=0.2, help="Seconds between two polls."
    ),
    count: int = typer.Option(0, "--count", "-c", min=0, help="Number of polls. 0: until Ctrl-C."),
    view: Annotated[
        str,
        typer.Option(
            help=f"The list to begin with: {', '.join(view.name for view in VIEWS)}, "
            f"in a cluster also {NODES.name}."
        ),
    ] = VIEWS[0].name,
    sort: Annotated[str, typer.Option(help="The column to sort by, as its heading.")] = "",
    filter: Annotated[str, typer.Option(help="Show names with this text only.")] = "",
    vhost: Annotated[
        str,
        typer.Option(
            "--vhost", "-p", help="Only this vhost. Default: all.", autocompletion=complete_vhosts
        ),
    ] = "",
) -> None:
    """Watch rates, processes, shards, queues, connections, groups and nodes.

    On a terminal, keys choose the list, its order, a filter and a vhost, as the last line says.
    In a file or pipe the polls follow each other.
    """
    state = ScreenState(filter=filter, vhost=vhost or None)
    # The first poll tells whether the broker is a cluster.
    state.is_cluster = view == NODES.name or sort == NODE.shown
    if not state.look_at(view):
        fail(f"--view: one of {', '.join(one.name for one in VIEWS)}, not {view}", USAGE)
    if sort and not state.sort_by(sort):
        known = ", ".join(column.shown for column in state.view.columns)
        fail(f"--sort: one of {known}, not {sort}", USAGE)
    console, screen = Console(), Screen(api, state)
    said = io.StringIO()
    try:
        if not console.is_terminal:
            _print_polls(screen, console, interval, count)
            return
        with (
            contextlib.redirect_stderr(said),  # The screen would hide why the command ends.
            Live(console=console, auto_refresh=False, screen=True) as live,
            _keys() as keys,
        ):
            _run(screen, state, live, keys, interval, count)
    except KeyboardInterrupt:
        return
    finally:
        sys.stderr.write(said.getvalue())


def _print_polls(screen: Screen, console: Console, interval: float, count: int) -> None:
    polls = 0
    while True:
        screen.poll()
        console.print(screen.draw(console.height, False))
        polls += 1
        if polls == count:
            return
        time.sleep(interval)


def _run(
    screen: Screen, state: ScreenState, live: Live, keys: int | None, interval: float, count: int
) -> None:
    """Refresh the screen until a key or the count ends it.

    Args:
        screen: The numbers.
        state: What the keys change.
        live: The terminal.
        keys: The descriptor that keys are read from, or None without a keyboard.
        interval: The seconds between two polls.
        count: The number of polls, or 0 for no limit.
    """
    polls, due = 0, 0.0
    while not state.is_over:
        if not state.is_paused and time.monotonic() >= due:
            screen.poll()
            polls, due = polls + 1, time.monotonic() + interval
        live.update(screen.draw(live.console.height, keys is not None), refresh=True)
        if polls == count:
            return
        rest = interval if state.is_paused else max(0.0, due - time.monotonic())
        if keys is None:
            time.sleep(rest)
        elif select.select([keys], [], [], rest)[0]:
            pressed = os.read(keys, KEY_BYTES).decode("utf-8", "ignore")
            if not pressed:
                return
            state.press(pressed, screen.vhosts)


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Make the terminal hand on each key at once, and yield the descriptor to read keys from."""
    if not sys.stdin.isatty():
        yield None
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
