"""The commands for vhosts, users and the permissions of users.

The names and the order of the arguments are those of rabbitmqctl.
"""

from __future__ import annotations

import base64
import hashlib
import os
from dataclasses import replace
from typing import Annotated, Any

import typer

from shardmq.supervisor.cli.api import (
    DATA,
    REFUSED,
    Api,
    Endpoint,
    Rows,
    check_exists,
    fail,
    http_url,
)
from shardmq.supervisor.cli.names import (
    Columns,
    Username,
    Vhost,
    VhostName,
    complete_queue_types,
)
from shardmq.supervisor.cli.passwords import given_or_asked
from shardmq.supervisor.cli.queues import listed

Tags = Annotated[
    str, typer.Option(help="Comma separated: administrator, monitoring, management ...")
]

TagList = Annotated[list[str] | None, typer.Argument(metavar="TAG", help="Default: no tags.")]

RABBITMQ_HASHING = "rabbit_password_hashing_sha256"
SALT_BYTES = 4  # The size that RabbitMQ uses.
Configure = Annotated[
    str,
    typer.Argument(
        metavar="CONF", help="Names to declare and delete, such as '^app-.*'. '' is none."
    ),
]
Write = Annotated[
    str, typer.Argument(metavar="WRITE", help="Names to publish to, and to bind to an exchange.")
]
Read = Annotated[
    str, typer.Argument(metavar="READ", help="Names to consume and purge, and to bind queues to.")
]
NewPassword = Annotated[
    str | None,
    typer.Argument(metavar="PASSWORD", help="Default: the first line of a pipe, or a prompt."),
]
Description = Annotated[str | None, typer.Option(help="A text for people.")]
VhostTags = Annotated[str | None, typer.Option(help="Comma separated.")]
QueueType = Annotated[
    str | None,
    typer.Option(
        help="Type of queues that are declared without one: classic, quorum ...",
        autocompletion=complete_queue_types,
    ),
]
VhostReplicas = Annotated[
    int | None,
    typer.Option(min=0, max=7, help="On how many nodes its queues are to be; 0: as the broker."),
]
VhostMinInSync = Annotated[
    int | None,
    typer.Option(min=0, max=7, help="How many of them a confirm needs; 0: as the broker."),
]


def add_vhost(
    api: Api,
    vhost: VhostName,
    description: Description = None,
    tags: VhostTags = None,
    default_queue_type: QueueType = None,
    replicas: VhostReplicas = None,
    min_in_sync: VhostMinInSync = None,
) -> None:
    """Create a virtual host."""
    if api.has("vhosts", vhost):  # A second PUT would remove its description and tags.
        typer.echo(f"vhost '{vhost}' exists already")
    else:
        body = _metadata(description, tags, default_queue_type, replicas, min_in_sync)
        api.put("vhosts", vhost, body=body)


def update_vhost_metadata(
    api: Api,
    vhost: VhostName,
    description: Description = None,
    tags: VhostTags = None,
    default_queue_type: QueueType = None,
    replicas: VhostReplicas = None,
    min_in_sync: VhostMinInSync = None,
) -> None:
    """Change the description, tags, default queue type or copies of a virtual host.

    The others stay. Queues that are there stay on their shards.
    """
    _change(api, vhost, _metadata(description, tags, default_queue_type, replicas, min_in_sync))


def trace_on(api: Api, vhost: Vhost = "/") -> None:
    """Copy all messages that clients of a virtual host publish and get to amq.rabbitmq.trace."""
    _change(api, vhost, {"tracing": True})


def trace_off(api: Api, vhost: Vhost = "/") -> None:
    """Stop what trace_on has begun."""
    _change(api, vhost, {"tracing": False})


def _change(api: Api, vhost: str, body: dict[str, Any]) -> None:
    now = api.get("vhosts", vhost, thing=f"vhost '{vhost}'")
    api.put("vhosts", vhost, body={"description": now["description"], "tags": now["tags"]} | body)


def _metadata(
    description: str | None,
    tags: str | None,
    default_queue_type: str | None,
    replicas: int | None,
    min_in_sync: int | None,
) -> dict[str, Any]:
    options = {
        "description": description,
        "tags": tags,
        "default_queue_type": default_queue_type,
        "replicas": replicas,
        "min_in_sync": min_in_sync,
    }
    return {name: value for name, value in options.items() if value is not None}


def enable_vhost_deletion_protection(api: Api, vhost: VhostName) -> None:
    """Keep a virtual host from being deleted."""
    api.post("vhosts", vhost, "deletion", "protection", body={}, thing=f"vhost '{vhost}'")


