"""A cluster for tests of the HTTP API: two nodes that live, and one that is down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from shardmq.broker.controller.cluster_view import ClusterView, KnownNode
from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics.stats_collector import StatsCollector
from shardmq.broker.controller.node_facts import ETCD_SILENT_S_MAX, facts_of
from shardmq.broker.shared.control import ConnectionInfo, DoorReport
from tests.http_api.conftest import OWNER, Api
from tests.support.fake_doors import FakeDoor

LEADER, OTHER, DOWN = "shardmq@a", "shardmq@b", "shardmq@c"
NODES = (
    KnownNode(0, LEADER, (0,), True), KnownNode(1, OTHER, (1,), True),
    KnownNode(2, DOWN, (2,), False),
)  # fmt: skip
SECOND = "256.7.1"  # the owner of a connection at the other node
QUEUES = 6  # on either shard there are some


class Doors:
    """A front door on each of two nodes."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def doors(self) -> list[FakeDoor]:
        return [FakeDoor(0), FakeDoor(256)]

    async def reports(self, totals_only: bool = False) -> list[DoorReport]:
        found = []
        for door, owner, count in ((0, OWNER, 7), (256, SECOND, 5)):
            counters = {"received": float(count), "channels": 1.0, "channels_opened": 2.0}
            connections = [{"owner": owner, "channels": 1, "recv_oct": count}]
            channels = [{"owner": owner, "number": 1, "published": count}]
            exchanges = [("/", "e", count, count)]
            found.append(
                DoorReport(1, [], [], counters, door=door)
                if totals_only
                else DoorReport(1, connections, channels, counters, [], exchanges, door=door)
            )
        return found


async def in_cluster(api: Api) -> Context:
    """Return the context of the leader of a cluster, with more queues and another connection.

    Each node that lives has a shard, a front door and a connection. The other one has 5 bytes of
    memory, the leader 10, and does not hear etcd.
    """
    api.login = ("guest", "guest")
    for number in range(QUEUES):
        await api.call("PUT", f"/api/queues/%2F/more-{number}", {})
    first = api.context.presence.connection(OWNER)
    assert first is not None
    info: dict[str, Any] = {name: getattr(first, name) for name in first.__struct_fields__}
    api.context.presence.up(ConnectionInfo(**{**info, "owner": SECOND, "name": "second"}))
    facts = facts_of(api.context.config, api.context.memory, 1.0)
    own = msgspec.structs.replace(facts, memory_bytes=10)
    view = ClusterView(0, LEADER, (0,), lambda: own)
    view.know(NODES, [LEADER, OTHER])
    away = ETCD_SILENT_S_MAX + 1
    view.tell(OTHER, msgspec.structs.replace(facts, memory_bytes=5, etcd_silent_s=away))
    doors: Any = Doors(api.doors)
    found = StatsCollector(api.shards, doors, api.clock, cluster=view)  # type: ignore[arg-type]
    return replace(api.context, cluster=view, links=doors, stats=found)
