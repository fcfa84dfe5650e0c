"""/api/health/checks and /api/aliveness-test: 200 {"status": "ok"}, or 503 with a reason."""

from __future__ import annotations

from typing import Any, Final

from shardmq.broker.controller.management.api_error import bad_request, not_authorised
from shardmq.broker.controller.management.call import Call, Handler, Route
from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics import limit_usage
from shardmq.broker.controller.management.metrics.part import Part
from shardmq.broker.controller.management.resources.messages import session
from shardmq.broker.controller.management.resources.processes import warnings
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork
from shardmq.broker.controller.management.responses.listing import REGEX_CHARS_MAX
from shardmq.broker.controller.node_checks import (
    BEGIN,
    CHECKS,
    OK,
    Check,
    Unhealthy,
    check_alarms,
    local_alarms,
    node_is_well,
    why_out_of_service,
)
from shardmq.broker.controller.peers.front_door import Refused, Rejected, Unavailable
from shardmq.broker.model import patterns
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.checks import ACCESS_REFUSED
from shardmq.broker.shared.control import QueueDeclare

ALIVENESS_QUEUE = "aliveness-test"
SLICE_QUEUES: Final = 500  # looked at before the processor is offered
CRITICAL_SHOWN_MAX: Final = 1_000
CRITICAL: Final = (
    "There are quorum queues that would lose their quorum if the target node is shut down"
)
NO_LEADER: Final = "Detected quorum queues without an elected leader"
ONLY_COPY: Final = (
    "No other node has all definitions: without the target node nothing can be declared"
)


def called_part(call: Call) -> Part:
    """Return the node in the path, else the one that was called."""
    return Part(call.context, call.node(), is_whole=False)


async def with_data(call: Call) -> Any:
    """Check that there is at least one vhost."""
    if not call.catalog.vhosts:
        raise Unhealthy("Metadata store has not yet been initialized: it has no virtual hosts")
    return OK


async def mirror_sync_critical(call: Call) -> Any:
    """Pass, as queues have no mirrors."""
    return OK if len(call.context.cluster.nodes) > 1 else {**OK, "reason": "single node cluster"}


async def quorum_critical(call: Call) -> Any:
    """Check that no quorum queue and no definition needs the node that was called."""
    cluster, name = call.context.cluster, call.via
    if len(cluster.nodes) == 1:
        return {**OK, "reason": "single node cluster"}
    others = {node.name for node in cluster.nodes if node.is_alive} - {name}
    if name in cluster.in_sync and not others & set(cluster.in_sync):
        raise Unhealthy(ONLY_COPY, queues=[])
    shards = {
        shard.number
        for shard in call.context.shards.shards
        if name in (copies := cluster.in_sync_of(shard.number)) and not others & set(copies)
    }
    vhosts = list(call.context.catalog.vhosts.values())
    if found := await _quorum_queues_on(shards, vhosts, patterns.compiled("")):
        raise Unhealthy(CRITICAL, queues=found)
    return OK


async def _quorum_queues_on(
    shards: set[int], vhosts: list[Vhost], pattern: patterns.Pattern
) -> list[dict[str, str]]:
    """Return the first quorum queues that lie on these shards and whose name matches."""
    found, work = list[dict[str, str]](), SlicedWork()
    for vhost in vhosts:
        queues = list(vhost.queues.values())
        for start in range(0, len(queues), SLICE_QUEUES):
            found += [
                {
                    "readable_name": f"queue '{queue.name}' in vhost '{queue.vhost}'",
                    "name": queue.name,
                    "virtual_host": queue.vhost,
                    "type": "quorum",
                }
                for queue in queues[start : start + SLICE_QUEUES]
                if queue.shard in shards
                and queue.arguments.get("x-queue-type") == "quorum"
                and pattern.search(queue.name)
            ]
            if len(found) >= CRITICAL_SHOWN_MAX:
                return found[:CRITICAL_SHOWN_MAX]
            await work.yield_to_others()
    return found