def disable_vhost_deletion_protection(api: Api, vhost: VhostName) -> None:
    """Let a virtual host be deleted."""
    api.delete("vhosts", vhost, "deletion", "protection", thing=f"vhost '{vhost}'")


def delete_vhost(api: Api, vhost: VhostName) -> None:
    """Delete a virtual host with all queues and messages in it."""
    api.delete("vhosts", vhost, thing=f"vhost '{vhost}'")


def restart_vhost(api: Api, vhost: Vhost = "/") -> None:
    """Do nothing if the virtual host exists: it runs as long as the broker does."""
    node = api.get("nodes")[0]["name"]
    api.post("vhosts", vhost, "start", node, body={}, thing=f"vhost '{vhost}'")


def list_vhosts(api: Api, columns: Columns = None) -> Rows:
    """List the virtual hosts."""
    return listed(api, "vhosts", None, columns or ["name"])


def add_user(
    api: Api,
    username: Username,
    new_password: NewPassword = None,
    tags: Tags = "",
    pre_hashed_password: str = typer.Option(
        "", help="Hash by hash_password, instead of a password."
    ),
) -> None:
    """Create a user. set_permissions gives permissions."""
    if api.has("users", username):
        fail(f"user '{username}' exists already", REFUSED)
    if pre_hashed_password:
        hashed = {"password_hash": pre_hashed_password, "hashing_algorithm": RABBITMQ_HASHING}
        api.put("users", username, body={**hashed, "tags": tags})
    else:
        api.put(
            "users",
            username,
            body={"password": given_or_asked(new_password, confirms=True), "tags": tags},
        )


def authenticate_user(
    api: Api,
    username: Username,
    given: NewPassword = None,
) -> None:
    """Check the password of a user. The exit status is 0 or 65."""
    endpoint = Endpoint(http_url(api)) if api.endpoint.socket else api.endpoint
    login = replace(api, endpoint=endpoint, user=username, password=given_or_asked(given))
    if not login.accepts():
        fail(f"user '{username}' is not accepted with this password", DATA)
    typer.echo("Success")


def hash_password(
    password: NewPassword = None,
) -> None:
    """Print the hash of a password as RabbitMQ stores it: salted SHA-256.

    Definitions and add_user --pre-hashed-password accept the hash.
    """
    given = given_or_asked(password)
    salt = os.urandom(SALT_BYTES)
    typer.echo(base64.b64encode(salt + hashlib.sha256(salt + given.encode()).digest()).decode())


def change_password(
    api: Api,
    username: Username,
    new_password: NewPassword = None,
) -> None:
    """Set the password of a user. The tags stay."""
    found: dict[str, Any] = api.get("users", username, thing=f"user '{username}'")
    api.put(
        "users",
        username,
        body={"password": given_or_asked(new_password, confirms=True), "tags": found["tags"]},
    )


def clear_password(api: Api, username: Username) -> None:
    """Remove the password of a user, so that no login by password succeeds. The tags stay."""
    found: dict[str, Any] = api.get("users", username, thing=f"user '{username}'")
    api.put("users", username, body={"password_hash": "", "tags": found["tags"]})


def set_user_tags(
    api: Api,
    username: Username,
    tags: TagList = None,
) -> None:
    """Set the tags of a user. The password stays."""
    found: dict[str, Any] = api.get("users", username, thing=f"user '{username}'")
    kept = {name: found[name] for name in ("password_hash", "hashing_algorithm")}
    api.put("users", username, body={**kept, "tags": tags or []})


def list_users(api: Api) -> Rows:
    """List the users and their tags."""
    rows = api.get("users")
    return Rows([{"user": row["name"], "tags": row["tags"]} for row in rows], ["user", "tags"])


def delete_user(api: Api, username: Username) -> None:
    """Delete a user and close the connections of the user."""
    api.delete("users", username, thing=f"user '{username}'")


def set_permissions(
    api: Api,
    username: Username,
    configure: Configure,
    write: Write,
    read: Read,
    vhost: Vhost = "/",
) -> None:
    """Set the permissions of a user on a vhost: three regular expressions over names."""
    check_exists(api, username, vhost)
    body = {"configure": configure, "write": write, "read": read}
    api.put("permissions", vhost, username, body=body)


def set_permissions_globally(
    api: Api,
    username: Username,
    configure: Configure,
    write: Write,
    read: Read,
) -> None:
    """Set the same permissions of a user on all vhosts."""
    for row in api.get("vhosts"):
        set_permissions(api, username, configure, write, read, row["name"])


def set_vhost_tags(
    api: Api,
    vhost: VhostName,
    tags: TagList = None,
) -> None:
    """Set the tags of a virtual host."""
    _change(api, vhost, {"tags": ",".join(tags or [])})
