"""/api/channels: the channels of clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import starmap
from typing import Any

from shardmq.broker.controller.management.api_error import not_found
from shardmq.broker.controller.management.call import Call, Route, existing, long_list
from shardmq.broker.controller.management.metrics import time_range
from shardmq.broker.controller.management.metrics.message_stats import CHANNEL_COUNTERS
from shardmq.broker.controller.management.metrics.past import CHANNEL
from shardmq.broker.controller.management.metrics.samples import add_client_samples
from shardmq.broker.controller.management.metrics.stats import Stats, details, utc_date
from shardmq.broker.controller.management.metrics.time_range import Asked
from shardmq.broker.controller.management.resources import consumers
from shardmq.broker.controller.management.resources.connections import channel_name, visible
from shardmq.broker.controller.management.responses.listing import Listing
from shardmq.broker.model.permissions import shown_user
from shardmq.broker.shared.control import ConnectionInfo

NOT_SHOWN = frozenset(("owner", "used_at_ms", *CHANNEL_COUNTERS.values()))


def message_stats(stats: Stats, report: dict[str, Any]) -> dict[str, Any]:
    """Return the message_stats of a channel."""
    earlier = stats.clients_before.channels.get((report["owner"], report["number"]))
    if earlier is None and stats.clients_before.is_whole:
        earlier = {}  # the channel is new: it counted from 0
    shown: dict[str, Any] = {}
    for said, name in CHANNEL_COUNTERS.items():
        count = report.get(name, 0)
        rate = None if earlier is None else stats.rate_of_client(count, earlier.get(name, 0))
        shown |= {said: count} | details(said, rate)
    return shown


def rows(
    call: Call,
    stats: Stats,
    is_wanted: Callable[[ConnectionInfo, int], bool] = lambda info, number: True,
) -> Iterator[dict[str, Any]]:
    """Return rows of the visible channels with the samples that the call asks for."""
    seen = {info.owner: info for info in visible(call)}
    found: Iterable[tuple[ConnectionInfo, dict[str, Any]]] = (
        (info, report)
        for report in stats.clients.channels.values()
        if (info := seen.get(report["owner"])) is not None and is_wanted(info, report["number"])
    )
    wanted = time_range.asked(call.request.query)
    if wanted is not None:
        found = list(found)
        time_range.check_samples(wanted, CHANNEL, len(found))
    return starmap(partial(_row, call, stats, wanted), found)


def _row(
    call: Call, stats: Stats, wanted: Asked | None, info: ConnectionInfo, report: dict[str, Any]
) -> dict[str, Any]:
    shown = {
        "name": channel_name(info, report["number"]),
        "vhost": info.vhost,
        "user": shown_user(info.user),
        "user_who_performed_action": shown_user(info.user),
        "node": call.context.cluster.of_owner(info.owner),
        "state": "running",
        "connection_details": {
            "name": info.name,
            "peer_host": info.peer_host,
            "peer_port": info.peer_port,
        },
        **{name: value for name, value in report.items() if name not in NOT_SHOWN},
        "idle_since": utc_date(report.get("used_at_ms")),
        "message_stats": message_stats(stats, report),
    }
    if wanted is not None:
        key = (report["owner"], report["number"])
        add_client_samples(shown, call.context.past, CHANNEL, stats, key, wanted)
    return shown


async def get_all(call: Call) -> Listing:
    """List channels, of all vhosts or of the one in the path."""
    return Listing(rows(call, await call.context.stats.now()))


async def of_connection(call: Call) -> Listing:
    """List the channels of a connection."""
    name = call.part("connection")
    existing(call.context.presence.by_name(name))
    stats = await call.context.stats.now()
    return Listing(rows(call, stats, lambda info, number: info.name == name))


async def get(call: Call) -> dict[str, Any]:
    """Show a channel with its consumers."""
    stats, name = await call.context.stats.now(), call.part("channel")

    def look() -> dict[str, Any] | None:
        named = rows(call, stats, lambda info, number: channel_name(info, number) == name)
        return next(named, None)

    found = look()
    if found is None and call.context.presence.by_name(name.rpartition(" (")[0]) is not None:
        stats = await call.context.stats.anew(totals_only=False)  # it may be new
        found = look()
    if found is None:
        raise not_found()
    consuming: list[dict[str, Any]] = []
    info = call.context.presence.by_name(found["connection_details"]["name"])
    if info is not None:
        call.context.past.see(CHANNEL, (info.owner, found["number"]))
        end = (*consumers.end_of(info.owner), found["number"])
        consuming += consumers.rows(
            call, stats, lambda one: (one.door, one.connection, one.channel) == end
        )
    return {**found, "consumer_details": consuming, "publishes": [], "deliveries": []}


ROUTES = [
    long_list("/api/channels", get_all, "Channel"),
    Route("GET", "/api/channels/{channel}", get, shows="Channel"),
    long_list("/api/vhosts/{vhost}/channels", get_all, "Channel"),
    long_list("/api/connections/{connection}/channels", of_connection, "Channel"),
]
