"""list_queues, list_exchanges, list_bindings, list_connections: what there is, as rabbitmqctl names it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from supervisor.cli.api import DEFAULT_DATA_DIR, Api, DataDir, Formatter, Password, Url, User, Vhost, connect, show

Columns = Annotated[list[str] | None, typer.Argument(help="Columns to show.")]

RABBITMQ_NAMES = {
    "source_name": "source",
    "destination_name": "destination",
    "destination_kind": "destination_type",
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
    _list(connect(url, user, password, data_dir), ["queues", vhost], columns or ["name", "messages"], formatter)


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
    _list(connect(url, user, password, data_dir), ["exchanges", vhost], columns or ["name", "type"], formatter)


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
    _list(connect(url, user, password, data_dir), ["bindings", vhost], columns or usual, formatter)


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
    _list(connect(url, user, password, data_dir), ["connections"], columns or usual, formatter)


def _list(api: Api, path: list[str], columns: list[str], formatter: str) -> None:
    rows: list[dict[str, Any]] = api.get(*path)
    for row in rows:  # the HTTP API and rabbitmqctl call some things differently
        row |= {name: row[key] for name, key in RABBITMQ_NAMES.items() if key in row}
    show(rows, columns, formatter)
