"""The commands for shovels, with the names of rabbitmqctl. `set_parameter shovel` makes one."""

from __future__ import annotations

from typing import Annotated

import typer

from shardmq.supervisor.cli.api import Api, Rows
from shardmq.supervisor.cli.names import Vhost

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the shovel.")]

COLUMNS = ["vhost", "name", "state", "src_uri", "dest_uri", "message_count", "pending", "error"]


def shovel_status(api: Api) -> Rows:
    """List shovels with their states, and why those that do not run failed."""
    return Rows(api.get("shovels"), COLUMNS)


def restart_shovel(api: Api, name: Name, vhost: Vhost = "/") -> None:
    """Start a shovel anew, without waiting for its next try."""
    api.delete("shovels", "vhost", vhost, name, "restart", thing=f"shovel '{name}'")


def delete_shovel(api: Api, name: Name, vhost: Vhost = "/") -> None:
    """Delete a shovel. Messages that it has not moved stay in their queue."""
    api.delete("shovels", "vhost", vhost, name, thing=f"shovel '{name}'")


def pause_shovel(api: Api, name: Name, vhost: Vhost = "/") -> None:
    """Pause a shovel, until it is resumed."""
    api.put("shovels", vhost, name, "pause")


def resume_shovel(api: Api, name: Name, vhost: Vhost = "/") -> None:
    """Let a paused shovel go on."""
    api.put("shovels", vhost, name, "resume")
