"""The commands that list connections, channels and consumers, and that close connections.

The names and the order of the arguments are those of rabbitmqctl.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shardmq.supervisor.cli.api import USAGE, Api, Rows, fail
from shardmq.supervisor.cli.names import Columns, Username, Vhost
from shardmq.supervisor.cli.queues import listed

Reason = Annotated[str, typer.Argument(metavar="REASON", help="The reason that the client gets.")]
Limit = Annotated[int, typer.Option(help="Number of connections to close at most. 0: all.")]


def list_connections(api: Api, columns: Columns = None) -> Rows:
    """List the connections of clients."""
    return _with_pid(
        listed(api, "connections", None, columns or ["user", "peer_host", "peer_port", "state"])
    )


def list_channels(api: Api, columns: Columns = None) -> Rows:
    """List the channels of all connections."""
    usual = ["name", "user", "consumer_count", "messages_unacknowledged"]
    return _with_pid(listed(api, "channels", None, columns or usual))


def list_consumers(api: Api, columns: Columns = None, vhost: Vhost = "/") -> Rows:
    """List the consumers of a vhost."""
    usual = [
        "queue_name",
        "channel_name",
        "consumer_tag",
        "ack_required",
        "prefetch_count",
        "active",
        "arguments",
    ]
    rows: list[dict[str, Any]] = api.get("consumers", vhost, thing=f"vhost '{vhost}'")
    for row in rows:
        row["queue_name"] = row.get("queue", {}).get("name")
        row["channel_name"] = row["channel_pid"] = row.get("channel_details", {}).get("name")
    known = set(usual).union(("channel_pid", "exclusive"), *rows)
    if unknown := [column for column in columns or [] if column not in known]:
        fail(f"unknown column {', '.join(unknown)}; known are {', '.join(sorted(known))}", USAGE)
    return Rows(rows, columns or usual)


def close_connection(
    api: Api,
    connection: Annotated[
        str, typer.Argument(metavar="NAME", help="As list_connections name (or pid) shows it.")
    ],
    reason: Reason = "Closed via shardctl",
) -> None:
    """Close one connection."""
    api.close(connection, reason)


def close_all_connections(
    api: Api,
    reason: Reason = "Closed via shardctl",
    vhost: str = typer.Option("", "--vhost", "-p", help="The connections of this vhost."),
    every: Annotated[bool, typer.Option("--global", help="The connections of all vhosts.")] = False,
    limit: Limit = 0,
) -> None:
    """Close the connections of a vhost, or of all vhosts."""
    if not vhost and not every:
        fail("which: -p VHOST, or --global", USAGE)
    rows = [row for row in api.get("connections") if every or row["vhost"] == vhost]
    _close(api, rows[: limit or None], reason)


def close_all_user_connections(
    api: Api,
    username: Username,
    reason: Reason = "Closed via shardctl",
    limit: Limit = 0,
) -> None:
    """Close the connections of a user."""
    rows = [row for row in api.get("connections") if row["user"] == username]
    _close(api, rows[: limit or None], reason)


def _close(api: Api, rows: list[dict[str, Any]], reason: str) -> None:
    for row in rows:
        # The client may have closed the connection by itself.
        if api.has("connections", row["name"]):
            api.close(row["name"], reason)


def _with_pid(found: Rows) -> Rows:
    """Add the column `pid`: scripts for rabbitmqctl close a connection by its pid.

    The pid is the name of the connection.
    """
    for row in found.rows:
        row["pid"] = row.get("name")
    return found
