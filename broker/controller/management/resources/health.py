"""/api/health/checks and /api/aliveness-test: 200 {"status": "ok"}, or 503 with a reason."""

from __future__ import annotations

import time
from typing import Any, Final

from shardmq.broker.controller.management.api_error import bad_request, not_authorised
from shardmq.broker.controller.management.call import Call, Route, number
from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics import limit_usage
from shardmq.broker.controller.management.metrics.part import Part
from shardmq.broker.controller.management.resources.messages import session
from shardmq.broker.controller.management.resources.overview import listeners
from shardmq.broker.controller.management.resources.processes import (
    FEW_FILES,
    short_of_files,
    warnings,
)
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork
from shardmq.broker.controller.management.responses.listing import REGEX_CHARS_MAX
from shardmq.broker.controller.peers.front_door import Refused, Rejected, Unavailable
from shardmq.broker.model import patterns
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.checks import ACCESS_REFUSED
from shardmq.broker.shared.control import QueueDeclare
from shardmq.shardd.wire.messages import STALLED

ALIVENESS_QUEUE = "aliveness-test"
OK = {"status": "ok"}
DAY_S: Final = 86_400
# As in RabbitMQ months have 30 days and years 365; the units may be singular.
UNIT_S: Final = {
    name: days * DAY_S
    for unit, days in (("day", 1), ("week", 7), ("month", 30), ("year", 365))
    for name in (f"{unit}s", unit)
}
WITHIN_MAX: Final = 999_999
PORT_MAX: Final = 65535
SLICE_QUEUES: Final = 500  # looked at before the processor is offered
CRITICAL_SHOWN_MAX: Final = 1_000
CRITICAL: Final = (
    "There are quorum queues that would lose their quorum if the target node is shut down"
)
NO_LEADER: Final = "Detected quorum queues without an elected leader"
ONLY_COPY: Final = (
    "No other node has all definitions: without the target node nothing can be declared"
)
# Other names of protocols, as RabbitMQ knows them.
PROTOCOL_NAMES: Final = {
    other: name
    for name, others in {
        "amqp": "amqp091 amqp0.9.1 amqp0-9-1 amqp0_9_1",
        "amqp/ssl": "amqps",
        "http": "http1 http1.1 http_api management management_ui ui",
        "http/prometheus": "prometheus",
    }.items()
    for other in others.split()
}


class Unhealthy(Exception):
    """A failed check: its response is {"status": "failed", "reason": ...}."""

    def __init__(self, reason: str, **more: Any) -> None:
        super().__init__(reason)
        self.reason = reason
        self.more = more


def called_part(call: Call) -> Part:
    """Return the node in the path, else the one that was called."""
    return Part(call.context, call.node(), is_whole=False)


def why_out_of_service(part: Part) -> str | None:
    if not part.is_alive:
        return "nodedown"  # as RabbitMQ says
    shards, others = part.shards(), part.other_versions()
    not_ready = [shard.number for shard in shards if not shard.ready]
    if not_ready:
        return f"shards not ready: {', '.join(map(str, not_ready))}"
    if stalled := {shard.alarm for shard in shards} & STALLED:
        why = min(stalled)
        numbers = [str(shard.number) for shard in shards if shard.alarm == why]
        return f"{why}: shards {', '.join(numbers)}"
    if others:
        return f"front doors of another release: {', '.join(map(str, others))}"
    if not part.doors():
        return "no front door is connected"
    return None


async def ok(call: Call) -> Any:
    """Pass: tools ask for this check, which cannot fail here."""
    return OK


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


def alarms_of(part: Part) -> list[dict[str, Any]]:
    """Return the alarms of a node, or of one host."""
    found: list[dict[str, Any]] = [
        {"shard": shard.number, "alarm": shard.alarm} for shard in part.shards() if shard.alarm
    ]
    found += [{"alarm": text} for facts in part.facts.values() for text in facts.alarms]
    found += [{"process": name, "alarm": FEW_FILES} for name in short_of_files(part.rows())]
    in_cluster = {"node": part.called} if part.context.cluster.is_cluster else {}
    return [row | in_cluster for row in found]


async def _check_alarms(call: Call, parts: list[Part]) -> Any:
    found = [row for part in parts for row in alarms_of(part)]
    if found:
        raise Unhealthy("There are alarms in effect", alarms=found)
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


async def local_alarms(call: Call) -> Any:
    """Check that no alarm is in effect on the node that was called; there may be warnings."""
    return await _check_alarms(call, [called_part(call)])


