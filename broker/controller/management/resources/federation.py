"""/api/federation-links: the states of links.

Their upstreams are parameters. The node in the path of a restart is not looked at.
"""

from __future__ import annotations

from typing import Any

from shardmq.broker.controller.management.api_error import not_found
from shardmq.broker.controller.management.call import Call, Route, long_list
from shardmq.broker.controller.management.resources import channels
from shardmq.broker.controller.management.resources.shovels import check_uris, shown_time
from shardmq.broker.controller.management.responses.listing import Listing
from shardmq.broker.model.amqp_uri import without_credentials
from shardmq.broker.model.federation import UPSTREAM, Link, QueueLink, faults
from shardmq.broker.shared.bridging import RUNNING, STARTING, BridgeState, key_of

DOWN = "error"
PUBLISHING = 1  # the channel of a link's messages (bridges/connection.py); others are for requests


def status(state: BridgeState) -> str:
    """Return RabbitMQ's word for a state: starting, running or error."""
    if state.state == RUNNING:
        return RUNNING
    return STARTING if state.state == STARTING and not state.error else DOWN


def ends(link: Link) -> dict[str, str]:
    """Return the fields that name what is federated and what is at the upstream."""
    if isinstance(link, QueueLink):
        return {"type": "queue", "queue": link.queue, "upstream_queue": link.upstream_queue}
    return {
        "type": "exchange",
        "exchange": link.exchange,
        "upstream_exchange": link.upstream_exchange,
    }


def row(link: Link, state: BridgeState, node: str) -> dict[str, Any]:
    """Return RabbitMQ's fields of a link, and our own. No field has a secret."""
    runs = state.state == RUNNING
    uri = "" if link.source.obstacle else without_credentials(link.source.uris[0])
    return {
        "node": node,
        "vhost": link.vhost,
        "id": link.id,
        "upstream": link.source.upstream,
        "policy": link.source.policy,
        **ends(link),
        "uri": state.src_uri or uri,
        "status": status(state),
        "timestamp": shown_time(state.since),
        "error": state.error,
        "message_count": state.moved,
        "message_bytes": state.moved_bytes,
        "refused": state.refused,
        "dropped": state.dropped,
        "pending": state.pending,
        "failures": state.failures,
        "retry_in_s": state.retry_in_s,
        "is_pulling": state.pulls and runs,
        "blocked": state.blocked if runs else "",
        **({"local_connection": state.local_connection} if runs else {}),
    }


async def _rows(call: Call) -> list[dict[str, Any]]:
    """Return a row for each link, with the channel that it publishes on, as /api/channels has it.

    A channel that is so new that it is not in the listings yet is missing.
    """
    bridges = call.context.bridges
    seen = {vhost.name for vhost in call.vhosts()}
    links = () if bridges is None else bridges.links()
    node = call.context.cluster.own
    found = [row(link, state, node) for link, state in links if link.vhost in seen]
    names = {each["local_connection"] for each in found if each.get("local_connection")}
    if names:
        own = await _first_channels(call, names)
        for each in found:
            if (channel := own.get(each.get("local_connection", ""))) is not None:
                each["local_channel"] = channel
    return found


async def _first_channels(call: Call, names: set[str]) -> dict[str, dict[str, Any]]:
    """Return the first channel of each of these connections: that of the messages."""
    stats = await call.context.stats.now()
    shown = channels.rows(
        call, stats, lambda info, number: info.name in names and number == PUBLISHING
    )
    return {channel["connection_details"]["name"]: channel for channel in shown}


async def get_all(call: Call) -> Listing:
    """List links of federation and their states, of all vhosts or one."""
    return Listing(await _rows(call))


async def get_down(call: Call) -> Listing:
    """List links of federation that do not run, of all vhosts or one."""
    return Listing([each for each in await _rows(call) if each["status"] != RUNNING])


async def restart(call: Call) -> None:
    """Start a link anew, or all links with the id."""
    vhost, id, bridges = call.vhost_to_change().name, call.part("id"), call.context.bridges
    found = [] if bridges is None else [link for link, _ in bridges.links()]
    meant = [link for link in found if link.vhost == vhost and link.id == id]
    if not meant or bridges is None:
        raise not_found()
    for link in meant:
        bridges.restart(key_of(link))


def check_rights(call: Call, vhost: str, component: str, name: str, value: Any) -> None:
    """Raise 401 if links of an upstream would enter a vhost that the user may not enter."""
    if any(faults(component, name, value)):
        return  # refused later
    for element in [value] if component == UPSTREAM else value:
        uris = element.get("uri", [])
        check_uris(call, [uris] if isinstance(uris, str) else uris, vhost)


ALL = "/api/federation-links"

ROUTES = [
    long_list(ALL, get_all, "FederationLink", "monitoring"),
    long_list(f"{ALL}/state/down", get_down, "FederationLink", "monitoring"),
    long_list(f"{ALL}/{{vhost}}", get_all, "FederationLink", "monitoring"),
    long_list(f"{ALL}/{{vhost}}/state/down", get_down, "FederationLink", "monitoring"),
    Route("DELETE", f"{ALL}/vhost/{{vhost}}/{{id}}/{{node}}/restart", restart, "policymaker"),
]
