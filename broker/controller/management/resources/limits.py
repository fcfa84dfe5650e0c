"""/api/vhost-limits and /api/user-limits: the limits of one vhost or user are one parameter."""

from __future__ import annotations

from typing import Any

from shardmq.broker.controller.management.api_error import bad_request, not_found
from shardmq.broker.controller.management.call import Call, Route, long_list, with_keys
from shardmq.broker.controller.management.responses.listing import Listing, by_name
from shardmq.broker.controller.management.responses.schemas import INTEGER, object_of
from shardmq.broker.controller.policies import USER_LIMITS, VHOST_LIMITS, check_limit
from shardmq.broker.model.changes import ParameterDelete, ParameterPut
from shardmq.broker.model.checks import Refusal

VHOST_PARAMETER = "limits"  # the name of the parameter of each vhost


def limits_of(put: ParameterPut | None) -> dict[str, Any]:
    return dict(put.value) if put is not None and isinstance(put.value, dict) else {}


def user_limits(call: Call, user: str) -> dict[str, Any]:
    return limits_of(call.catalog.parameters.get(("", USER_LIMITS, user)))


async def _set(call: Call, vhost: str, component: str, parameter: str, value: Any) -> None:
    """Set one limit, or with None delete it."""
    name = call.part("name")
    limits = limits_of(call.catalog.parameters.get((vhost, component, parameter)))
    if value is not None:
        limits[name] = value
    elif limits.pop(name, None) is None:
        return  # as in RabbitMQ deleting what is not there is no error
    if limits:
        await call.ask(ParameterPut(vhost, component, parameter, limits))
    else:
        await call.ask(ParameterDelete(vhost, component, parameter))


async def _value(call: Call, component: str) -> Any:
    value = with_keys(await call.json(), "value")["value"]
    try:
        check_limit(component, call.part("name"), value)
    except Refusal as refusal:
        raise bad_request(refusal.text) from None
    return value


# -- of vhosts -------------------------------------------------------------------------------------


async def get_vhosts(call: Call) -> Listing:
    """List the limits of vhosts: all, or those of the vhost in the path."""
    rows = []
    for vhost in call.vhosts():
        limits = limits_of(call.catalog.parameters.get((vhost.name, VHOST_LIMITS, VHOST_PARAMETER)))
        if limits:
            rows.append({"vhost": vhost.name, "value": limits})
    return by_name(rows)


async def put_vhost(call: Call) -> None:
    """Set a limit of a vhost."""
    vhost = call.vhost().name
    await _set(call, vhost, VHOST_LIMITS, VHOST_PARAMETER, await _value(call, VHOST_LIMITS))


async def delete_vhost(call: Call) -> None:
    """Delete a limit of a vhost."""
    await _set(call, call.vhost().name, VHOST_LIMITS, VHOST_PARAMETER, None)


# -- of users --------------------------------------------------------------------------------------


def _user(call: Call) -> str:
    user = call.part("user")
    if user not in call.catalog.users:
        raise not_found()
    return user


async def get_users(call: Call) -> Listing:
    """Return the limits of users; as in RabbitMQ an empty list for users with too low a tag."""
    wanted = [_user(call)] if "user" in call.request.match_info else list(call.catalog.users)
    if not call.has("administrator"):
        return Listing([])
    rows = [
        {"user": user, "value": limits} for user in wanted if (limits := user_limits(call, user))
    ]
    return by_name(rows)


async def put_user(call: Call) -> None:
    """Set a limit of a user."""
    user = call.part("user")
    if user not in call.catalog.users:
        raise bad_request(f"no such user: {user}")
    await _set(call, "", USER_LIMITS, user, await _value(call, USER_LIMITS))


async def delete_user(call: Call) -> None:
    """Delete a limit of a user."""
    await _set(call, "", USER_LIMITS, _user(call), None)


ROUTES = [
    long_list("/api/vhost-limits", get_vhosts, "VhostLimits"),
    long_list("/api/vhost-limits/{vhost}", get_vhosts, "VhostLimits"),
    Route(
        "PUT",
        "/api/vhost-limits/{vhost}/{name}",
        put_vhost,
        "administrator",
        body=object_of(value=INTEGER),
    ),
    Route("DELETE", "/api/vhost-limits/{vhost}/{name}", delete_vhost, "administrator"),
    long_list("/api/user-limits", get_users, "UserLimits"),
    long_list("/api/user-limits/{user}", get_users, "UserLimits"),
    Route(
        "PUT",
        "/api/user-limits/{user}/{name}",
        put_user,
        "administrator",
        body=object_of(value=INTEGER),
    ),
    Route("DELETE", "/api/user-limits/{user}/{name}", delete_user, "administrator"),
]
