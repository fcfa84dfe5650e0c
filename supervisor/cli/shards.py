"""The commands `shards plan`, `set` and `status` for the shard queues of a stream exchange."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from shardmq.supervisor.cli.api import USAGE, Api, Rows, fail
from shardmq.supervisor.cli.command import Formatter, bound
from shardmq.supervisor.cli.names import Exchange, Vhost
from shardmq.supervisor.cli.show import show

shards = typer.Typer(no_args_is_help=True, help="The number of shard queues of a stream exchange.")

POLL_INTERVAL_S = 0.5
BAR_CHARS = 20

Number = Annotated[
    str, typer.Argument(metavar="NUMBER", help='Or "auto": one for each shard process.')
]


def plan(
    api: Api,
    exchange: Exchange,
    number: Number,
    vhost: Vhost = "/",
    formatter: Formatter = "table",
) -> None:
    """Show what another number of shard queues would move.

    The plan also shows how many messages must be consumed before the change.
    """
    body = {"number": _checked(number)}
    thing = f"exchange '{exchange}' in vhost '{vhost}'"
    found = api.post("exchanges", vhost, exchange, "shards", "plan", body=body, thing=thing)
    if formatter == "json":
        typer.echo(json.dumps(found))
        return
    typer.echo(f"{found['shards']} shard queues, then {found['new_shards']}")
    typer.echo(
        f"{found['share_moving']:.0%} of the keys go to another queue;"
        f" {found['to_settle']} messages are consumed first"
    )
    for verb, key in (("add", "coming"), ("empty and delete", "going")):
        for name in found[key]:
            typer.echo(f"{verb} {name}")


def set_number(
    api: Api,
    exchange: Exchange,
    number: Number,
    vhost: Vhost = "/",
    wait: bool = typer.Option(False, "--wait", help="Return when the change is complete."),
) -> None:
    """Change the number of shard queues, however the exchange became a stream exchange.

    `shards status` shows the progress.
    """
    api.put("exchanges", vhost, exchange, "shards", body={"number": _checked(number)})
    if wait:
        _wait(api, exchange, vhost)


def status(
    api: Api,
    exchange: Exchange,
    vhost: Vhost = "/",
    formatter: Formatter = "table",
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no change runs.")] = False,
) -> None:
    """List the shard queues, and show the progress of a change of their number."""
    if wait:
        _wait(api, exchange, vhost)
    thing = f"exchange '{exchange}' in vhost '{vhost}'"
    found = api.get("exchanges", vhost, exchange, "shards", thing=thing)
    if formatter == "json":
        typer.echo(json.dumps(found))
        return
    typer.echo(_progress(found))
    for group in found["groups"]:
        if group["waits_for"] is None:
            typer.echo(f"group '{group['group']}' waits for the change")
        else:
            # The group has to read the end of the queues from before the change.
            rest = "', '".join(group["waits_for"])
            typer.echo(
                f"group '{group['group']}' has {group['changes']} changes before it,"
                f" and first to settle the rest of '{rest}'"
            )
    columns = ["name", "shard", "state", "bound", "held", "messages", "to_settle"]
    show(Rows(found["queues"], columns), formatter)


def _progress(found: dict[str, Any]) -> str:
    """Return the progress of a change as one line, with a bar of the messages that are settled."""
    if found["step"] == "none":
        return "no change under way"
    line = f"{found['step']}: "
    if total := found["to_settle_at_first"]:
        done = (total - found["to_settle"]) / total
        full = int(done * BAR_CHARS)
        line += f"[{'#' * full}{'-' * (BAR_CHARS - full)}] {done:.0%}, "
    line += f"{found['to_settle']} messages to go"
    if found["unknown"]:
        line += f", of {found['unknown']} queues not known yet"
    if found["deadline_ms"] is not None:
        line += f"; at {found['deadline_ms']} ms: {found['at_deadline']}"
    return line


def _wait(api: Api, exchange: str, vhost: str) -> None:
    thing = f"exchange '{exchange}' in vhost '{vhost}'"
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=None)
        while True:
            found = api.get("exchanges", vhost, exchange, "shards", thing=thing)
            if found["step"] == "none":
                return
            total = found["to_settle_at_first"]
            progress.update(
                bar,
                description=found["step"],
                total=total or None,
                completed=total - found["to_settle"],
            )
            time.sleep(POLL_INTERVAL_S)


def _checked(number: str) -> int | str:
    """Return a number of shard queues or "auto". Any other text ends the command with status 64."""
    if number == "auto":
        return number
    if not (number.isascii() and number.isdigit()):
        fail(f'neither a number nor "auto": {number}', USAGE)
    return int(number)


for name, command in (("plan", plan), ("set", set_number), ("status", status)):
    shards.command(name)(bound(command))
