"""The parts of the controller that handlers and metrics use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from shardmq.broker.controller.authority import Authority
from shardmq.broker.controller.bridging import Bridges
from shardmq.broker.controller.cluster_view import ClusterView
from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.groups.groups import Groups
from shardmq.broker.controller.management.host_header import RefusalLog
from shardmq.broker.controller.management.http_connections import HttpConnections
from shardmq.broker.controller.management.import_progress import Imports
from shardmq.broker.controller.management.login import LoginCounts
from shardmq.broker.controller.management.metrics.past import Past
from shardmq.broker.controller.management.metrics.stats import Rates
from shardmq.broker.controller.management.metrics.stats_collector import StatsCollector
from shardmq.broker.controller.management.responses.long_responses import LongResponses
from shardmq.broker.controller.management.responses.sorted_queues import SortedQueues
from shardmq.broker.controller.memory import MemoryWatch
from shardmq.broker.controller.moving.mover import MoveProgress
from shardmq.broker.controller.moving.relocating import Relocating
from shardmq.broker.controller.peers.front_door import socket_path
from shardmq.broker.controller.peers.links import DoorLinks
from shardmq.broker.controller.peers.presence import Presence
from shardmq.broker.controller.peers.shard_links import ShardLinks
from shardmq.broker.controller.resharding.reshard_progress import ReshardProgress
from shardmq.broker.controller.snapshots import Snapshots
from shardmq.broker.controller.span_export import SpanExport
from shardmq.broker.controller.streams.ended_streams import EndedStreams
from shardmq.broker.controller.streams.stream_ranges import StreamRanges
from shardmq.broker.controller.streams.stream_reader import ReaderConnection, connected
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import UserPut
from shardmq.broker.shared.logins import Logins
from shardmq.cluster.membership import Inheritance
from shardmq.cluster.unclean import Elections


@dataclass(frozen=True, slots=True)
class Context:
    authority: Authority
    presence: Presence
    shards: ShardLinks
    links: DoorLinks
    config_now: Callable[[], ControllerConfig]
    stats: StatsCollector
    cluster: ClusterView
    groups: Groups = field(default_factory=lambda: Groups(lambda count: 0))
    memory: MemoryWatch = field(default_factory=MemoryWatch)
    logins: Logins = field(default_factory=Logins)
    streams: StreamRanges = field(default_factory=StreamRanges)
    ended: EndedStreams | None = None  # streams of shard queues that are gone
    spans: SpanExport | None = None  # None: no spans are made
    # Changes of the number of shards under way, by vhost and exchange.
    resharding: Mapping[tuple[str, str], ReshardProgress] = field(default_factory=dict)
    # Moves of queues to other shards, by vhost and queue.
    moves: Mapping[tuple[str, str], MoveProgress] = field(default_factory=dict)
    relocating: Relocating | None = None  # of a controller that runs
    bridges: Bridges | None = None  # of a controller that runs
    # `Claims.forget`; None without a cluster.
    forget_node: Callable[..., Awaitable[Inheritance]] | None = None
    elections: Elections | None = None  # of copies that may lack messages; None without a cluster
    snapshots: Snapshots | None = None  # of a controller that runs
    imports: Imports = field(default_factory=Imports)
    http_connections: HttpConnections = field(default_factory=HttpConnections)
    long_responses: LongResponses = field(default_factory=LongResponses)
    sorted_queues: SortedQueues = field(default_factory=SortedQueues)
    churn_rates: Rates = field(default_factory=Rates)
    node_rates: dict[str, Rates] = field(
        default_factory=lambda: defaultdict(lambda: Rates(may_fall=True))
    )
    past: Past = field(default_factory=Past)
    refusal_log: RefusalLog = field(default_factory=RefusalLog)
    http_logins: LoginCounts = field(default_factory=LoginCounts)

    def door_paths(self) -> list[str]:
        """Return the sockets of the front doors of this node that are there now."""
        config = self.config
        own = range(config.first_door, config.first_door + config.doors)
        doors = (door.number for door in self.links.doors())
        return [socket_path(config.runtime_dir, number) for number in doors if number in own]

    def to_reader(self, shard: int | None) -> AbstractAsyncContextManager[ReaderConnection]:
        """Connect to the reader of the node that has a shard; None: to that of this node.

        Raises OSError and ReaderLost.
        """
        elsewhere = self.streams.elsewhere
        if elsewhere is None or shard is None or elsewhere.is_here(shard):
            return connected(self.config.runtime_dir)
        return elsewhere.reader(shard)

    @property
    def catalog(self) -> Catalog:
        return self.authority.catalog

    @property
    def users(self) -> Mapping[str, UserPut]:
        return self.catalog.users

    @property
    def config(self) -> ControllerConfig:
        """The settings as of the last reload."""
        return self.config_now()
