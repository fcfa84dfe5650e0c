"""The commands for links of federation, with the names of rabbitmqctl.

`set_parameter federation-upstream` and `set_policy` make links.
"""

from __future__ import annotations

from typing import Annotated

import typer

from shardmq.supervisor.cli.api import DATA, Api, Rows, fail

Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the link: federation_status.")]
OnlyDown = Annotated[bool, typer.Option("--only-down", help="List links that do not run.")]

COLUMNS = [
    "node", "vhost", "id", "type", "queue", "exchange", "upstream", "upstream_queue",
    "upstream_exchange", "uri", "status", "local_connection", "is_pulling", "message_count",
    "error",
]  # fmt: skip


def federation_status(api: Api, only_down: OnlyDown = False) -> Rows:
    """List links of federation with their states, and why those that do not run failed."""
    path = ("federation-links", *(("state", "down") if only_down else ()))
    return Rows(api.get(*path), COLUMNS)


def restart_federation_link(api: Api, id: Id) -> None:
    """Start a link of federation anew, without waiting for its next try."""
    found = [row for row in api.get("federation-links") if row["id"] == id]
    if not found:
        fail(f"there is no link of federation '{id}'", DATA)
    for row in found:
        place = (row["vhost"], id, row["node"])
        api.delete("federation-links", "vhost", *place, "restart", thing=f"link '{id}'")
