"""The commands `route explain` and `ring show`: the queues that a message goes to, and why.

The code that routes messages gives the answer.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from shardmq.supervisor.cli.api import Api, Rows, pairs
from shardmq.supervisor.cli.command import Formatter, bound
from shardmq.supervisor.cli.names import Exchange, Vhost
from shardmq.supervisor.cli.show import show

route = typer.Typer(no_args_is_help=True, help="The queues that a message goes to.")
ring = typer.Typer(
    no_args_is_help=True, help="The share of each destination of an exchange that spreads messages."
)

Key = Annotated[str, typer.Argument(metavar="KEY", help="The routing key.")]
Headers = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="HEADER=VALUE",
        help="Numbers, true and false are read as such. A text may have quotes.",
    ),
]
Properties = Annotated[
    list[str] | None, typer.Option("--property", metavar="NAME=VALUE", help="Such as message_id.")
]


def explain(
    api: Api,
    exchange: Exchange,
    key: Key,
    headers: Headers = None,
    properties: Properties = None,
    vhost: Vhost = "/",
    formatter: Formatter = "table",
) -> None:
    """Show the queues that a message with this key would go to, by which exchanges, and why."""
    body = {"routing_key": key, "headers": pairs(headers), "properties": pairs(properties)}
    thing = f"exchange '{exchange}' in vhost '{vhost}'"
    path = ("exchanges", vhost, exchange or "amq.default", "route")
    found = api.post(*path, body=body, thing=thing)
    if formatter == "json":
        typer.echo(json.dumps(found))
        return
    for hop in found["hops"]:
        typer.echo(_describe(hop))
    show(Rows(found["queues"], ["name", "shard", "index"]), formatter)
    if not found["queues"]:
        typer.echo("no queue: the message would come back if it is mandatory, else be dropped")


def show_ring(
    api: Api,
    exchange: Exchange,
    vhost: Vhost = "/",
    formatter: Formatter = "table",
) -> None:
    """List the destinations of an exchange that gives each message to one of them.

    The list shows the share of the messages that each destination can expect.
    """
    thing = f"exchange '{exchange}' in vhost '{vhost}'"
    found = api.get("exchanges", vhost, exchange or "amq.default", "ring", thing=thing)
    rows = found["destinations"]
    if formatter != "json":
        rows = [row | {"share": f"{row['share']:.2%}"} for row in rows]
    show(Rows(rows, ["name", "kind", "shard", "index", "weight", "share"]), formatter)


def _describe(hop: dict[str, Any]) -> str:
    """Return one line about the way of a message through one exchange."""
    names = ", ".join(f"{one['kind']} '{one['name']}'" for one in hop["destinations"])
    line = f"exchange '{hop['exchange']}' ({hop['type']}): "
    if not names:
        return line + (
            f"no match, alternate '{hop['alternate']}'" if hop["alternate"] else "no match"
        )
    if hop["by_chance"]:
        return line + f"by chance one of {names}"
    if "hash" in hop:
        hashed = hop["hash"]
        how = f"{hashed['algorithm']} of {hashed['destinations']}"
        how += f" by {hashed['of']} '{hashed['hashed']}'"
        return line + f"{names} ({how}, hash {hashed['value']})"
    return line + names


route.command("explain")(bound(explain))
ring.command("show")(bound(show_ring))
