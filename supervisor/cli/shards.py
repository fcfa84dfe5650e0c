"""shards plan, set, status: how many shard queues a stream exchange has, and how a change of that gets on."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from shardmq.supervisor.cli.api import USAGE, Api, Rows, Vhost, fail
from shardmq.supervisor.cli.command import Formatter, bound
from shardmq.supervisor.cli.show import show

shards = typer.Typer(no_args_is_help=True, help="How many shard queues a stream exchange has.")

Exchange = Annotated[str, typer.Argument(metavar="EXCHANGE")]
LOOK_S = 0.5
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
    """What another number of shard queues would move, and how much must be consumed before that."""
    body = {"number": _checked(number)}
    found = api.ask(
        "exchanges", vhost, exchange, "shards", "plan", body=body, thing=_named(exchange, vhost)
    )
    if formatter == "json":
        typer.echo(json.dumps(found))
        return
    typer.echo(f"{found['shards']} shard queues, then {found['new_shards']}")
    typer.echo(
        f"{found['share_moving']:.0%} of the keys go to another queue; {found['to_settle']} messages go before"
    )
    for word in ("coming", "going"):
        for name in found[word]:
            typer.echo(f"{word}: {name}")


def set_number(
    api: Api,
    exchange: Exchange,
    number: Number,
    vhost: Vhost = "/",
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when the change is through.")
    ] = False,
) -> None:
    """Change the number of shard queues, whatever made the exchange a stream exchange; `status` says how far it is."""
    api.put("exchanges", vhost, exchange, "shards", body={"number": _checked(number)})
    if wait:
        _wait(api, exchange, vhost)


def status(
    api: Api,
    exchange: Exchange,
    vhost: Vhost = "/",
    formatter: Formatter = "table",
    wait: Annotated[bool, typer.Option("--wait", help="Until no change is under way.")] = False,
) -> None:
    """The shard queues, and how far a change of their number is."""
    if wait:
        _wait(api, exchange, vhost)
    found = api.get("exchanges", vhost, exchange, "shards", thing=_named(exchange, vhost))
    if formatter == "json":
        typer.echo(json.dumps(found))
        return
    typer.echo(_told(found))
    for group in found["groups"]:
        typer.echo(_told_of(group))
    show(
        Rows(found["queues"], ["name", "shard", "state", "bound", "held", "messages", "to_settle"]),
        formatter,
    )


def _told(found: dict[str, Any]) -> str:
    if found["step"] == "none":
        return "no change under way"
    unknown = f", of {found['unknown']} queues not known yet" if found["unknown"] else ""
    limit = (
        f"; at {found['deadline_ms']} ms: {found['at_deadline']}"
        if found["deadline_ms"] is not None
        else ""
    )
    return f"{found['step']}: {_bar(found)}{found['to_settle']} messages to go{unknown}{limit}"


def _told_of(group: dict[str, Any]) -> str:
    """Of a group that has to read the end of what came before a change."""
    if group["waits_for"] is None:
        return f"group '{group['group']}' waits for the change"
    rest, number = "', '".join(group["waits_for"]), group["changes"]
    return f"group '{group['group']}' has {number} changes before it, and first to settle the rest of '{rest}'"


def _bar(found: dict[str, Any]) -> str:
    """How much of what is to be settled is."""
    total = found["to_settle_at_first"]
    if not total:
        return ""
    done = (total - found["to_settle"]) / total
    full = int(done * BAR_CHARS)
    return f"[{'#' * full}{'-' * (BAR_CHARS - full)}] {done:.0%}, "


def _wait(api: Api, exchange: str, vhost: str) -> None:
    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        bar = progress.add_task("", total=None)
        while True:
            found = api.get("exchanges", vhost, exchange, "shards", thing=_named(exchange, vhost))
            if found["step"] == "none":
                return
            total = found["to_settle_at_first"]
            progress.update(
                bar,
                description=found["step"],
                total=total or None,
                completed=total - found["to_settle"],
            )
            time.sleep(LOOK_S)


def _checked(number: str) -> int | str:
    if number == "auto":
        return number
    if not (number.isascii() and number.isdigit()):
        fail(f'neither a number nor "auto": {number}', USAGE)
    return int(number)


def _named(exchange: str, vhost: str) -> str:
    return f"exchange '{exchange}' in vhost '{vhost}'"


for name, command in (("plan", plan), ("set", set_number), ("status", status)):
    shards.command(name)(bound(command))
