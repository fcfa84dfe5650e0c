"""Vhosts, users and permissions: rabbitmqctl's names and order of arguments."""

from __future__ import annotations

import base64
import hashlib
import os
from dataclasses import replace
from typing import Annotated, Any

import typer

from shardmq.supervisor.cli.api import DATA, REFUSED, Api, Rows, Vhost, Where, fail, http_url, there
from shardmq.supervisor.cli.queues import Columns, listed

Tags = Annotated[
    str, typer.Option(help="Comma separated: administrator, monitoring, management ...")
]

RABBITMQ_HASHING = "rabbit_password_hashing_sha256"
SALT_BYTES = 4  # RabbitMQ's
Configure = Annotated[
    str,
    typer.Argument(
        metavar="CONF", help="What they may declare and delete, such as '^app-.*'; '' is nothing."
    ),
]
Write = Annotated[
    str, typer.Argument(metavar="WRITE", help="What they may publish to, and bind to an exchange.")
]
Read = Annotated[
    str, typer.Argument(metavar="READ", help="What they may consume and purge, and bind queues to.")
]
NewPassword = Annotated[
    str | None, typer.Argument(metavar="PASSWORD", help="Asked for when not given.")
]
Description = Annotated[str | None, typer.Option(help="What it is for.")]
VhostTags = Annotated[str | None, typer.Option(help="Comma separated.")]
QueueType = Annotated[
    str | None, typer.Option(help="Of queues declared without one: classic, quorum ...")
]


def add_vhost(
    api: Api,
    vhost: Annotated[str, typer.Argument(metavar="VHOST")],
    description: Description = None,
    tags: VhostTags = None,
    default_queue_type: QueueType = None,
) -> None:
    """Make a virtual host."""
    if api.has("vhosts", vhost):  # as it is: putting it again would forget its description and tags
        typer.echo(f"vhost '{vhost}' exists already")
    else:
        api.put("vhosts", vhost, body=_said(description, tags, default_queue_type))


def update_vhost_metadata(
    api: Api,
    vhost: Annotated[str, typer.Argument(metavar="VHOST")],
    description: Description = None,
    tags: VhostTags = None,
    default_queue_type: QueueType = None,
) -> None:
    """Change what is said of a virtual host; what is not given stays."""
    _change(api, vhost, _said(description, tags, default_queue_type))


def trace_on(api: Api, vhost: Vhost = "/") -> None:
    """Copy what a virtual host's clients publish and get to its exchange amq.rabbitmq.trace."""
    _change(api, vhost, {"tracing": True})


def trace_off(api: Api, vhost: Vhost = "/") -> None:
    """Copy no more."""
    _change(api, vhost, {"tracing": False})


def _change(api: Api, vhost: str, body: dict[str, Any]) -> None:
    now = api.get("vhosts", vhost, thing=f"vhost '{vhost}'")
    api.put("vhosts", vhost, body={"description": now["description"], "tags": now["tags"]} | body)


def _said(
    description: str | None, tags: str | None, default_queue_type: str | None
) -> dict[str, Any]:
    options = {"description": description, "tags": tags, "default_queue_type": default_queue_type}
    return {name: value for name, value in options.items() if value is not None}


def enable_vhost_deletion_protection(
    api: Api, vhost: Annotated[str, typer.Argument(metavar="VHOST")]
) -> None:
    """Keep a virtual host from being deleted."""
    api.post("vhosts", vhost, "deletion", "protection", body={}, thing=f"vhost '{vhost}'")


def disable_vhost_deletion_protection(
    api: Api, vhost: Annotated[str, typer.Argument(metavar="VHOST")]
) -> None:
    """Let a virtual host be deleted."""
    api.delete("vhosts", vhost, "deletion", "protection", thing=f"vhost '{vhost}'")


def delete_vhost(api: Api, vhost: Annotated[str, typer.Argument(metavar="VHOST")]) -> None:
    """Delete a virtual host with all queues and messages in it."""
    api.delete("vhosts", vhost, thing=f"vhost '{vhost}'")


def restart_vhost(api: Api, vhost: Vhost = "/") -> None:
    """Every virtual host runs as long as the broker does: nothing to do, if there is such a one."""
    node = api.get("nodes")[0]["name"]
    api.post("vhosts", vhost, "start", node, body={}, thing=f"vhost '{vhost}'")


def list_vhosts(api: Api, columns: Columns = None) -> Rows:
    """Virtual hosts."""
    return listed(api, "vhosts", None, columns or ["name"])


