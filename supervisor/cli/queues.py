"""The commands for queues, exchanges and bindings, by the names of rabbitmqctl."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated, Any

import typer

from shardmq.supervisor.cli.api import DATA, USAGE, Api, Rows, fail, json_argument, warn
from shardmq.supervisor.cli.arguments import EXCHANGE, QUEUE
from shardmq.supervisor.cli.columns import COLUMNS
from shardmq.supervisor.cli.names import (
    Columns,
    Exchange,
    Queue,
    Stream,
    Vhost,
    complete_exchange_types,
    complete_exchanges,
    complete_queue_types,
    complete_queues,
)
from shardmq.supervisor.cli.streams import partitions_of
from shardmq.supervisor.nearest import did_you_mean

Name = Annotated[str, typer.Argument(metavar="NAME")]
MOVE_LOOK_S = 0.2  # between two looks how far a move is
MEMBER_COLUMNS = ["Node Name", "Raft State", "Membership", "In Sync", "Term"]
# RabbitMQ's arguments that look like misspelt ones of this broker. The broker itself says of them
# that they have no effect.
OF_RABBITMQ = {"x-queue-mode", "x-queue-version"}


class Kind(StrEnum):
    """The kind of the destination of a binding. The first letter is that of the HTTP API."""

    QUEUE = "queue"
    EXCHANGE = "exchange"


Destination = Annotated[
    str,
    typer.Argument(
        metavar="DESTINATION",
        help="The queue, or exchange, that gets messages.",
        autocompletion=complete_queues,
    ),
]
BindingKey = Annotated[str, typer.Option("--routing-key", "-k", "-r", help="The binding key.")]
DestinationKind = Annotated[Kind, typer.Option("--destination-type", help="What DESTINATION is.")]
Arguments = Annotated[
    str, typer.Option(metavar="JSON", help='More arguments, such as \'{"x-max-age": "7D"}\'.')
]

RABBITMQ_NAMES = {
    "source_name": "source",
    "destination_name": "destination",
    "destination_kind": "destination_type",
}


def list_queues(api: Api, columns: Columns = None, vhost: Vhost = "/") -> Rows:
    """List the queues of a vhost."""
    return listed(api, "queues", vhost, columns or ["name", "messages"])


def list_exchanges(api: Api, columns: Columns = None, vhost: Vhost = "/") -> Rows:
    """List the exchanges of a vhost."""
    return listed(api, "exchanges", vhost, columns or ["name", "type"])


def list_bindings(api: Api, columns: Columns = None, vhost: Vhost = "/") -> Rows:
    """List the bindings of a vhost."""
    usual = [
        "source_name",
        "source_kind",
        "destination_name",
        "destination_kind",
        "routing_key",
        "arguments",
    ]
    return listed(api, "bindings", vhost, columns or usual)


def list_virtual_queues(api: Api, columns: Columns = None, vhost: Vhost = "/") -> Rows:
    """List the stream exchanges of a vhost. The shards of each form one virtual queue."""
    return listed(
        api, "virtual-queues", vhost, columns or ["name", "shards", "consumers", "moving"]
    )


def list_shard_owners(
    api: Api,
    queue: Annotated[
        str,
        typer.Argument(
            metavar="QUEUE",
            help="A virtual queue: a stream exchange's name.",
            autocompletion=complete_exchanges,
        ),
    ],
    vhost: Vhost = "/",
) -> Rows:
    """List the shards of a virtual queue with their nodes and the consumers that own them."""
    found: dict[str, Any] = api.get(
        "virtual-queues", vhost, queue, thing=f"virtual queue '{queue}' in vhost '{vhost}'"
    )
    rows = []
    for shard in found["shards"]:
        for owner in shard["owners"] or [{}]:
            channel = owner.get("channel_details", {}).get("name", "")
            rows.append(
                shard
                | {"moving": False}
                | owner
                | {
                    "channel": channel,
                    "owner": owner.get("consumer_tag", ""),
                    "node": shard["node"],
                    "owner_node": owner.get("node", ""),
                }
            )
    columns = ["index", "queue", "shard", "node", "state", "group", "owner", "owner_node"]
    return Rows(rows, [*columns, "channel", "moving"])


def list_stream_tracking(api: Api, stream: Stream, vhost: Vhost = "/") -> Rows:
    """List the names under which a stream is consumed, with offset and lag in each shard.

    The lag is the number of messages between the next offset and the end. Of a super stream with a
    stream for each binding key, all these streams are listed.
    """
    columns = ["reference", "shard", "next", "lag"]
    streams = [] if api.has("streams", vhost, stream) else partitions_of(api, vhost, stream)
    if not streams:
        return Rows(_tracking(api, vhost, stream), columns)
    rows = [{"stream": each, **row} for each in streams for row in _tracking(api, vhost, each)]
    return Rows(rows, ["stream", *columns])


def _tracking(api: Api, vhost: str, stream: str) -> list[dict[str, Any]]:
    groups = api.get("streams", vhost, stream, "groups")
    return [{"reference": group["name"], **shard} for group in groups for shard in group["shards"]]


def reset_offset(
    api: Api,
    stream: Stream,
    reference: Annotated[
        str, typer.Argument(metavar="REFERENCE", help="The name under which it is consumed.")
    ],
    vhost: Vhost = "/",
) -> None:
    """Delete the offset of a name. No consumer may use the name meanwhile."""
    api.delete(
        "streams", vhost, stream, "groups", reference, thing=f"stream '{stream}' in vhost '{vhost}'"
    )


def delete_queue(
    api: Api,
    queue: Queue,
    if_empty: bool = typer.Option(False, "--if-empty", "-e", help="Only if it has no messages."),
    if_unused: bool = typer.Option(False, "--if-unused", "-u", help="Only if it has no consumers."),
    vhost: Vhost = "/",
) -> None:
    """Delete a queue and the messages in it."""
    conditions = {
        name: "true"
        for name, wanted in (("if-empty", if_empty), ("if-unused", if_unused))
        if wanted
    }
    thing = f"queue '{queue}' in vhost '{vhost}'"
    api.delete("queues", vhost, queue, thing=thing, **conditions)


def purge_queue(api: Api, queue: Queue, vhost: Vhost = "/") -> None:
    """Delete the ready messages of a queue."""
    thing = f"queue '{queue}' in vhost '{vhost}'"
    api.delete("queues", vhost, queue, "contents", thing=thing)


def list_unresponsive_queues(api: Api, columns: Columns = None, vhost: Vhost = "/") -> Rows:
    """List the queues whose shard does not run."""
    found = listed(api, "queues", vhost, columns or ["name"])
    return found._replace(
        rows=[row for row in found.rows if row.get("state") not in ("running", None)]
    )


def create_queue(
    api: Api,
    queue: Queue,
    durable: bool = typer.Option(True, help="Keep it over a restart."),
    auto_delete: bool = typer.Option(False, help="Delete it with its last consumer."),
    queue_type: str | None = typer.Option(
        None,
        "--queue-type",
        "--type",
        help=QUEUE["x-queue-type"],
        autocompletion=complete_queue_types,
    ),
    expires: int | None = typer.Option(None, help=QUEUE["x-expires"]),
    max_length: int | None = typer.Option(None, help=QUEUE["x-max-length"]),
    message_ttl: int | None = typer.Option(None, help=QUEUE["x-message-ttl"]),
    delivery_limit: int | None = typer.Option(None, help=QUEUE["x-delivery-limit"]),
    reject_on_overflow: bool = typer.Option(
        False, help="Refuse new messages instead of dropping old ones."
    ),
    dead_letter_exchange: str | None = typer.Option(None, help=QUEUE["x-dead-letter-exchange"]),
    dead_letter_routing_key: str | None = typer.Option(
        None, help=QUEUE["x-dead-letter-routing-key"]
    ),
    arguments: Arguments = "{}",
    vhost: Vhost = "/",
) -> None:
    """Create a queue or a stream."""
    options = {
        "x-queue-type": queue_type,
        "x-expires": expires,
        "x-max-length": max_length,
        "x-message-ttl": message_ttl,
        "x-delivery-limit": delivery_limit,
        "x-overflow": "reject-publish" if reject_on_overflow else None,
        "x-dead-letter-exchange": dead_letter_exchange,
        "x-dead-letter-routing-key": dead_letter_routing_key,
    }
    given = _arguments(arguments, QUEUE)
    given |= {name: value for name, value in options.items() if value is not None}
    api.put(
        "queues",
        vhost,
        queue,
        body={"durable": durable, "auto_delete": auto_delete, "arguments": given},
    )


def _arguments(text: str, known: dict[str, str]) -> dict[str, Any]:
    """Return the arguments in a JSON object, and warn of names that are perhaps misspelt.

    The broker ignores arguments that it does not know, as RabbitMQ does.
    """
    given: dict[str, Any] = json_argument(text, dict)
    for name in given:
        if name in known or name in OF_RABBITMQ:
            continue
        if hint := did_you_mean(name, known):
            warn(f"there is no argument {name}, it has no effect{hint}")
    return given


def create_exchange(
    api: Api,
    type: Annotated[
        str,
        typer.Argument(
            metavar="TYPE",
            help="direct, fanout, topic, headers, x-consistent-hash ...",
            autocompletion=complete_exchange_types,
        ),
    ],
    name: Name,
    durable: Annotated[bool, typer.Option(help="Keep it over a restart.")] = True,
    auto_delete: Annotated[bool, typer.Option(help="Delete it with its last binding.")] = False,
    internal: Annotated[bool, typer.Option(help="Clients cannot publish to it.")] = False,
    alternate_exchange: str | None = typer.Option(None, help=EXCHANGE["alternate-exchange"]),
    arguments: Arguments = "{}",
    vhost: Vhost = "/",
) -> None:
    """Create an exchange."""
    given = _arguments(arguments, EXCHANGE)
    if alternate_exchange is not None:
        given["alternate-exchange"] = alternate_exchange
    body = {
        "type": type,
        "durable": durable,
        "auto_delete": auto_delete,
        "internal": internal,
        "arguments": given,
    }
    api.put("exchanges", vhost, name, body=body)


def delete_exchange(api: Api, name: Exchange, vhost: Vhost = "/") -> None:
    """Delete an exchange and its bindings."""
    api.delete("exchanges", vhost, name, thing=f"exchange '{name}' in vhost '{vhost}'")


def bind(
    api: Api,
    source: Exchange,
    destination: Destination,
    routing_key: BindingKey = "",
    kind: DestinationKind = Kind.QUEUE,
    arguments: Arguments = "{}",
    vhost: Vhost = "/",
) -> None:
    """Bind a queue or exchange to an exchange. A binding that exists already stays."""
    given = json_argument(arguments, dict)
    thing = f"exchange '{source}' or {kind} '{destination}' in vhost '{vhost}'"
    body = {"routing_key": routing_key, "arguments": given}
    api.post("bindings", vhost, "e", source, kind[0], destination, body=body, thing=thing)


def unbind(
    api: Api,
    source: Exchange,
    destination: Destination,
    routing_key: BindingKey = "",
    kind: DestinationKind = Kind.QUEUE,
    arguments: Arguments = "{}",
    vhost: Vhost = "/",
) -> None:
    """Remove the binding with this key and these arguments."""
    given = json_argument(arguments, dict)
    thing = f"exchange '{source}' or {kind} '{destination}' in vhost '{vhost}'"
    path = ("bindings", vhost, "e", source, kind[0], destination)
    for row in api.get(*path, thing=thing):
        if row["routing_key"] == routing_key and row["arguments"] == given:
            api.delete(*path, row["properties_key"])
            return
    fail(f"no such binding of {kind} '{destination}' to exchange '{source}'", DATA)


def pause_queue(api: Api, queue: Queue, vhost: Vhost = "/") -> None:
    """Pause a queue: it accepts messages and delivers none until it is resumed."""
    api.put("queues", vhost, queue, "pause")


def resume_queue(api: Api, queue: Queue, vhost: Vhost = "/") -> None:
    """Resume a paused queue, which delivers its messages again."""
    api.put("queues", vhost, queue, "resume")


def quorum_status(api: Api, queue: Queue, vhost: Vhost = "/") -> Rows:
    """List the nodes that have a queue of any type: which one leads, and which have all of it.

    They are those of the queue's shard. A node that is promotable lacks something as yet; noproc
    says that the node is down.
    """
    thing = f"queue '{queue}' in vhost '{vhost}'"
    return Rows(api.get("queues", "quorum", vhost, queue, "status", thing=thing), MEMBER_COLUMNS)


def move_queue(
    api: Api,
    queue: Queue,
    place: Annotated[
        str, typer.Argument(metavar="NODE|SHARD", help="A node, or the number of a shard.")
    ],
    wait: Annotated[bool, typer.Option(help="Return when the queue has moved.")] = True,
    vhost: Vhost = "/",
) -> None:
    """Move a queue with its messages to another node or shard, while clients use it.

    Consumers keep their tags. Clients see a short pause; what they hold and do not acknowledge
    within 0.7 s comes again, marked as redelivered.
    """
    body = {"shard": int(place)} if place.isdecimal() else {"node": place}
    thing = f"queue '{queue}' in vhost '{vhost}'"
    api.post("queues", vhost, queue, "relocation", body=body, thing=thing)
    if not wait:
        return
    said = ""
    while (moving := api.get("queues", vhost, queue, thing=thing).get("moving")) is not None:
        now = moving["waits_for"] or (
            f"{moving['messages_moved']} messages moved"
            if moving["messages_left"] is None
            else f"{moving['messages_moved']} messages moved, {moving['messages_left']} left"
        )
        if now != said:
            typer.echo(now, err=True)
        said = now
        time.sleep(MOVE_LOOK_S)


def call_off_move(api: Api, queue: Queue, vhost: Vhost = "/") -> None:
    """Call off a move of which no message has been moved yet."""
    path = ("queues", vhost, queue, "relocation")
    api.delete(*path, thing=f"queue '{queue}' in vhost '{vhost}'")


def listed(api: Api, kind: str, vhost: str | None, columns: list[str]) -> Rows:
    """Return the rows of one kind with the given columns. An unknown column ends the command.

    Args:
        api: The broker to ask.
        kind: A key of COLUMNS.
        vhost: The vhost, or None for the rows of all vhosts.
        columns: The columns to show.
    """
    path = [kind] if vhost is None else [kind, vhost]
    rows: list[dict[str, Any]] = api.get(*path, thing=f"vhost '{vhost}'")
    for row in rows:  # Some names of rabbitmqctl differ from those of the HTTP API.
        row |= {name: row[key] for name, key in RABBITMQ_NAMES.items() if key in row}
        if kind == "bindings":
            row["source_kind"] = "exchange"
    known = set(COLUMNS[kind].split()).union(*rows)
    if unknown := [column for column in columns if column not in known]:
        fail(f"unknown column {', '.join(unknown)}; known are {', '.join(sorted(known))}", USAGE)
    return Rows(rows, columns)
