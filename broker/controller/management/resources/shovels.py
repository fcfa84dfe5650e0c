"""/api/shovels: the states of shovels. Their definitions are parameters of component `shovel`."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

from shardmq.broker.controller.bridging import Bridges
from shardmq.broker.controller.management.api_error import ApiError, not_authorised
from shardmq.broker.controller.management.call import Call, Route, existing, long_list
from shardmq.broker.controller.management.responses.listing import Listing
from shardmq.broker.model import amqp_uri
from shardmq.broker.model.amqp_uri import without_credentials
from shardmq.broker.model.changes import ParameterDelete, ParameterPut
from shardmq.broker.model.shovels import PAUSED, SHOVEL, obstacle, read
from shardmq.broker.shared import bridging

UNPROCESSABLE = 422


def row(put: ParameterPut, bridges: Bridges, node: str) -> dict[str, Any]:
    """Return RabbitMQ's fields of a shovel's status, and our own. No field has a secret."""
    state = bridges.state(put)
    value = put.value if isinstance(put.value, dict) else {}
    found: dict[str, Any] = {
        "node": node,
        "name": put.name,
        "vhost": put.vhost,
        "type": "dynamic",
        "state": state.state,
        "timestamp": shown_time(state.since),
        "src_protocol": value.get("src-protocol", "amqp091"),
        "dest_protocol": value.get("dest-protocol", "amqp091"),
        "error": state.error,
        "message_count": state.moved,
        "message_bytes": state.moved_bytes,
        "refused": state.refused,
        "pending": state.pending,
        "failures": state.failures,
        "retry_in_s": state.retry_in_s,
        "blocked": state.blocked,
    }
    if state.state == bridging.RUNNING:
        found["blocked_status"] = "blocked" if state.blocked else "running"
    elif state.state == bridging.TERMINATED:
        found["reason"] = state.error
    if obstacle(put.name, put.value):
        return found
    shovel = read(put.vhost, put.name, put.value)
    if shovel.is_http:
        found["dest_protocol"] = "http"
    optional = {
        "src_queue": shovel.src_queue,
        "src_exchange": shovel.src_exchange,
        "src_exchange_key": shovel.src_exchange_key,
        "dest_queue": shovel.dest_queue,
        "dest_exchange": shovel.dest_exchange if not shovel.dest_queue else "",
        "dest_exchange_key": shovel.dest_key if not shovel.dest_queue else "",
        "dest_address": shovel.dest_address,
    }
    found |= {name: value for name, value in optional.items() if value}
    found["src_uri"] = state.src_uri or without_credentials(shovel.src_uris[0])
    found["dest_uri"] = state.dest_uri or without_credentials(shovel.dest_uris[0])
    return found


def shown_time(seconds: float) -> str:
    if not seconds:
        return ""
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}"


async def get_all(call: Call) -> Listing:
    """List shovels and their states, of all vhosts or one."""
    bridges = call.context.bridges
    if bridges is None:
        return Listing([])
    seen = {vhost.name for vhost in call.vhosts()}
    puts = [put for put in bridges.parameters() if put.vhost in seen]
    return Listing([row(put, bridges, call.context.cluster.own) for put in puts])


def _shovel(call: Call, vhost: str) -> tuple[ParameterPut, Bridges]:
    put = call.catalog.parameters.get((vhost, SHOVEL, call.part("name")))
    return existing(put), existing(call.context.bridges)


async def get(call: Call) -> dict[str, Any]:
    """Show the state of a shovel."""
    put, bridges = _shovel(call, call.vhost().name)
    return row(put, bridges, call.context.cluster.own)


async def delete(call: Call) -> None:
    """Delete a shovel, which is deleting its parameter."""
    put, _ = _shovel(call, call.vhost_to_change().name)
    await call.ask(ParameterDelete(put.vhost, SHOVEL, put.name))


async def restart(call: Call) -> None:
    """Start a shovel anew."""
    put, bridges = _shovel(call, call.vhost_to_change().name)
    bridges.restart((SHOVEL, put.vhost, put.name))


async def pause(call: Call) -> None:
    """Pause a shovel, until it is resumed. 422 if it is paused."""
    put, bridges = _shovel(call, call.vhost_to_change().name)
    if bridges.is_paused((put.vhost, put.name)):
        raise ApiError(UNPROCESSABLE, "unprocessable", "the shovel is paused already")
    await call.ask(ParameterPut(put.vhost, PAUSED, put.name, True))


async def resume(call: Call) -> None:
    """Let a paused shovel go on. 422 if it is not paused."""
    put, bridges = _shovel(call, call.vhost_to_change().name)
    if not bridges.is_paused((put.vhost, put.name)):
        raise ApiError(UNPROCESSABLE, "unprocessable", "the shovel is not paused")
    await call.ask(ParameterDelete(put.vhost, PAUSED, put.name))


# -- rights ----------------------------------------------------------------------------------------


def check_rights(call: Call, name: str, value: Any) -> None:
    """Raise 401 if a shovel enters a vhost of this broker that who sets it may not enter."""
    if not obstacle(name, value):  # a value with faults is refused later
        shovel = read("", name, value)
        check_uris(call, shovel.src_uris if shovel.is_http else shovel.src_uris + shovel.dest_uris)


def check_uris(call: Call, uris: Iterable[str], vhost: str = "/") -> None:
    """Raise 401 if a bridge with these URIs enters a vhost that who sets it may not enter.

    A URI without a host enters this broker without a password, and without a user in it as the
    broker itself, which may do everything there. So any permission in the vhost is enough, as in
    RabbitMQ. A URI that names another user is an administrator's. `vhost` is that of a URI that
    names none.
    """
    if call.is_local or call.has("administrator"):
        return
    user = call.user.name
    for uri in (amqp_uri.parse(text, vhost) for text in uris):
        if not uri.is_here:
            continue
        if uri.user not in ("", user) or not call.catalog.permissions.may_enter(user, uri.vhost):
            raise not_authorised(f'user "{user}" may not connect to vhost "{uri.vhost}"')


ONE = "/api/shovels/vhost/{vhost}/{name}"
LAVINMQ = "/api/shovels/{vhost}/{name}"

ROUTES = [
    long_list("/api/shovels", get_all, "Shovel", "monitoring"),
    long_list("/api/shovels/{vhost}", get_all, "Shovel", "monitoring"),
    Route("GET", ONE, get, "monitoring", shows="Shovel"),
    Route("DELETE", ONE, delete, "policymaker"),
    Route("DELETE", f"{ONE}/restart", restart, "policymaker"),
    Route("GET", LAVINMQ, get, "monitoring", shows="Shovel"),
    Route("PUT", f"{LAVINMQ}/pause", pause, "policymaker"),
    Route("PUT", f"{LAVINMQ}/resume", resume, "policymaker"),
]
