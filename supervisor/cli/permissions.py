"""The commands for permissions, topic permissions and limits.

The names and the order of the arguments are those of rabbitmqctl.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shardmq.supervisor.cli.api import Api, Rows, check_exists, json_argument
from shardmq.supervisor.cli.names import Exchange, Username, Vhost

Global = Annotated[bool, typer.Option("--global", help="All of them.")]


def clear_permissions(api: Api, username: Username, vhost: Vhost = "/") -> None:
    """Remove the permissions of a user on a vhost. The user cannot enter the vhost any more."""
    thing = f"permission of user '{username}' in vhost '{vhost}'"
    api.delete("permissions", vhost, username, thing=thing)


def list_permissions(api: Api, vhost: Vhost = "/") -> Rows:
    """List the permissions of all users on a vhost."""
    rows = api.get("vhosts", vhost, "permissions", thing=f"vhost '{vhost}'")
    return Rows(rows, ["user", "configure", "write", "read"])


def list_user_permissions(api: Api, username: Username) -> Rows:
    """List the permissions of a user on all vhosts."""
    rows = api.get("users", username, "permissions", thing=f"user '{username}'")
    return Rows(rows, ["vhost", "configure", "write", "read"])


def set_topic_permissions(
    api: Api,
    username: Username,
    exchange: Exchange,
    write: Annotated[
        str,
        typer.Argument(metavar="WRITE", help="Routing keys to publish with, such as '^app\\.'."),
    ],
    read: Annotated[str, typer.Argument(metavar="READ", help="Routing keys to bind with.")],
    vhost: Vhost = "/",
) -> None:
    """Set the routing keys of a topic exchange that a user may publish and bind with.

    Both are regular expressions.
    """
    check_exists(api, username, vhost)
    body = {"exchange": exchange, "write": write, "read": read}
    api.put("topic-permissions", vhost, username, body=body)


def clear_topic_permissions(
    api: Api,
    username: Username,
    exchange: Annotated[
        str, typer.Argument(metavar="EXCHANGE", help="Default: all exchanges.")
    ] = "",
    vhost: Vhost = "/",
) -> None:
    """Remove the topic permissions of a user, who may use all routing keys again."""
    query = {"exchange": exchange} if exchange else {}
    thing = f"topic permission of user '{username}' in vhost '{vhost}'"
    api.delete("topic-permissions", vhost, username, thing=thing, **query)


def list_topic_permissions(api: Api, vhost: Vhost = "/") -> Rows:
    """List the topic permissions in a vhost."""
    rows = api.get("vhosts", vhost, "topic-permissions", thing=f"vhost '{vhost}'")
    return Rows(rows, ["user", "exchange", "write", "read"])


def list_user_topic_permissions(api: Api, username: Username) -> Rows:
    """List the topic permissions of a user in all vhosts."""
    rows = api.get("users", username, "topic-permissions", thing=f"user '{username}'")
    return Rows(rows, ["vhost", "exchange", "write", "read"])


# -- limits ----------------------------------------------------------------------------------


Limits = Annotated[
    str, typer.Argument(metavar="JSON", help="Such as '{\"max-connections\": 100}'; -1: no limit.")
]


def set_vhost_limits(api: Api, limits: Limits, vhost: Vhost = "/") -> None:
    """Set max-connections or max-queues of a vhost. Other limits stay."""
    wanted = json_argument(limits, dict)
    check_exists(api, vhost=vhost)
    for name, value in wanted.items():
        api.put("vhost-limits", vhost, name, body={"value": value})


def clear_vhost_limits(api: Api, vhost: Vhost = "/") -> None:
    """Remove all limits of a vhost."""
    for row in api.get("vhost-limits", vhost, thing=f"vhost '{vhost}'"):
        for name in row["value"]:
            api.delete("vhost-limits", vhost, name)


def list_vhost_limits(api: Api, vhost: Vhost = "/", every: Global = False) -> Rows:
    """List the limits of a vhost, or of all vhosts."""
    path = ["vhost-limits"] if every else ["vhost-limits", vhost]
    rows = api.get(*path, thing=f"vhost '{vhost}'")
    return _show_limits(rows, "vhost")


def set_user_limits(api: Api, username: Username, limits: Limits) -> None:
    """Set max-connections or max-channels of a user. Other limits stay."""
    wanted = json_argument(limits, dict)
    check_exists(api, username)
    for name, value in wanted.items():
        api.put("user-limits", username, name, body={"value": value})


def clear_user_limits(
    api: Api,
    username: Username,
    limit: Annotated[str, typer.Argument(metavar="LIMIT", help="Name of a limit, or all.")],
) -> None:
    """Remove one limit of a user, or all limits."""
    for row in api.get("user-limits", username, thing=f"user '{username}'"):
        for name in row["value"]:
            if limit in ("all", name):
                api.delete("user-limits", username, name)


def list_user_limits(
    api: Api,
    of: Annotated[str, typer.Option("--user-name", "--of", help="One user. Default: all.")] = "",
    every: Global = False,
) -> Rows:
    """List the limits of a user, or of all users."""
    path = ["user-limits", of] if of and not every else ["user-limits"]
    return _show_limits(api.get(*path, thing=f"user '{of}'"), "user")


def _show_limits(rows: list[dict[str, Any]], whose: str) -> Rows:
    return Rows([{whose: row[whose], "limits": row["value"]} for row in rows], [whose, "limits"])
