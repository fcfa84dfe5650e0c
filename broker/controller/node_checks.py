"""The health checks that a node can answer by what it knows of itself.

The node that leads knows its own state and that of the others; each other node knows its own. Both
check a `NodeState` by the functions of CHECKS, which pass with the content of the response, or
raise Unhealthy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from shardmq.broker.controller.management.api_error import bad_request
from shardmq.broker.controller.management.numbers import number
from shardmq.broker.controller.node_facts import NodeFacts
from shardmq.shardd.wire.messages import STALLED

OK: Final = {"status": "ok"}
FEW_FILES: Final = "file_descriptor_limit"
FILES_PART_MAX: Final = 0.9
FILES_UNLIMITED: Final = 1 << 62
DAY_S: Final = 86_400
# As in RabbitMQ months have 30 days and years 365; the units may be singular.
UNIT_S: Final = {
    name: days * DAY_S
    for unit, days in (("day", 1), ("week", 7), ("month", 30), ("year", 365))
    for name in (f"{unit}s", unit)
}
WITHIN_MAX: Final = 999_999
PORT_MAX: Final = 65535
# The names of protocols, by the names of listeners.
PROTOCOLS: Final = {
    "amqp": "amqp",
    "amqps": "amqp/ssl",
    "http": "http",
    "https": "https",
    "metrics": "http/prometheus",
    "cluster": "clustering",
}
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


class ShardState(Protocol):
    """A shard that the node is to serve; `alarm` is "" if there is none."""

    @property
    def number(self) -> int: ...
    @property
    def ready(self) -> bool: ...
    @property
    def alarm(self) -> str: ...


class NodeState(NamedTuple):
    """The facts about a node that its checks look at.

    name: that of the node; "" without a cluster.
    facts: those that the node has told; none if it has not.
    rows: its processes, as in NodeFacts.
    doors: how many front doors serve.
    other_versions: the numbers of front doors that are refused for their wire version.
    """

    name: str
    is_alive: bool
    facts: Collection[NodeFacts]
    rows: list[dict[str, Any]]
    shards: Collection[ShardState]
    doors: int
    other_versions: Collection[int] = ()


Check = Callable[[NodeState, Mapping[str, str]], dict[str, Any]]


def listeners(facts: Mapping[str, NodeFacts]) -> list[dict[str, Any]]:
    """Return the listening sockets of these nodes, by name; the supervisors have opened them."""
    return [
        {
            "node": node,
            "protocol": protocol,
            "ip_address": address.rpartition(":")[0].strip("[]"),
            "port": int(address.rpartition(":")[2]),
        }
        for node, told in facts.items()
        for name, protocol in PROTOCOLS.items()
        for address in told.listeners.get(name, [])
    ]


def short_of_files(found: Iterable[dict[str, Any]]) -> list[str]:
    """Return the processes among these rows that will soon have no file descriptors left.

    A front door then admits no client until another one leaves.
    """
    return [
        str(row["name"])
        for row in found
        if (row.get("fd_used") or 0) > FILES_PART_MAX * (row.get("fd_total") or FILES_UNLIMITED)
    ]


def why_out_of_service(node: NodeState) -> str | None:
    """Return why a node serves no clients, None if it does."""
    if not node.is_alive:
        return "nodedown"  # as RabbitMQ says
    not_ready = [shard.number for shard in node.shards if not shard.ready]
    if not_ready:
        return f"shards not ready: {', '.join(map(str, not_ready))}"
    if stalled := {shard.alarm for shard in node.shards} & STALLED:
        why = min(stalled)
        numbers = [str(shard.number) for shard in node.shards if shard.alarm == why]
        return f"{why}: shards {', '.join(numbers)}"
    if node.other_versions:
        return f"front doors of another release: {', '.join(map(str, node.other_versions))}"
    if not node.doors:
        return "no front door is connected"
    return None


def alarms_of(node: NodeState) -> list[dict[str, Any]]:
    """Return the alarms of a node."""
    found: list[dict[str, Any]] = [
        {"shard": shard.number, "alarm": shard.alarm} for shard in node.shards if shard.alarm
    ]
    found += [{"alarm": text} for facts in node.facts for text in facts.alarms]
    found += [{"process": name, "alarm": FEW_FILES} for name in short_of_files(node.rows)]
    in_cluster = {"node": node.name} if node.name else {}
    return [row | in_cluster for row in found]


def check_alarms(nodes: Iterable[NodeState]) -> dict[str, Any]:
    if found := [row for node in nodes for row in alarms_of(node)]:
        raise Unhealthy("There are alarms in effect", alarms=found)
    return OK


# -- the checks ------------------------------------------------------------------------------------


def ok(node: NodeState, path: Mapping[str, str]) -> dict[str, Any]:
    """Pass: tools ask for this check, which cannot fail here."""
    return OK


def local_alarms(node: NodeState, path: Mapping[str, str]) -> dict[str, Any]:
    """Check that no alarm is in effect on the node that was called; there may be warnings."""
    return check_alarms([node])


def in_service(node: NodeState, path: Mapping[str, str]) -> dict[str, Any]:
    """Check that the shards of the node that was called and a front door serve clients."""
    reason = why_out_of_service(node)
    if reason is not None:
        raise Unhealthy(reason)
    return OK


def port_listener(node: NodeState, path: Mapping[str, str]) -> dict[str, Any]:
    """Check that the node that was called listens at a port."""
    port = number("port", path["port"], most=PORT_MAX)
    ports = [one["port"] for one in _listening(node)]
    if port in ports:
        return {**OK, "port": port}
    raise Unhealthy("No active listener", missing=port, ports=ports)


def protocol_listener(node: NodeState, path: Mapping[str, str]) -> dict[str, Any]:
    """Check that the node has a listener for each protocol in the path, with commas between."""
    given = path["protocol"].lower()
    protocols = sorted({one["protocol"] for one in _listening(node)})
    missing = [
        asked for asked in given.split(",") if PROTOCOL_NAMES.get(asked, asked) not in protocols
    ]
    if not missing:
        return {**OK, "protocol": given, "protocols": protocols}
    shown = missing[0] if "," not in given else missing
    raise Unhealthy("No active listener", missing=shown, protocols=protocols)


def certificate_expiration(node: NodeState, path: Mapping[str, str]) -> dict[str, Any]:
    """Check that no certificate in the files of the settings expires within that time."""
    within = number("within", path["within"], most=WITHIN_MAX)
    unit = path["unit"].lower()
    if unit not in UNIT_S:
        raise bad_request(f"unit: one of {', '.join(UNIT_S)}")
    ending = []
    for one in (one for facts in node.facts for one in facts.certificates):
        if one.error:
            raise Unhealthy(f"{one.path}: {one.error}")
        if one.expires_at < time.time() + within * UNIT_S[unit]:
            ending.append({"certificate": one.path, "expires_at": one.expires_at})
    if ending:
        raise Unhealthy("Certificates expiring", expired=ending)
    return OK


def node_is_well(node: NodeState, path: Mapping[str, str]) -> dict[str, Any]:
    """Check everything on the node, as older tools ask it."""
    check_alarms([node])
    return in_service(node, path)


def _listening(node: NodeState) -> list[dict[str, Any]]:
    return [row for facts in node.facts for row in listeners({node.name: facts})]


BEGIN: Final = "/api/health/checks"
# By the path, with the names of its parts in braces.
CHECKS: Final[dict[str, Check]] = {
    f"{BEGIN}/local-alarms": local_alarms,
    f"{BEGIN}/virtual-hosts": ok,
    f"{BEGIN}/metadata-store/initialized": ok,
    f"{BEGIN}/reached-target-cluster-size": ok,
    f"{BEGIN}/is-in-service": in_service,
    f"{BEGIN}/ready-to-serve-clients": in_service,
    f"{BEGIN}/port-listener/{{port}}": port_listener,
    f"{BEGIN}/protocol-listener/{{protocol}}": protocol_listener,
    f"{BEGIN}/certificate-expiration/{{within}}/{{unit}}": certificate_expiration,
    "/api/healthchecks/node": node_is_well,
}