def every_node(context: Context) -> list[Part]:
    return [Part(context, node.name, is_whole=False) for node in context.cluster.nodes]


async def in_service(call: Call) -> Any:
    """Check that the shards of the node that was called and a front door serve clients."""
    reason = why_out_of_service(called_part(call))
    if reason is not None:
        raise Unhealthy(reason)
    return OK


async def node(call: Call) -> Any:
    """Check everything on the node, as older tools ask it."""
    await local_alarms(call)
    return await in_service(call)


async def port_listener(call: Call) -> Any:
    """Check that the node that was called listens at a port."""
    port = number("port", call.part("port"), most=PORT_MAX)
    ports = [one["port"] for one in listeners(call.context.cluster.facts(call.via))]
    if port in ports:
        return {**OK, "port": port}
    raise Unhealthy("No active listener", missing=port, ports=ports)


async def protocol_listener(call: Call) -> Any:
    """Check that the node has a listener for each protocol in the path, with commas between."""
    given = call.part("protocol").lower()
    listening = listeners(call.context.cluster.facts(call.via))
    protocols = sorted({listener["protocol"] for listener in listening})
    missing = [
        asked for asked in given.split(",") if PROTOCOL_NAMES.get(asked, asked) not in protocols
    ]
    if not missing:
        return {**OK, "protocol": given, "protocols": protocols}
    shown = missing[0] if "," not in given else missing
    raise Unhealthy("No active listener", missing=shown, protocols=protocols)


async def below_connection_limit(call: Call) -> Any:
    """Check that there are fewer connections than the limit."""
    here, most = len(call.context.presence.connections()), call.context.presence.connections_max
    if most and here >= most:
        raise Unhealthy("Connection limit reached", connections=here, limit=most)
    return {**OK, "connections": here, "limit": most or "infinity"}


async def certificate_expiration(call: Call) -> Any:
    """Check that no certificate in the files of the settings expires within that time."""
    within = number("within", call.part("within"), most=WITHIN_MAX)
    unit = call.part("unit").lower()
    if unit not in UNIT_S:
        raise bad_request(f"unit: one of {', '.join(UNIT_S)}")
    ending = []
    for one in (one for facts in called_part(call).facts.values() for one in facts.certificates):
        if one.error:
            raise Unhealthy(f"{one.path}: {one.error}")
        if one.expires_at < time.time() + within * UNIT_S[unit]:
            ending.append({"certificate": one.path, "expires_at": one.expires_at})
    if ending:
        raise Unhealthy("Certificates expiring", expired=ending)
    return OK


async def aliveness(call: Call) -> Any:
    """Publish a message and get it, through the definitions, a front door and a shard.

    The queue is left for the next time.
    """
    vhost = call.vhost_to_change().name
    reason = why_out_of_service(called_part(call))
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


CHECKS = "/api/health/checks"

ROUTES = [
    Route("GET", f"{CHECKS}/alarms", alarms),
    Route("GET", f"{CHECKS}/local-alarms", local_alarms),
    Route("GET", f"{CHECKS}/virtual-hosts", ok),
    Route("GET", f"{CHECKS}/node-is-quorum-critical", quorum_critical),
    Route("GET", f"{CHECKS}/node-is-mirror-sync-critical", mirror_sync_critical),
    Route("GET", f"{CHECKS}/metadata-store/initialized", ok),
    Route("GET", f"{CHECKS}/metadata-store/initialized/with-data", with_data),
    *(
        Route(
            "GET", f"{CHECKS}/quorum-queues-without-elected-leaders/{where}{pattern}", quorum_queues
        )
        for where in ("all-vhosts", "vhost/{vhost}")
        for pattern in ("", "/pattern/{pattern}")
    ),
    Route("GET", f"{CHECKS}/reached-target-cluster-size", ok),
    Route("GET", f"{CHECKS}/is-in-service", in_service),
    Route("GET", f"{CHECKS}/ready-to-serve-clients", in_service),
    Route("GET", f"{CHECKS}/port-listener/{{port}}", port_listener),
    Route("GET", f"{CHECKS}/protocol-listener/{{protocol}}", protocol_listener),
    Route("GET", f"{CHECKS}/below-node-connection-limit", below_connection_limit),
    Route("GET", f"{CHECKS}/certificate-expiration/{{within}}/{{unit}}", certificate_expiration),
    Route("GET", "/api/healthchecks/node", node),
    Route("GET", "/api/healthchecks/node/{node}", node),
    Route("GET", "/api/aliveness-test/{vhost}", aliveness, shows="Check"),
]
