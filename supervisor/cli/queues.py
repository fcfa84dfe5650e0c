"""list_queues, list_exchanges, list_bindings, list_connections: what there is, as rabbitmqctl names it. And queues gone
or empty."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from supervisor.cli.api import USAGE, Api, Rows, Vhost, fail

Columns = Annotated[list[str] | None, typer.Argument(help="Columns to show.")]

RABBITMQ_NAMES = {"source_name": "source", "destination_name": "destination", "destination_kind": "destination_type"}

# What can be asked for when there is nothing to list; a broker that tells more may be asked for that too.
COLUMNS = {
    "queues": "arguments auto_delete consumers durable exclusive memory message_bytes message_bytes_ready"
    " message_bytes_unacknowledged messages messages_ready messages_unacknowledged name node policy shard state type"
    " vhost",
    "exchanges": "arguments auto_delete durable internal name policy type vhost",
    "bindings": "arguments destination destination_kind destination_name destination_type properties_key routing_key"
    " source source_name vhost",
    "connections": "auth_mechanism channel_max channels client_properties connected_at frame_max host name node"
    " peer_host peer_port port protocol ssl state timeout type user vhost",
}


def list_queues(api: Api, columns: Columns = None, vhost: Vhost = "/") -> Rows:
    """Queues of a vhost."""
    return _list(api, "queues", vhost, columns or ["name", "messages"])


def list_exchanges(api: Api, columns: Columns = None, vhost: Vhost = "/") -> Rows:
    """Exchanges of a vhost."""
    return _list(api, "exchanges", vhost, columns or ["name", "type"])


def list_bindings(api: Api, columns: Columns = None, vhost: Vhost = "/") -> Rows:
    """Bindings of a vhost."""
    usual = ["source_name", "destination_name", "destination_kind", "routing_key", "arguments"]
    return _list(api, "bindings", vhost, columns or usual)


def list_connections(api: Api, columns: Columns = None) -> Rows:
    """Connections of clients."""
    usual = ["user", "peer_host", "peer_port", "state"]
    return _list(api, "connections", None, columns or usual)


def delete_queue(
    api: Api,
    queue: Annotated[str, typer.Argument(metavar="QUEUE")],
    if_empty: Annotated[bool, typer.Option("--if-empty", "-e")] = False,
    if_unused: Annotated[bool, typer.Option("--if-unused", "-u")] = False,
    vhost: Vhost = "/",
) -> None:
    """Delete a queue and the messages in it."""
    conditions = {name: "true" for name, wanted in (("if-empty", if_empty), ("if-unused", if_unused)) if wanted}
    thing = f"queue '{queue}' in vhost '{vhost}'"
    api.delete("queues", vhost, queue, thing=thing, **conditions)


def purge_queue(api: Api, queue: Annotated[str, typer.Argument(metavar="QUEUE")], vhost: Vhost = "/") -> None:
    """Drop the messages that are ready in a queue."""
    thing = f"queue '{queue}' in vhost '{vhost}'"
    api.delete("queues", vhost, queue, "contents", thing=thing)


def _list(api: Api, kind: str, vhost: str | None, columns: list[str]) -> Rows:
    path = [kind] if vhost is None else [kind, vhost]
    rows: list[dict[str, Any]] = api.get(*path, thing=f"vhost '{vhost}'")
    for row in rows:  # the HTTP API and rabbitmqctl call some things differently
        row |= {name: row[key] for name, key in RABBITMQ_NAMES.items() if key in row}
    known = set(COLUMNS[kind].split()).union(*rows)
    if unknown := [column for column in columns if column not in known]:
        fail(f"unknown column {', '.join(unknown)}; known are {', '.join(sorted(known))}", USAGE)
    return Rows(rows, columns)
