"""Topic permissions and limits, and what lists them: rabbitmqctl's names and order of arguments."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from supervisor.cli.api import (
    DEFAULT_DATA_DIR,
    DataDir,
    Formatter,
    Password,
    Url,
    User,
    Vhost,
    connect,
    json_argument,
    show,
)

Username = Annotated[str, typer.Argument(metavar="USERNAME")]
Global = Annotated[bool, typer.Option("--global", help="Of all of them.")]


def clear_permissions(
    username: Username,
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Take a user's rights on a vhost away; they cannot enter it any more."""
    thing = f"permission of user '{username}' in vhost '{vhost}'"
    connect(url, user, password, data_dir).delete("permissions", vhost, username, thing=thing)


def list_permissions(
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    formatter: Formatter = "table",
) -> None:
    """Who may do what in a vhost."""
    rows = connect(url, user, password, data_dir).get("vhosts", vhost, "permissions", thing=f"vhost '{vhost}'")
    show(rows, ["user", "configure", "write", "read"], formatter)


def list_user_permissions(
    username: Username,
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    formatter: Formatter = "table",
) -> None:
    """In which vhosts a user may do what."""
    rows = connect(url, user, password, data_dir).get("users", username, "permissions", thing=f"user '{username}'")
    show(rows, ["vhost", "configure", "write", "read"], formatter)


def set_topic_permissions(
    username: Username,
    exchange: Annotated[str, typer.Argument(metavar="EXCHANGE")],
    write: Annotated[str, typer.Argument(metavar="WRITE")],
    read: Annotated[str, typer.Argument(metavar="READ")],
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Which routing keys of a topic exchange a user may publish and bind with: two regular expressions."""
    body = {"exchange": exchange, "write": write, "read": read}
    connect(url, user, password, data_dir).put("topic-permissions", vhost, username, body=body)


def clear_topic_permissions(
    username: Username,
    exchange: Annotated[str, typer.Argument(metavar="[EXCHANGE]", help="Without: of all exchanges.")] = "",
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Let a user use all routing keys again."""
    query = {"exchange": exchange} if exchange else {}
    thing = f"topic permission of user '{username}' in vhost '{vhost}'"
    connect(url, user, password, data_dir).delete("topic-permissions", vhost, username, thing=thing, **query)


def list_topic_permissions(
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    formatter: Formatter = "table",
) -> None:
    """Topic permissions in a vhost."""
    rows = connect(url, user, password, data_dir).get("vhosts", vhost, "topic-permissions", thing=f"vhost '{vhost}'")
    show(rows, ["user", "exchange", "write", "read"], formatter)


# -- limits -----------------------------------------------------------------------------------------------


Limits = Annotated[str, typer.Argument(metavar="JSON", help="Such as '{\"max-connections\": 100}'; -1 is none.")]


def set_vhost_limits(
    limits: Limits,
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Set max-connections or max-queues of a vhost; others stay."""
    api = connect(url, user, password, data_dir)
    for name, value in json_argument(limits, dict).items():
        api.put("vhost-limits", vhost, name, body={"value": value})


def clear_vhost_limits(
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Take all limits of a vhost away."""
    api = connect(url, user, password, data_dir)
    for row in api.get("vhost-limits", vhost, thing=f"vhost '{vhost}'"):
        for name in row["value"]:
            api.delete("vhost-limits", vhost, name)


def list_vhost_limits(
    vhost: Vhost = "/",
    every: Global = False,
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    formatter: Formatter = "table",
) -> None:
    """Limits of a vhost, or of all."""
    path = ["vhost-limits"] if every else ["vhost-limits", vhost]
    rows = connect(url, user, password, data_dir).get(*path, thing=f"vhost '{vhost}'")
    _show_limits(rows, "vhost", formatter)


def set_user_limits(
    username: Username,
    limits: Limits,
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Set max-connections or max-channels of a user; others stay."""
    api = connect(url, user, password, data_dir)
    for name, value in json_argument(limits, dict).items():
        api.put("user-limits", username, name, body={"value": value})


def clear_user_limits(
    username: Username,
    limit: Annotated[str, typer.Argument(metavar="LIMIT", help="Its name, or all.")],
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Take one limit of a user away, or all."""
    api = connect(url, user, password, data_dir)
    for row in api.get("user-limits", username, thing=f"user '{username}'"):
        for name in row["value"]:
            if limit in ("all", name):
                api.delete("user-limits", username, name)


def list_user_limits(
    of: Annotated[str, typer.Option("--user-name", "--of", help="One user; else all.")] = "",
    every: Global = False,
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    formatter: Formatter = "table",
) -> None:
    """Limits of a user, or of all."""
    path = ["user-limits", of] if of and not every else ["user-limits"]
    _show_limits(connect(url, user, password, data_dir).get(*path, thing=f"user '{of}'"), "user", formatter)


def _show_limits(rows: list[dict[str, Any]], whose: str, formatter: str) -> None:
    show([{whose: row[whose], "limits": row["value"]} for row in rows], [whose, "limits"], formatter)
