"""route explain, ring show: where messages go, asked of the code that routes them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from shardmq.supervisor.cli.api import USAGE, Api, Rows, Vhost, fail
from shardmq.supervisor.cli.command import Formatter, bound
from shardmq.supervisor.cli.show import show

route = typer.Typer(no_args_is_help=True, help="Where a message goes.")
ring = typer.Typer(no_args_is_help=True, help="Who gets which part of what an exchange spreads.")

Exchange = Annotated[str, typer.Argument(metavar="EXCHANGE")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The routing key.")]
Headers = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="HEADER=VALUE",
        help="Numbers, true and false are such; a text may have its own quotes.",
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
    """Which queues a message with this key would go to, by which exchanges, and why."""
    body = {"routing_key": key, "headers": _pairs(headers), "properties": _pairs(properties)}
    found = api.ask(
        "exchanges",
        vhost,
        exchange or "amq.default",
        "route",
        body=body,
        thing=_named(exchange, vhost),
    )
    if formatter == "json":
        typer.echo(json.dumps(found))
        return
    for hop in found["hops"]:
        typer.echo(_told(hop))
    show(Rows(found["queues"], ["name", "shard", "index"]), formatter)
    if not found["queues"]:
        typer.echo("no queue: the message would come back if it is mandatory, else be dropped")


def show_ring(
    api: Api,
    exchange: Exchange,
    vhost: Vhost = "/",
    formatter: Formatter = "table",
) -> None:
    """Destinations of an exchange that gives each message to one of them, with the share each is to expect."""
    found = api.get(
        "exchanges", vhost, exchange or "amq.default", "ring", thing=_named(exchange, vhost)
    )
    rows = [row | {"share": row["share"] if formatter == "json" else f"{row['share']:.2%}"}
            for row in found["destinations"]]  # fmt: skip
    show(Rows(rows, ["name", "kind", "shard", "index", "weight", "share"]), formatter)


def _told(hop: dict[str, Any]) -> str:
    """One line about one exchange."""
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
        how = f"{hashed['algorithm']} of {hashed['destinations']} by {hashed['of']} '{hashed['hashed']}'"
        return line + f"{names} ({how}, hash {hashed['value']})"
    return line + names


def _pairs(words: list[str] | None) -> dict[str, Any]:
    pairs = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name:
            fail(f"not NAME=VALUE: {word}", USAGE)
        pairs[name] = _value(value)
    return pairs


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _named(exchange: str, vhost: str) -> str:
    return f"exchange '{exchange}' in vhost '{vhost}'"


route.command("explain")(bound(explain))
ring.command("show")(bound(show_ring))