async def quorum_queues(call: Call) -> Any:
    """Check that each quorum queue has a leader: that its shard serves."""
    is_of_one = "vhost" in call.request.match_info
    vhosts = [call.vhost()] if is_of_one else list(call.context.catalog.vhosts.values())
    try:
        wanted = patterns.compiled(call.request.match_info.get("pattern", "")[:REGEX_CHARS_MAX])
    except patterns.BadPattern as error:
        raise bad_request(f"pattern: {error}") from None
    shards = {shard.number for shard in call.context.shards.shards if not shard.ready}
    if found := await _quorum_queues_on(shards, vhosts, wanted):
        raise Unhealthy(NO_LEADER, queues=found)
    return OK


def of_node(check: Check) -> Handler:
    """Return the handler of a check of the node in the path, else of the one that was called."""

    async def handler(call: Call) -> Any:
        return check(called_part(call).state(), call.request.match_info)

    handler.__doc__ = check.__doc__
    return handler


async def _check_alarms(call: Call, parts: list[Part]) -> Any:
    check_alarms(part.state() for part in parts)
    stats = await call.context.stats.of_shards()
    shards = {shard.number for part in parts for shard in part.shards()}
    warned: list[dict[str, Any]] = [{"warning": text} for text in limit_usage.near(call.context)]
    warned += [
        {"shard": shard, "warning": text}
        for shard, row in stats.shards.items()
        for text in (warnings(row) if shard in shards else ())
    ]
    return {**OK, "warnings": warned} if warned else OK


async def alarms(call: Call) -> Any:
    """Check that no alarm is in effect on any node; the answer also has warnings."""
    return await _check_alarms(call, every_node(call.context))


async def with_warnings(call: Call) -> Any:
    return await _check_alarms(call, [called_part(call)])


with_warnings.__doc__ = local_alarms.__doc__


def every_node(context: Context) -> list[Part]:
    return [Part(context, node.name, is_whole=False) for node in context.cluster.nodes]


async def below_connection_limit(call: Call) -> Any:
    """Check that there are fewer connections than the limit."""
    here, most = len(call.context.presence.connections()), call.context.presence.connections_max
    if most and here >= most:
        raise Unhealthy("Connection limit reached", connections=here, limit=most)
    return {**OK, "connections": here, "limit": most or "infinity"}


async def aliveness(call: Call) -> Any:
    """Publish a message and get it, through the definitions, a front door and a shard.

    The queue is left for the next time.
    """
    vhost = call.vhost_to_change().name
    reason = why_out_of_service(called_part(call).state())
    if reason is not None:
        raise Unhealthy(reason)
    await call.ask(QueueDeclare(vhost, ALIVENESS_QUEUE, False, False, False, {}))
    try:
        async with session(call, vhost, publishes=True) as opened:
            routed = await opened.publish("", ALIVENESS_QUEUE, {}, b"test_message")
            got = await opened.get(ALIVENESS_QUEUE, 1, requeue=False, reject=False)
    except (Refused, Rejected, Unavailable) as error:
        if isinstance(error, Refused) and error.code == ACCESS_REFUSED:
            # The user lacks a right; the broker is well.
            raise not_authorised(error.text) from None
        raise Unhealthy(str(error) or "a message was rejected") from None
    if not routed or not got:
        raise Unhealthy("a message was not delivered")
    return OK


# The node that leads knows what to warn of, too.
HANDLERS: Final = {f"{BEGIN}/local-alarms": with_warnings}

ROUTES = [
    *(Route("GET", path, HANDLERS.get(path, of_node(check))) for path, check in CHECKS.items()),
    Route("GET", f"{BEGIN}/alarms", alarms),
    Route("GET", f"{BEGIN}/node-is-quorum-critical", quorum_critical),
    Route("GET", f"{BEGIN}/node-is-mirror-sync-critical", mirror_sync_critical),
    Route("GET", f"{BEGIN}/metadata-store/initialized/with-data", with_data),
    *(
        Route(
            "GET", f"{BEGIN}/quorum-queues-without-elected-leaders/{where}{pattern}", quorum_queues
        )
        for where in ("all-vhosts", "vhost/{vhost}")
        for pattern in ("", "/pattern/{pattern}")
    ),
    Route("GET", f"{BEGIN}/below-node-connection-limit", below_connection_limit),
    Route("GET", "/api/healthchecks/node/{node}", of_node(node_is_well)),
    Route("GET", "/api/aliveness-test/{vhost}", aliveness, shows="Check"),
]
