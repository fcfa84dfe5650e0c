"""list_queues, list_exchanges, list_bindings, list_connections: what there is, as rabbitmqctl names it. And queues
gone, empty or paused."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from supervisor.cli.api import (
    DEFAULT_DATA_DIR,
    USAGE,
    Api,
    DataDir,
    Formatter,
    Password,
    Url,
    User,
    Vhost,
    connect,
    fail,
    show,
)

Columns = Annotated[list[str] | None, typer.Argument(help="Columns to show.")]

RABBITMQ_NAMES = {
    "source_name": "source",
    "destination_name": "destination",
    "destination_kind": "destination_type",
}

# What can be asked for when there is nothing to list; a broker that tells more may be asked for that too.
COLUMNS = {
    "queues": "arguments auto_delete consumers durable exchange exclusive first_offset index last_offset memory"
    " message_bytes message_bytes_ready message_bytes_unacknowledged messages messages_ready messages_unacknowledged"
    " name node policy segments shard shard_state state stream_positions type vhost",
    "exchanges": "arguments auto_delete durable internal name policy shard_queues type vhost",
    "bindings": "arguments destination destination_kind destination_name destination_type properties_key routing_key"
    " source source_name vhost",
    "connections": "auth_mechanism channel_max channels client_properties connected_at frame_max host name node"
    " peer_host peer_port port protocol ssl state timeout type user vhost",
}


def list_queues(
    columns: Columns = None,
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    formatter: Formatter = "table",
) -> None:
    """Queues of a vhost."""
    _list(connect(url, user, password, data_dir), "queues", vhost, columns or ["name", "messages"], formatter)


def list_exchanges(
    columns: Columns = None,
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    formatter: Formatter = "table",
) -> None:
    """Exchanges of a vhost."""
    _list(connect(url, user, password, data_dir), "exchanges", vhost, columns or ["name", "type"], formatter)


def list_bindings(
    columns: Columns = None,
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    formatter: Formatter = "table",
) -> None:
    """Bindings of a vhost."""
    usual = ["source_name", "destination_name", "destination_kind", "routing_key", "arguments"]
    _list(connect(url, user, password, data_dir), "bindings", vhost, columns or usual, formatter)


def list_connections(
    columns: Columns = None,
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    formatter: Formatter = "table",
) -> None:
    """Connections of clients."""
    usual = ["user", "peer_host", "peer_port", "state"]
    _list(connect(url, user, password, data_dir), "connections", None, columns or usual, formatter)


def delete_queue(
    queue: Annotated[str, typer.Argument(metavar="QUEUE")],
    if_empty: Annotated[bool, typer.Option("--if-empty", "-e")] = False,
    if_unused: Annotated[bool, typer.Option("--if-unused", "-u")] = False,
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Delete a queue and the messages in it."""
    conditions = {name: "true" for name, wanted in (("if-empty", if_empty), ("if-unused", if_unused)) if wanted}
    thing = f"queue '{queue}' in vhost '{vhost}'"
    connect(url, user, password, data_dir).delete("queues", vhost, queue, thing=thing, **conditions)


def purge_queue(
    queue: Annotated[str, typer.Argument(metavar="QUEUE")],
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Drop the messages that are ready in a queue."""
    thing = f"queue '{queue}' in vhost '{vhost}'"
    connect(url, user, password, data_dir).delete("queues", vhost, queue, "contents", thing=thing)


def pause_queue(
    queue: Annotated[str, typer.Argument(metavar="QUEUE")],
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Let a queue take messages and give none, until it is resumed."""
    connect(url, user, password, data_dir).put("queues", vhost, queue, "pause")


def resume_queue(
    queue: Annotated[str, typer.Argument(metavar="QUEUE")],
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Let a paused queue give its messages again."""
    connect(url, user, password, data_dir).put("queues", vhost, queue, "resume")


def _list(api: Api, kind: str, vhost: str | None, columns: list[str], formatter: str) -> None:
    path = [kind] if vhost is None else [kind, vhost]
    rows: list[dict[str, Any]] = api.get(*path, thing=f"vhost '{vhost}'")
    for row in rows:  # the HTTP API and rabbitmqctl call some things differently
        row |= {name: row[key] for name, key in RABBITMQ_NAMES.items() if key in row}
    known = set(COLUMNS[kind].split()).union(*rows)
    if unknown := [column for column in columns if column not in known]:
        fail(f"unknown column {', '.join(unknown)}; known are {', '.join(sorted(known))}", USAGE)
    show(rows, columns, formatter)
