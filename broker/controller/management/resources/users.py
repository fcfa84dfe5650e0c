"""/api/users, /api/permissions, /api/topic-permissions, /api/whoami: users and their rights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec

from shardmq.broker.controller.access import hash_password
from shardmq.broker.controller.management.api_error import bad_request, not_found
from shardmq.broker.controller.management.call import (
    Call,
    Route,
    check,
    existing,
    long_list,
    put_status,
)
from shardmq.broker.controller.management.resources.limits import limits_of
from shardmq.broker.controller.management.responses.listing import Listing, by_name
from shardmq.broker.controller.policies import USER_LIMITS
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    PermissionDelete,
    PermissionPut,
    TopicPermissionDelete,
    TopicPermissionPut,
    UserDelete,
    UserPut,
)
from shardmq.broker.model.passwords import HASHES, is_base64

# The algorithm of a hash for which none is given.
RABBITMQ_DEFAULT = "rabbit_password_hashing_sha256"


class UserBody(msgspec.Struct):
    tags: list[str] | str | None = None
    password: str | None = None
    password_hash: str | None = None
    hashing_algorithm: str = ""


class NamesBody(msgspec.Struct):
    users: list[str]


class PermissionBody(msgspec.Struct):
    configure: str
    write: str
    read: str


class TopicPermissionBody(msgspec.Struct):
    exchange: str
    write: str
    read: str


def row(user: UserPut, catalog: Catalog) -> dict[str, Any]:
    return {
        "name": user.name,
        "password_hash": user.password_hash,
        "hashing_algorithm": user.hashing_algorithm,
        "tags": user.tags,
        "limits": limits_of(catalog.parameters.get(("", USER_LIMITS, user.name))),
    }


def permission_row(put: PermissionPut) -> dict[str, Any]:
    names = ("user", "vhost", "configure", "write", "read")
    return {name: getattr(put, name) for name in names}


def topic_permission_row(put: TopicPermissionPut) -> dict[str, Any]:
    names = ("user", "vhost", "exchange", "write", "read")
    return {name: getattr(put, name) for name in names}


def _user(call: Call) -> UserPut:
    return existing(call.catalog.users.get(call.part("user")))


def _of_path(call: Call, rows: Iterable[dict[str, Any]]) -> Listing:
    """Return the rows of the user or vhost in the path, which must exist, or else all rows."""
    parts, wanted = call.request.match_info, {}
    if "user" in parts:
        wanted["user"] = _user(call).name
    if "vhost" in parts:
        wanted["vhost"] = call.vhost().name
    return by_name(row for row in rows if wanted.items() <= row.items())


async def whoami(call: Call) -> dict[str, Any]:
    """Show the name and the tags of the caller."""
    return {"name": call.user.name, "tags": call.user.tags}


async def get_all(call: Call) -> Listing:
    """List all users."""
    return by_name(row(user, call.catalog) for user in call.catalog.users.values())


async def without_permissions(call: Call) -> Listing:
    """List the users without permissions in any vhost."""
    known = {user for _, user in call.catalog.permissions.puts}
    return by_name(
        row(user, call.catalog) for user in call.catalog.users.values() if user.name not in known
    )


async def get(call: Call) -> dict[str, Any]:
    """Show a user."""
    return row(_user(call), call.catalog)


async def put(call: Call) -> Any:
    """Make a user, or change the password and the tags of a user."""
    body, name = await call.body(UserBody), call.part("user")
    if not name:
        raise bad_request("a user needs a name")
    if body.tags is None:
        raise bad_request("tags_not_present")
    if body.hashing_algorithm and body.hashing_algorithm not in HASHES:
        raise bad_request(f"unknown hashing_algorithm '{body.hashing_algorithm}'")
    if body.password is not None and body.password_hash is not None:
        raise bad_request("both_password_and_password_hash_are_provided")
    if body.password_hash is not None and not is_base64(body.password_hash):
        raise bad_request("password_hash: not base64")
    existed = name in call.catalog.users
    # As in RabbitMQ an empty password is no password: nobody may log in with it.
    fallback = call.authority.hashing_algorithm if body.password else RABBITMQ_DEFAULT
    algorithm, hashed = body.hashing_algorithm or fallback, body.password_hash or ""
    if body.password:
        loop = asyncio.get_running_loop()
        hashed = await loop.run_in_executor(None, hash_password, body.password, None, algorithm)
    put = UserPut(name, hashed, algorithm, tags_of(body.tags))
    check(await call.authority.ask(put))
    return put_status(existed)


def tags_of(tags: list[str] | str) -> list[str]:
    """Return the tags from a list or, as RabbitMQ takes it, from a string with commas."""
    parts = tags.split(",") if isinstance(tags, str) else tags
    return [tag for part in parts if (tag := part.strip())]


async def delete(call: Call) -> None:
    """Delete a user with the permissions of the user, and close the connections of the user."""
    check(await call.authority.ask(UserDelete(_user(call).name)))


async def delete_many(call: Call) -> None:
    """Delete several users; those that do not exist are ignored."""
    for name in (await call.body(NamesBody)).users:
        if name in call.catalog.users:
            check(await call.authority.ask(UserDelete(name)))


async def get_permissions(call: Call) -> Listing:
    """List permissions: all, or those of the user or vhost in the path."""
    return _of_path(call, map(permission_row, call.catalog.permissions.puts.values()))


def _permission(call: Call) -> PermissionPut:
    return existing(call.catalog.permissions.puts.get((call.part("vhost"), call.part("user"))))


async def get_permission(call: Call) -> dict[str, Any]:
    """Show the permissions of a user in a vhost."""
    return permission_row(_permission(call))


async def put_permission(call: Call) -> Any:
    """Set the permissions of a user in a vhost."""
    body = await call.body(PermissionBody)
    vhost, user = call.part("vhost"), call.part("user")
    existed = (vhost, user) in call.catalog.permissions.puts
    put = PermissionPut(vhost, user, body.configure, body.write, body.read)
    check(await call.authority.ask(put))
    return put_status(existed)


async def delete_permission(call: Call) -> None:
    """Delete the permissions of a user in a vhost."""
    put = _permission(call)
    check(await call.authority.ask(PermissionDelete(put.vhost, put.user)))


# -- topic permissions -----------------------------------------------------------------------------


async def get_topic_permissions(call: Call) -> Listing:
    """List topic permissions: all, or those of the user or vhost in the path."""
    return _of_path(call, map(topic_permission_row, call.catalog.permissions.topic_puts))


def _topic_permissions(call: Call) -> list[dict[str, Any]]:
    """Return the topic permissions of the user in the vhost of the path; neither need exist."""
    wanted = (call.part("vhost"), call.part("user"))
    puts = call.catalog.permissions.topic_puts
    return [topic_permission_row(put) for put in puts if (put.vhost, put.user) == wanted]


async def get_topic_permission(call: Call) -> Listing:
    """List the topic permissions of a user, for each exchange or for the one in the path."""
    rows, exchange = _topic_permissions(call), call.request.match_info.get("exchange")
    if not rows:
        raise not_found()
    return by_name(row for row in rows if exchange in (None, row["exchange"]))


async def put_topic_permission(call: Call) -> Any:
    """Set the topic permission of a user for an exchange."""
    body, vhost, user = await call.body(TopicPermissionBody), call.part("vhost"), call.part("user")
    existed = bool(_topic_permissions(call))
    put = TopicPermissionPut(vhost, user, body.exchange, body.write, body.read)
    check(await call.authority.ask(put))
    return put_status(existed)


async def delete_topic_permission(call: Call) -> None:
    """Delete the topic permissions of a user for all exchanges, or for ?exchange=."""
    exchange, rows = call.request.query.get("exchange"), _topic_permissions(call)
    if not rows or (exchange is not None and all(row["exchange"] != exchange for row in rows)):
        raise not_found()
    gone = TopicPermissionDelete(call.part("vhost"), call.part("user"), exchange)
    check(await call.authority.ask(gone))


async def delete_topic_permission_of(call: Call) -> None:
    """Delete the topic permission for the exchange in the path; as in RabbitMQ it may be absent."""
    exchange, rows = call.part("exchange"), _topic_permissions(call)
    if not rows:
        raise not_found()
    if any(row["exchange"] == exchange for row in rows):
        gone = TopicPermissionDelete(call.part("vhost"), call.part("user"), exchange)
        check(await call.authority.ask(gone))


PERMISSION = "/api/permissions/{vhost}/{user}"
TOPICS = "/api/topic-permissions/{vhost}/{user}"
ONE_TOPIC = "/api/topic-permissions/{vhost}/{user}/{exchange}"

ROUTES = [
    Route("GET", "/api/whoami", whoami, shows="WhoAmI"),
    long_list("/api/users", get_all, "User", "administrator"),
    Route("POST", "/api/users/bulk-delete", delete_many, "administrator", (), body=NamesBody),
    long_list("/api/users/without-permissions", without_permissions, "User", "administrator"),
    Route("GET", "/api/users/{user}", get, "administrator", shows="User"),
    Route("PUT", "/api/users/{user}", put, "administrator", body=UserBody),
    Route("DELETE", "/api/users/{user}", delete, "administrator"),
    long_list("/api/users/{user}/permissions", get_permissions, "Permission", "administrator"),
    long_list("/api/permissions", get_permissions, "Permission", "administrator"),
    Route("GET", PERMISSION, get_permission, "administrator", shows="Permission"),
    Route("PUT", PERMISSION, put_permission, "administrator", body=PermissionBody),
    Route("DELETE", PERMISSION, delete_permission, "administrator"),
    long_list("/api/topic-permissions", get_topic_permissions, "TopicPermission", "administrator"),
    long_list(
        "/api/users/{user}/topic-permissions",
        get_topic_permissions,
        "TopicPermission",
        "administrator",
    ),
    long_list(
        "/api/vhosts/{vhost}/topic-permissions",
        get_topic_permissions,
        "TopicPermission",
        "administrator",
    ),
    long_list(TOPICS, get_topic_permission, "TopicPermission", "administrator"),
    Route("PUT", TOPICS, put_topic_permission, "administrator", body=TopicPermissionBody),
    Route("DELETE", TOPICS, delete_topic_permission, "administrator", ("exchange",)),
    Route("GET", ONE_TOPIC, get_topic_permission, "administrator", is_long=True),
    Route("PUT", ONE_TOPIC, put_topic_permission, "administrator"),
    Route("DELETE", ONE_TOPIC, delete_topic_permission_of, "administrator"),
]