def add_user(
    api: Api,
    username: Annotated[str, typer.Argument(metavar="USERNAME")],
    new_password: NewPassword = None,
    tags: Tags = "",
    pre_hashed_password: Annotated[
        str, typer.Option(help="As hash_password says it, instead of a password.")
    ] = "",
) -> None:
    """Make a user; give permissions with set_permissions."""
    if api.has("users", username):
        fail(f"user '{username}' exists already", REFUSED)
    if pre_hashed_password:
        hashed = {"password_hash": pre_hashed_password, "hashing_algorithm": RABBITMQ_HASHING}
        api.put("users", username, body={**hashed, "tags": tags})
    else:
        api.put("users", username, body={"password": _given_or_asked(new_password), "tags": tags})


def authenticate_user(
    api: Api,
    username: Annotated[str, typer.Argument(metavar="USERNAME")],
    given: Annotated[
        str | None, typer.Argument(metavar="PASSWORD", help="Asked for when not given.")
    ] = None,
) -> None:
    """Whether this is the user's password: exit status 0 or 65."""
    where = Where(http_url(api)) if api.where.socket else api.where
    password = given if given is not None else str(typer.prompt("Password", hide_input=True))
    if not replace(api, where=where, user=username, password=password).accepts():
        fail(f"user '{username}' is not accepted with this password", DATA)
    typer.echo("Success")


def hash_password(
    password: Annotated[str | None, typer.Argument(metavar="PASSWORD")] = None,
) -> None:
    """A password as RabbitMQ keeps it (salted SHA-256), for definitions and for add_user --pre-hashed-password."""
    given = password if password is not None else str(typer.prompt("Password", hide_input=True))
    salt = os.urandom(SALT_BYTES)
    typer.echo(base64.b64encode(salt + hashlib.sha256(salt + given.encode()).digest()).decode())


def change_password(
    api: Api,
    username: Annotated[str, typer.Argument(metavar="USERNAME")],
    new_password: NewPassword = None,
) -> None:
    """Give a user another password; their tags stay."""
    found: dict[str, Any] = api.get("users", username, thing=f"user '{username}'")
    api.put(
        "users", username, body={"password": _given_or_asked(new_password), "tags": found["tags"]}
    )


def clear_password(api: Api, username: Annotated[str, typer.Argument(metavar="USERNAME")]) -> None:
    """Leave a user without a password: nobody can log in with one; their tags stay."""
    found: dict[str, Any] = api.get("users", username, thing=f"user '{username}'")
    api.put("users", username, body={"password_hash": "", "tags": found["tags"]})


def set_user_tags(
    api: Api,
    username: Annotated[str, typer.Argument(metavar="USERNAME")],
    tags: Annotated[list[str] | None, typer.Argument(metavar="TAG", help="None: no tags.")] = None,
) -> None:
    """Give a user these tags and no others; their password stays."""
    found: dict[str, Any] = api.get("users", username, thing=f"user '{username}'")
    kept = {name: found[name] for name in ("password_hash", "hashing_algorithm")}
    api.put("users", username, body={**kept, "tags": tags or []})


def list_users(api: Api) -> Rows:
    """Users and their tags."""
    rows = api.get("users")
    return Rows([{"user": row["name"], "tags": row["tags"]} for row in rows], ["user", "tags"])


def delete_user(api: Api, username: Annotated[str, typer.Argument(metavar="USERNAME")]) -> None:
    """Delete a user; their connections are closed."""
    api.delete("users", username, thing=f"user '{username}'")


def set_permissions(
    api: Api,
    username: Annotated[str, typer.Argument(metavar="USERNAME")],
    configure: Configure,
    write: Write,
    read: Read,
    vhost: Vhost = "/",
) -> None:
    """Give a user rights on a vhost: three regular expressions over names."""
    there(api, username, vhost)
    body = {"configure": configure, "write": write, "read": read}
    api.put("permissions", vhost, username, body=body)


def set_permissions_globally(
    api: Api,
    username: Annotated[str, typer.Argument(metavar="USERNAME")],
    configure: Configure,
    write: Write,
    read: Read,
) -> None:
    """Give a user the same rights on all vhosts there are."""
    for row in api.get("vhosts"):
        set_permissions(api, username, configure, write, read, row["name"])


def set_vhost_tags(
    api: Api,
    vhost: Annotated[str, typer.Argument(metavar="VHOST")],
    tags: Annotated[list[str] | None, typer.Argument(metavar="TAG", help="None: no tags.")] = None,
) -> None:
    """Give a virtual host these tags and no others."""
    _change(api, vhost, {"tags": ",".join(tags or [])})


def _given_or_asked(password: str | None) -> str:
    if password is not None:
        return password
    asked: str = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    return asked
