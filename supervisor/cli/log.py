"""The commands log_tail, log_tail_stream and log_location.

They show the last lines of all processes of the broker, wherever the log goes.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import typer

from shardmq.supervisor.cli.api import Api
from shardmq.supervisor.logs import LogFollower, escaped, exception_lines

LINES_MAX = 1_000  # The number of lines in one response.
POLL_INTERVAL_S = 0.5


def log_tail(
    api: Api,
    number: int = typer.Option(10, "--number", "-N", min=1, max=LINES_MAX, help="Lines."),
) -> None:
    """Show the last lines of the log of all processes."""
    for row in api.get("logs")[-number:]:
        typer.echo(line(row))


def log_tail_stream(
    api: Api,
    duration: float | None = typer.Option(
        None, "--duration", "-d", help="Seconds. Default: until Ctrl-C."
    ),
) -> None:
    """Show what is logged from now on, until Ctrl-C."""
    end = None if duration is None else time.monotonic() + duration
    follower = LogFollower(api.get("logs"))
    try:
        while end is None or time.monotonic() < end:
            time.sleep(POLL_INTERVAL_S)
            for row in follower.new_rows(api.get("logs", since=str(follower.since))):
                typer.echo(line(row))
    except KeyboardInterrupt:
        return


def log_location(api: Api) -> None:
    """List the files with the last lines of each process.

    The whole log is in the journal, or where standard error goes.
    """
    for node in api.get("nodes"):
        for path in node["log_files"]:
            typer.echo(path)


def line(row: dict[str, Any]) -> str:
    """Return a row of the log as a process writes it to standard error, the exception below."""
    at = datetime.fromtimestamp(row["time"]).astimezone().isoformat(" ", "milliseconds")
    said = f"{at} {row.get('level', '').upper()} {row.get('process', '')} {row.get('logger', '')}: "
    exception = exception_lines(row["exception"]) if row.get("exception") else []
    return "\n".join([f"{said}{escaped(row.get('message', ''))}", *exception])
