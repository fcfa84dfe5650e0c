"""/api/users, /api/permissions, /api/whoami"""

from __future__ import annotations

from typing import Any

import msgspec

from broker.catalog import HASHES
from broker.changes import PermissionPut, UserPut
from broker.controller.access import DEFAULT_ALGORITHM
from broker.controller.management.call import Call, Route, bad_request, check, not_found, put_status
from broker.controller.management.listing import Listing


class UserBody(msgspec.Struct):
    tags: list[str] | str
    password: str | None = None
    password_hash: str | None = None
    hashing_algorithm: str = DEFAULT_ALGORITHM


class NamesBody(msgspec.Struct):
    users: list[str]


class PermissionBody(msgspec.Struct):
    configure: str
    write: str
    read: str


def row(user: UserPut) -> dict[str, Any]:
    return {
        "name": user.name,
        "password_hash": user.password_hash,
        "hashing_algorithm": user.hashing_algorithm,
        "tags": user.tags,
        "limits": {},
    }


def permission_row(put: PermissionPut) -> dict[str, Any]:
    return {
        "user": put.user,
        "vhost": put.vhost,
        "configure": put.configure,
        "write": put.write,
        "read": put.read,
    }


def _user(call: Call) -> UserPut:
    user = call.catalog.users.get(call.part("user"))
    if user is None:
        raise not_found()
    return user


async def whoami(call: Call) -> dict[str, Any]:
    return {"name": call.user.name, "tags": call.user.tags, "is_internal_user": True}


async def get_all(call: Call) -> Listing:
    return Listing([row(user) for user in call.catalog.users.values()])


async def get(call: Call) -> dict[str, Any]:
    return row(_user(call))


async def put(call: Call) -> Any:
    body, name = await call.body(UserBody), call.part("user")
    if body.hashing_algorithm not in HASHES:
        raise bad_request(f"unknown hashing_algorithm '{body.hashing_algorithm}'")
    if body.password is not None and body.password_hash is not None:
        raise bad_request("password and password_hash: only one of them")
    tags = body.tags.split(",") if isinstance(body.tags, str) else body.tags
    existed = name in call.catalog.users
    answer = await call.context.authority.put_user(
        name,
        # An empty password is none, as in RabbitMQ: it must not become one that can be entered.
        password=body.password or None,
        password_hash=body.password_hash or "",
        tags=[tag for part in tags if (tag := part.strip())],
        hashing_algorithm=body.hashing_algorithm,
    )
    check(answer)
    return put_status(existed)


async def delete(call: Call) -> None:
    check(await call.context.authority.delete_user(_user(call).name))


async def delete_many(call: Call) -> None:
    """Who is not there is deleted already."""
    for name in (await call.body(NamesBody)).users:
        if name in call.catalog.users:
            check(await call.context.authority.delete_user(name))


async def permissions_of_user(call: Call) -> Listing:
    user = _user(call).name
    return Listing([permission_row(put) for key, put in call.catalog.permissions.items() if key[1] == user])


async def get_permissions(call: Call) -> Listing:
    return Listing([permission_row(put) for put in call.catalog.permissions.values()])


def _permission(call: Call) -> PermissionPut:
    put = call.catalog.permissions.get((call.part("vhost"), call.part("user")))
    if put is None:
        raise not_found()
    return put


async def get_permission(call: Call) -> dict[str, Any]:
    return permission_row(_permission(call))


async def put_permission(call: Call) -> Any:
    body = await call.body(PermissionBody)
    vhost, user = call.part("vhost"), call.part("user")
    existed = (vhost, user) in call.catalog.permissions
    check(await call.context.authority.put_permission(vhost, user, body.configure, body.write, body.read))
    return put_status(existed)


async def delete_permission(call: Call) -> None:
    put = _permission(call)
    check(await call.context.authority.delete_permission(put.vhost, put.user))


ROUTES = [
    Route("GET", "/api/whoami", whoami),
    Route("GET", "/api/users", get_all, "administrator"),
    Route("POST", "/api/users/bulk-delete", delete_many, "administrator"),
    Route("GET", "/api/users/{user}", get, "administrator"),
    Route("PUT", "/api/users/{user}", put, "administrator"),
    Route("DELETE", "/api/users/{user}", delete, "administrator"),
    Route("GET", "/api/users/{user}/permissions", permissions_of_user, "administrator"),
    Route("GET", "/api/permissions", get_permissions, "administrator"),
    Route("GET", "/api/permissions/{vhost}/{user}", get_permission, "administrator"),
    Route("PUT", "/api/permissions/{vhost}/{user}", put_permission, "administrator"),
    Route("DELETE", "/api/permissions/{vhost}/{user}", delete_permission, "administrator"),
]
