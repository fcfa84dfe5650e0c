"""Super streams by rabbitmq-streams' names: several streams behind one name, as stream exchanges make them."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from shardmq.supervisor.cli.api import REFUSED, USAGE, Api, Vhost, fail
from shardmq.supervisor.cli.node import size_bytes

PARTITIONS = 3  # rabbitmq-streams' default
SECONDS = {"Y": 365 * 86_400, "M": 30 * 86_400, "W": 7 * 86_400, "D": 86_400}
SECONDS_OF_DAY = {"H": 3_600, "M": 60, "S": 1}
DURATION = re.compile(r"P(?=.)((?:\d+[YMWD])*)(?:T((?:\d+[HMS])+))?")
PIECE = re.compile(r"(\d+)(\w)")
AGE = re.compile(r"\d+[YMDhms]")  # as x-max-age has it

Name = Annotated[str, typer.Argument(metavar="NAME")]
Ignored = "Taken as rabbitmq-streams'; there is one host."


def add_super_stream(
    api: Api,
    name: Name,
    partitions: Annotated[
        int | None, typer.Option(min=1, help=f"How many streams; {PARTITIONS} if not said.")
    ] = None,
    binding_keys: Annotated[
        str | None,
        typer.Option(
            "--binding-keys", "--routing-keys", help="Comma separated: a stream for each key."
        ),
    ] = None,
    max_length_bytes: Annotated[
        str | None, typer.Option(help="Of each stream, such as 20gb.")
    ] = None,
    max_age: Annotated[
        str | None, typer.Option(help="Such as PT10M30S or P5DT8H; or as x-max-age: 7D.")
    ] = None,
    stream_max_segment_size_bytes: Annotated[
        str | None, typer.Option(help="Such as 500mb.")
    ] = None,
    leader_locator: Annotated[str | None, typer.Option(help=Ignored)] = None,
    initial_cluster_size: Annotated[int | None, typer.Option(help=Ignored)] = None,
    vhost: Vhost = "/",
) -> None:
    """Make an exchange that spreads over streams: by a hash of the routing key, or a stream for each binding key."""
    if partitions is not None and binding_keys is not None:
        fail("--partitions or --binding-keys, not both", USAGE)
    arguments: dict[str, Any] = {"x-queue-type": "stream"}
    if max_length_bytes is not None:
        arguments["x-max-length-bytes"] = size_bytes(max_length_bytes)
    if max_age is not None:
        arguments["x-max-age"] = age(max_age)
    if stream_max_segment_size_bytes is not None:
        arguments["x-stream-max-segment-size-bytes"] = size_bytes(stream_max_segment_size_bytes)
    if api.has("exchanges", vhost, name):
        fail(f"exchange '{name}' in vhost '{vhost}' exists already", REFUSED)
    if binding_keys is None:
        shards = {"x-super-stream": partitions or PARTITIONS, "x-shard-arguments": arguments}
        body = {
            "type": "x-consistent-hash",
            "durable": True,
            "arguments": shards | {"x-shards-when-gone": "delete"},
        }
        api.put("exchanges", vhost, name, body=body)
        return
    keys = list(dict.fromkeys(key.strip() for key in binding_keys.split(",") if key.strip()))
    if not keys:
        fail("--binding-keys: none", USAGE)
    api.put("exchanges", vhost, name, body={"type": "direct", "durable": True})
    for order, key in enumerate(keys):
        stream = f"{name}-{key}"
        api.put("queues", vhost, stream, body={"durable": True, "arguments": arguments})
        bound = {"routing_key": key, "arguments": {"x-stream-partition-order": order}}
        api.post("bindings", vhost, "e", name, "q", stream, body=bound)


def delete_super_stream(api: Api, name: Name, vhost: Vhost = "/") -> None:
    """Delete such an exchange, and its streams with all that is in them."""
    thing = f"super stream '{name}' in vhost '{vhost}'"
    exchange: dict[str, Any] = api.get("exchanges", vhost, name, thing=thing)
    bound = api.get("exchanges", vhost, name, "bindings", "source")
    names = {row["destination"] for row in bound if row["destination_type"] == "queue"}
    names.update(exchange.get("shard_queues", []))
    streams = {
        row["name"]
        for row in api.get("queues", vhost)
        if row["name"] in names and row.get("type") == "stream"
    }
    if not streams or streams != names:
        fail(
            f"exchange '{name}' in vhost '{vhost}' is no super stream: it leads to other queues than streams, or none"
        )
    api.delete("exchanges", vhost, name)
    for stream in sorted(streams):
        if api.has("queues", vhost, stream):  # an exchange's own go with it
            api.delete("queues", vhost, stream)


def age(text: str) -> str:
    """As x-max-age has it. Months are 30 days, years 365, as rabbitmq-streams counts them."""
    if AGE.fullmatch(text):
        return text
    found = DURATION.fullmatch(text)
    if found is None:
        fail(f"--max-age: neither an ISO 8601 duration, such as PT10M30S, nor 7D: {text}", USAGE)
    parts = ((found[1], SECONDS), (found[2] or "", SECONDS_OF_DAY))
    return f"{sum(int(number) * units[unit] for part, units in parts for number, unit in PIECE.findall(part))}s"
