"""The commands for super streams, by the names of rabbitmq-streams.

A super stream is a stream exchange: several streams behind one name.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from shardmq.supervisor.cli.api import REFUSED, USAGE, Api, fail
from shardmq.supervisor.cli.names import Vhost
from shardmq.supervisor.cli.node import size_bytes

PARTITIONS = 3  # The default of rabbitmq-streams.
# The argument of a binding that says which partition the stream is.
PARTITION_ORDER = "x-stream-partition-order"
SECONDS = {"Y": 365 * 86_400, "M": 30 * 86_400, "W": 7 * 86_400, "D": 86_400}
SECONDS_OF_DAY = {"H": 3_600, "M": 60, "S": 1}
DURATION = re.compile(r"P(?=.)((?:\d+[YMWD])*)(?:T((?:\d+[HMS])+))?")
PIECE = re.compile(r"(\d+)(\w)")
AGE = re.compile(r"\d+[YMDhms]")  # The form of x-max-age.

Name = Annotated[str, typer.Argument(metavar="NAME")]
Ignored = "Accepted for rabbitmq-streams' scripts, and without effect."


def add_super_stream(
    api: Api,
    name: Name,
    partitions: int | None = typer.Option(
        None, min=1, help=f"Number of streams. Default: {PARTITIONS}."
    ),
    binding_keys: str | None = typer.Option(
        None, "--binding-keys", "--routing-keys", help="Comma separated: a stream for each key."
    ),
    max_length_bytes: str | None = typer.Option(None, help="Of each stream, such as 20gb."),
    max_age: str | None = typer.Option(
        None, help="Such as PT10M30S or P5DT8H; or as x-max-age: 7D."
    ),
    stream_max_segment_size_bytes: str | None = typer.Option(None, help="Such as 500mb."),
    leader_locator: Annotated[str | None, typer.Option(help=Ignored)] = None,
    initial_cluster_size: Annotated[int | None, typer.Option(help=Ignored)] = None,
    vhost: Vhost = "/",
) -> None:
    """Declare an exchange that spreads messages over streams.

    A hash of the routing key chooses the stream, or there is one stream for each binding key.
    """
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
        bound = {"routing_key": key, "arguments": {PARTITION_ORDER: order}}
        api.post("bindings", vhost, "e", name, "q", stream, body=bound)


def delete_super_stream(api: Api, name: Name, vhost: Vhost = "/") -> None:
    """Delete a super stream and its streams with all messages in them."""
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
            f"exchange '{name}' in vhost '{vhost}' is no super stream:"
            " it leads to other queues than streams, or none"
        )
    api.delete("exchanges", vhost, name)
    for stream in sorted(streams):
        if api.has("queues", vhost, stream):  # The streams of the exchange are deleted with it.
            api.delete("queues", vhost, stream)


def partitions_of(api: Api, vhost: str, name: str) -> list[str]:
    """Return the streams of RabbitMQ's kind of super stream in their order.

    The list is empty if there is no such super stream.
    """
    if not api.has("exchanges", vhost, name):
        return []
    bound = [
        (row["arguments"][PARTITION_ORDER], row["destination"])
        for row in api.get("exchanges", vhost, name, "bindings", "source")
        if type(row["arguments"].get(PARTITION_ORDER)) is int
    ]
    return [stream for _, stream in sorted(bound)]


def age(text: str) -> str:
    """Return a duration in the form of x-max-age.

    A month is 30 days and a year 365, as rabbitmq-streams counts them. A text that is no duration
    ends the command with status 64.

    Args:
        text: An ISO 8601 duration such as PT10M30S, or the form of x-max-age, such as 7D.
    """
    if AGE.fullmatch(text):
        return text
    found = DURATION.fullmatch(text)
    if found is None:
        fail(f"--max-age: neither an ISO 8601 duration, such as PT10M30S, nor 7D: {text}", USAGE)
    parts = ((found[1], SECONDS), (found[2] or "", SECONDS_OF_DAY))
    seconds = 0
    for part, units in parts:
        seconds += sum(int(number) * units[unit] for number, unit in PIECE.findall(part))
    return f"{seconds}s"
