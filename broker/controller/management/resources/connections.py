"""/api/connections: the connections of clients, and closing them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardmq.broker.controller.management.api_error import bad_request, not_authorised, not_found
from shardmq.broker.controller.management.call import Call, Route, long_list
from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics import time_range
from shardmq.broker.controller.management.metrics.message_stats import OCTETS
from shardmq.broker.controller.management.metrics.past import CONNECTION
from shardmq.broker.controller.management.metrics.samples import add_client_samples
from shardmq.broker.controller.management.metrics.stats import Stats, details
from shardmq.broker.controller.management.responses.listing import Listing
from shardmq.broker.model.permissions import shown_user
from shardmq.broker.shared.control import DIRECT_PROTOCOL, ConnectionInfo

CLOSE_REASON = "Closed via management plugin"
REASON_CHARS_MAX = 200
SEARCHED = ("name", "user_provided_name")  # the columns in which ?name= is searched for


def row(context: Context, info: ConnectionInfo, stats: Stats) -> dict[str, Any]:
    report = {**stats.clients.connections.get(info.owner, {})}
    report.pop("owner", None)
    # A connection that is new since all front doors answered has counted from 0.
    unknown = dict.fromkeys(OCTETS, 0) if stats.clients_before.is_whole else {}
    earlier = stats.clients_before.connections.get(info.owner, unknown)
    for name in OCTETS:
        if name in report and name in earlier:
            report |= details(name, stats.rate_of_client(report[name], earlier[name]))
    return {
        "name": info.name,
        "user": shown_user(info.user),
        "user_who_performed_action": shown_user(info.user),
        "vhost": info.vhost,
        "node": context.cluster.of_owner(info.owner),
        "peer_host": info.peer_host,
        "peer_port": info.peer_port,
        "host": info.host,
        "port": info.port,
        "protocol": info.protocol,
        "auth_mechanism": info.auth_mechanism,
        "ssl": info.tls,
        "ssl_protocol": info.tls_version or None,
        "ssl_cipher": info.tls_cipher or None,
        "peer_cert_subject": info.peer_cert_subject or None,
        "peer_cert_issuer": info.peer_cert_issuer or None,
        "frame_max": info.frame_max,
        "channel_max": info.channel_max,
        "timeout": info.heartbeat_s,
        "connected_at": info.connected_at_ms,
        "client_properties": info.client_properties,
        "user_provided_name": info.client_properties.get("connection_name"),
        "type": "direct" if info.protocol == DIRECT_PROTOCOL else "network",
        "state": "running",
        "pid": info.name,
        "reductions": 0,  # of an Erlang process, which a connection is not here
        "reductions_details": {"rate": 0.0},
        **report,
    }


def channel_name(info: ConnectionInfo, number: int) -> str:
    return f"{info.name} ({number})"


def visible(call: Call) -> list[ConnectionInfo]:
    """Return the connections of the vhost or user in the path that the user may see.

    Without the tag monitoring these are only the user's own.
    """
    vhost = call.vhost().name if "vhost" in call.request.match_info else None
    user = call.request.match_info.get("user")
    return [
        info
        for info in call.context.presence.connections()
        if vhost in (None, info.vhost)
        and user in (None, info.user)
        and (call.has("monitoring") or info.user == call.user.name)
    ]


def _rows(call: Call, found: list[ConnectionInfo], stats: Stats) -> Iterator[dict[str, Any]]:
    """Return rows with the samples that the call asks for."""
    wanted = time_range.asked(call.request.query)
    if wanted is not None:
        time_range.check_samples(wanted, CONNECTION, len(found))

    def with_samples(info: ConnectionInfo) -> dict[str, Any]:
        shown = row(call.context, info, stats)
        if wanted is not None:
            add_client_samples(shown, call.context.past, CONNECTION, stats, info.owner, wanted)
        return shown

    return map(with_samples, found)


async def get_all(call: Call) -> Listing:
    """List connections: all, or those of the user or vhost in the path."""
    # The front doors answer behind what they tell of their connections, so this list is the newer.
    stats = await call.context.stats.now()
    return Listing(_rows(call, visible(call), stats), SEARCHED)


def _connection(call: Call) -> ConnectionInfo:
    info = call.context.presence.by_name(call.part("connection"))
    if info is None or not (call.has("monitoring") or info.user == call.user.name):
        raise not_found()
    return info


async def get(call: Call) -> dict[str, Any]:
    """Show a connection."""
    info = _connection(call)
    call.context.past.see(CONNECTION, info.owner)
    return next(_rows(call, [info], await call.context.stats.now()))


async def sessions(call: Call) -> None:
    """Refuse: only connections of AMQP 1.0 have sessions."""
    _connection(call)
    raise bad_request("connection does not use AMQP 1.0")


async def delete(call: Call) -> None:
    """Close a connection; the header `X-Reason` says why."""
    info = _connection(call)
    if info.user != call.user.name and not call.has("administrator"):
        raise not_found()
    _close(call, [info])


def _close(call: Call, connections: list[ConnectionInfo]) -> None:
    reason = call.request.headers.get("X-Reason", CLOSE_REASON)[:REASON_CHARS_MAX]
    for info in connections:
        call.authority.close_connection(info.owner, reason)


async def delete_of_user(call: Call) -> None:
    """Close all connections of a user; the header `X-Reason` says why."""
    if call.part("user") != call.user.name and not call.has("administrator"):
        raise not_authorised("Not administrator user")
    _close(call, visible(call))


ROUTES = [
    long_list("/api/connections", get_all, "Connection"),
    long_list("/api/connections/username/{user}", get_all, "Connection"),
    Route("DELETE", "/api/connections/username/{user}", delete_of_user),
    Route("GET", "/api/connections/{connection}", get, shows="Connection"),
    Route("DELETE", "/api/connections/{connection}", delete),
    Route("GET", "/api/connections/{connection}/sessions", sessions),
    long_list("/api/vhosts/{vhost}/connections", get_all, "Connection"),
]
