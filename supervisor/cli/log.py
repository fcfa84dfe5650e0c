"""log_tail, log_tail_stream, log_location: the last lines of all the broker's processes, wherever its log goes."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated, Any

import typer

from shardmq.supervisor.cli.api import Api
from shardmq.supervisor.logs import LogFollower, escaped, exception_lines

LINES_MAX = 1_000  # what one answer holds
LOOK_EACH_S = 0.5


def log_tail(
    api: Api,
    number: Annotated[
        int, typer.Option("--number", "-N", min=1, max=LINES_MAX, help="Lines.")
    ] = 10,
) -> None:
    """The last lines of the log, of all processes together."""
    for row in api.get("logs")[-number:]:
        typer.echo(line(row))


def log_tail_stream(
    api: Api,
    duration: Annotated[
        float | None, typer.Option("--duration", "-d", help="Seconds; else on and on.")
    ] = None,
) -> None:
    """What is logged from now on, as it comes, until Ctrl-C."""
    end = None if duration is None else time.monotonic() + duration
    follower = LogFollower(api.get("logs"))
    try:
        while end is None or time.monotonic() < end:
            time.sleep(LOOK_EACH_S)
            for row in follower.new_rows(api.get("logs", since=str(follower.since))):
                typer.echo(line(row))
    except KeyboardInterrupt:
        return


def log_location(api: Api) -> None:
    """Files with the last lines of each process. The whole log is in the journal, or where standard error goes."""
    for node in api.get("nodes"):
        for path in node["log_files"]:
            typer.echo(path)


def line(row: dict[str, Any]) -> str:
    """As a process writes it to standard error; an exception below."""
    at = datetime.fromtimestamp(row["time"]).astimezone().isoformat(" ", "milliseconds")
    said = f"{at} {row.get('level', '').upper()} {row.get('process', '')} {row.get('logger', '')}: "
    exception = exception_lines(row["exception"]) if row.get("exception") else []
    return "\n".join([f"{said}{escaped(row.get('message', ''))}", *exception])
