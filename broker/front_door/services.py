"""The services that all connections of a front door share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardmq.broker.amqp.states import ConnectionState
from shardmq.broker.front_door.alarms import Alarms
from shardmq.broker.front_door.consume.consuming import Consuming
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.links.catalog_link import CatalogLink
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.loop import PassLoop
from shardmq.broker.front_door.publish.publish import Publishing
from shardmq.broker.front_door.publish.spans import Spans
from shardmq.broker.front_door.session import Lesson
from shardmq.broker.front_door.short_way import ShortWay, Watch
from shardmq.broker.front_door.topology.steps import StepRunner
from shardmq.broker.front_door.vhost_counts import VhostCounts
from shardmq.broker.model import checks
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.shared.cluster_name import cluster_name
from shardmq.broker.shared.config import BrokerConfig
from shardmq.broker.shared.logins import Logins
from shardmq.shardd.wire import codec
from shardmq.shardd.wire import messages as wire


@dataclass(slots=True)
class Services:
    """The services of one front door, handed to each of its connections."""

    config: BrokerConfig  # replaced when the process is told to reload
    incarnation: int
    loop: PassLoop
    shards: ShardLinks
    catalog_link: CatalogLink
    counts: Counts
    logins: Logins
    alarms: Alarms
    publishing: Publishing
    consuming: Consuming
    steps: StepRunner
    server_properties: dict[str, Any]  # of connection.start
    short_way: ShortWay | None = None  # None: all goes by Python
    spans: Spans | None = None  # None: no spans are made
    # Logins that newcomers may use, by key. What a login depends on does not change before
    # newcomers are met and this is cleared.
    lessons: dict[bytes, Lesson] = field(default_factory=dict)
    # Of the channels and connections that have ended.
    vhost_counts: VhostCounts = field(default_factory=VhostCounts)

    def use_short_way(self) -> None:
        """Let what is plain go the short way from now on. No shard has said Hello yet."""
        self.short_way = ShortWay(
            self.shards,
            self.counts,
            self.alarms,
            self.consuming,
            self.loop,
            open_state=ConnectionState.OPEN,
            reply_queues=checks.REPLY_TO,
            set_timestamp=self.config.set_timestamp,
            spans=self.spans,
        )
        deliver = self.consuming.deliveries.deliver
        failed = self.shards.inbox.cannot_handle
        for link in self.shards.links:
            outlet = self.short_way.outlet(link, codec.read_deliveries, deliver, failed)
            link.by_kind[wire.DELIVER] = link.outlet = outlet

    def watch(self) -> None:
        """Let compiled passes wait for what goes the short way; the event loop waits for them."""
        watch = self.loop.watch = self.shards.inbox.watch = Watch(self.loop)
        self.loop.aio.add_reader(watch.fd, watch.ready)

    @property
    def catalog(self) -> Catalog:
        return self.catalog_link.catalog

    def name_cluster(self) -> None:
        """Say the cluster's name, which the catalog holds, to new connections."""
        name = cluster_name(self.catalog_link.catalog)
        self.server_properties = {**self.server_properties, "cluster_name": name}
