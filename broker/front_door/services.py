"""The services that all connections of a front door share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardmq.broker.front_door.alarms import Alarms
from shardmq.broker.front_door.consume.consuming import Consuming
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.links.catalog_link import CatalogLink
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.loop import PassLoop
from shardmq.broker.front_door.publish.publish import Publishing
from shardmq.broker.front_door.short_way import ShortWay
from shardmq.broker.front_door.topology.steps import StepRunner
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.shared.cluster_name import cluster_name
from shardmq.broker.shared.config import BrokerConfig
from shardmq.broker.shared.logins import Logins


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

    @property
    def catalog(self) -> Catalog:
        return self.catalog_link.catalog

    def name_cluster(self) -> None:
        """Say the cluster's name, which the catalog holds, to new connections."""
        name = cluster_name(self.catalog_link.catalog)
        self.server_properties = {**self.server_properties, "cluster_name": name}
