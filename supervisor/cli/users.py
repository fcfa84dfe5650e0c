"""Vhosts, users and permissions: rabbitmqctl's names and order of arguments."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from supervisor.cli.api import (
    DEFAULT_DATA_DIR,
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

Tags = Annotated[str, typer.Option(help="Comma separated: administrator, monitoring, management ...")]

Description = Annotated[str | None, typer.Option(help="What it is for.")]
VhostTags = Annotated[str | None, typer.Option(help="Comma separated.")]
QueueType = Annotated[str | None, typer.Option(help="Of queues declared without one: classic, quorum ...")]

NewPassword = Annotated[str | None, typer.Argument(metavar="PASSWORD", help="Asked for when not given.")]


def add_vhost(
    vhost: Annotated[str, typer.Argument(metavar="VHOST")],
    description: Description = None,
    tags: VhostTags = None,
    default_queue_type: QueueType = None,
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Make a virtual host."""
    api = connect(url, user, password, data_dir)
    if api.has("vhosts", vhost):  # as it is: putting it again would forget its description and tags
        typer.echo(f"vhost '{vhost}' exists already")
    else:
        api.put("vhosts", vhost, body=_said(description, tags, default_queue_type))


def update_vhost_metadata(
    vhost: Annotated[str, typer.Argument(metavar="VHOST")],
    description: Description = None,
    tags: VhostTags = None,
    default_queue_type: QueueType = None,
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Change what is said of a virtual host; what is not given stays."""
    _change(connect(url, user, password, data_dir), vhost, _said(description, tags, default_queue_type))


def trace_on(
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Copy what a virtual host's clients publish and get to its exchange amq.rabbitmq.trace."""
    _change(connect(url, user, password, data_dir), vhost, {"tracing": True})


def trace_off(
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Copy no more."""
    _change(connect(url, user, password, data_dir), vhost, {"tracing": False})


def _change(api: Api, vhost: str, body: dict[str, Any]) -> None:
    now = api.get("vhosts", vhost, thing=f"vhost '{vhost}'")
    api.put("vhosts", vhost, body={"description": now["description"], "tags": now["tags"]} | body)


def _said(description: str | None, tags: str | None, default_queue_type: str | None) -> dict[str, Any]:
    options = {"description": description, "tags": tags, "default_queue_type": default_queue_type}
    return {name: value for name, value in options.items() if value is not None}


def enable_vhost_deletion_protection(
    vhost: Annotated[str, typer.Argument(metavar="VHOST")],
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Keep a virtual host from being deleted."""
    api = connect(url, user, password, data_dir)
    api.post("vhosts", vhost, "deletion", "protection", body={}, thing=f"vhost '{vhost}'")


def disable_vhost_deletion_protection(
    vhost: Annotated[str, typer.Argument(metavar="VHOST")],
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Let a virtual host be deleted."""
    api = connect(url, user, password, data_dir)
    api.delete("vhosts", vhost, "deletion", "protection", thing=f"vhost '{vhost}'")


def delete_vhost(
    vhost: Annotated[str, typer.Argument(metavar="VHOST")],
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Delete a virtual host with all queues and messages in it."""
    connect(url, user, password, data_dir).delete("vhosts", vhost, thing=f"vhost '{vhost}'")


def list_vhosts(
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    formatter: Formatter = "table",
) -> None:
    """Virtual hosts."""
    show(connect(url, user, password, data_dir).get("vhosts"), ["name", "description", "tags"], formatter)


def add_user(
    username: Annotated[str, typer.Argument(metavar="USERNAME")],
    new_password: NewPassword = None,
    tags: Tags = "",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Make a user; give permissions with set_permissions."""
    api = connect(url, user, password, data_dir)
    if api.has("users", username):
        fail(f"user '{username}' exists already")
    api.put("users", username, body={"password": _given_or_asked(new_password), "tags": tags})


def change_password(
    username: Annotated[str, typer.Argument(metavar="USERNAME")],
    new_password: NewPassword = None,
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Give a user another password; their tags stay."""
    api = connect(url, user, password, data_dir)
    found: dict[str, Any] = api.get("users", username, thing=f"user '{username}'")
    api.put("users", username, body={"password": _given_or_asked(new_password), "tags": found["tags"]})


def clear_password(
    username: Annotated[str, typer.Argument(metavar="USERNAME")],
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Leave a user without a password: nobody can log in with one; their tags stay."""
    api = connect(url, user, password, data_dir)
    found: dict[str, Any] = api.get("users", username, thing=f"user '{username}'")
    api.put("users", username, body={"password_hash": "", "tags": found["tags"]})


def set_user_tags(
    username: Annotated[str, typer.Argument(metavar="USERNAME")],
    tags: Annotated[list[str] | None, typer.Argument(metavar="[TAG ...]", help="None: no tags.")] = None,
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Give a user these tags and no others; their password stays."""
    api = connect(url, user, password, data_dir)
    found: dict[str, Any] = api.get("users", username, thing=f"user '{username}'")
    kept = {name: found[name] for name in ("password_hash", "hashing_algorithm")}
    api.put("users", username, body={**kept, "tags": tags or []})


def list_users(
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    formatter: Formatter = "table",
) -> None:
    """Users and their tags."""
    rows = connect(url, user, password, data_dir).get("users")
    show([{"user": row["name"], "tags": row["tags"]} for row in rows], ["user", "tags"], formatter)


def delete_user(
    username: Annotated[str, typer.Argument(metavar="USERNAME")],
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Delete a user; their connections are closed."""
    connect(url, user, password, data_dir).delete("users", username, thing=f"user '{username}'")


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


def _given_or_asked(password: str | None) -> str:
    if password is not None:
        return password
    asked: str = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    return asked
