"""Vhosts, users and permissions: rabbitmqctl's names and order of arguments."""

from __future__ import annotations

from typing import Annotated

import typer

from supervisor.cli.api import DEFAULT_DATA_DIR, DataDir, Password, Url, User, Vhost, connect

Tags = Annotated[str, typer.Option(help="Comma separated: administrator, monitoring, management ...")]


def add_vhost(
    vhost: Annotated[str, typer.Argument(metavar="VHOST")],
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Make a virtual host."""
    connect(url, user, password, data_dir).put("vhosts", vhost)


def delete_vhost(
    vhost: Annotated[str, typer.Argument(metavar="VHOST")],
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Delete a virtual host with all queues and messages in it."""
    connect(url, user, password, data_dir).delete("vhosts", vhost)


def add_user(
    username: Annotated[str, typer.Argument(metavar="USERNAME")],
    new_password: Annotated[str | None, typer.Argument(metavar="PASSWORD", help="Asked for when not given.")] = None,
    tags: Tags = "",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Make a user; give permissions with set_permissions."""
    if new_password is None:
        new_password = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    connect(url, user, password, data_dir).put("users", username, body={"password": new_password, "tags": tags})


def delete_user(
    username: Annotated[str, typer.Argument(metavar="USERNAME")],
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Delete a user; their connections are closed."""
    connect(url, user, password, data_dir).delete("users", username)


def set_permissions(
    username: Annotated[str, typer.Argument(metavar="USERNAME")],
    configure: Annotated[str, typer.Argument(metavar="CONF")],
    write: Annotated[str, typer.Argument(metavar="WRITE")],
    read: Annotated[str, typer.Argument(metavar="READ")],
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Give a user rights on a vhost: three regular expressions over names."""
    body = {"configure": configure, "write": write, "read": read}
    connect(url, user, password, data_dir).put("permissions", vhost, username, body=body)
