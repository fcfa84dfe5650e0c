"""The front door as a whole: its parts, its start, reload and drain.

A front door runs in an event loop that its owner gives it: process.py is a process that does
nothing else.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from shardmq.broker.amqp import ConnectionException
from shardmq.broker.front_door import login
from shardmq.broker.front_door.alarms import Alarms
from shardmq.broker.front_door.connections import Connections
from shardmq.broker.front_door.consume.consuming import Consuming
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.events import ControllerEvents, ShardEvents
from shardmq.broker.front_door.links.catalog_link import CatalogLink
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.listeners import Listeners
from shardmq.broker.front_door.loop import PassLoop
from shardmq.broker.front_door.publish.dead_letters import DeadLettering
from shardmq.broker.front_door.publish.dedup_service import DedupService
from shardmq.broker.front_door.publish.publish import Publishing
from shardmq.broker.front_door.publish.replies import Replies
from shardmq.broker.front_door.publish.reservations import Reservations
from shardmq.broker.front_door.publish.spans import Spans
from shardmq.broker.front_door.publish.tracing import Tracing
from shardmq.broker.front_door.services import Services
from shardmq.broker.front_door.topology.steps import StepRunner
from shardmq.broker.shared.cluster_name import cluster_name
from shardmq.broker.shared.config import BrokerConfig
from shardmq.broker.shared.logins import Logins
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire import session, short_ways
from shardmq.shardd.wire.local_lane import LocalLane
from shardmq.shardd.wire.memory import BURST_CHANGES, AfterBursts, give_back
from shardmq.shardd.wire.spin import Spin
from shardmq.supervisor import notify
from shardmq.supervisor.logs import set_level

TICK_S = 1.0
JOIN_S = 0.1
DRAIN_S = 5.0


class FrontDoor:
    """A front door: its services, connections and listeners.

    The owner awaits `start`, lets `join` and `tick` run beside it, and awaits `drain` in the end.
    `local` is the lane to the shard of the same process, if there is one, and `local_shard` the
    number of that shard.
    """

    def __init__(
        self, config: BrokerConfig, local: LocalLane | None = None, local_shard: int = -1
    ) -> None:
        aio = asyncio.get_running_loop()
        if config.session_keys is None:
            incarnation = wire.incarnation_at(time.monotonic_ns())
        else:
            incarnation = session.first_incarnation()
        self._memory = AfterBursts(BURST_CHANGES)
        shard_events, controller_events = ShardEvents(), ControllerEvents()
        links = self._links = ShardLinks(config, incarnation, shard_events, local, local_shard)
        catalog_link = self._catalog_link = CatalogLink(
            f"{config.runtime_dir}/control.sock",
            door=config.door,
            incarnation=incarnation,
            pid=os.getpid(),
            listener=controller_events,
            is_alone=config.is_alone,
        )
        counts = Counts()
        spans = None
        if config.tracing_ratio is not None:
            spans = Spans(config.tracing_ratio, catalog_link.say_spans, aio.call_later)
        replies = Replies(links, counts)
        publishing = self._publishing = Publishing(
            catalog_link,
            links,
            Reservations(links),
            DedupService(links),
            replies,
            counts,
            set_timestamp=config.set_timestamp,
            spans=spans,
        )
        self._spin = Spin(config.spin_us)
        self._loop = PassLoop(
            aio,
            links,
            publishing,
            shards=len(links.links),
            tick_us=config.tick_us,
            spin=self._spin,
        )
        self._services = services = Services(
            config=config,
            incarnation=incarnation,
            loop=self._loop,
            shards=links,
            catalog_link=catalog_link,
            counts=counts,
            logins=Logins(),
            alarms=Alarms(),
            publishing=publishing,
            consuming=Consuming(links, catalog_link, self._loop, counts, replies, spans),
            steps=StepRunner(catalog_link, links, in_cluster=config.session_keys is not None),
            server_properties=login.server_properties(cluster_name(catalog_link.catalog)),
            spans=spans,
        )
        if short_ways.are_on():
            services.use_short_way()
            services.watch()
        connections = self._connections = Connections(services)
        self._listeners = Listeners(aio, config, connections)
        self._linking: asyncio.Task[None] | None = None  # None: not started
        dead_lettering = DeadLettering(catalog_link, links)
        shard_events.attend(services, connections, dead_lettering)
        controller_events.attend(
            services, connections, dead_lettering, replies, Tracing(catalog_link, links)
        )

    @property
    def endpoint(self) -> str:
        """Return the address at which the shards reach this front door."""
        return self._links.endpoint

    def run_beside(self, passes: Callable[[], None]) -> None:
        """Call `passes` behind each pass, for what the shard of this process has to do."""
        self._loop.beside = passes

    @property
    def lent_memory(self) -> memoryview | None:
        """Return the memory from which this front door lends bodies; None if it lends none."""
        bodies = self._links.bodies
        return None if bodies is None else memoryview(bodies.mapped())

    def hear_local(self) -> None:
        """Handle messages of the shard of this process. Its owner calls, as it does not ring."""
        self._links.inbox.hear_local()

    async def start(self) -> None:
        """Take connections, as soon as the catalog is here and the first shard is."""
        self._linking = self._loop.aio.create_task(self._catalog_link.run())
        await self._catalog_link.synced()
        await self._links.start()
        self._listeners.start()

    def reload(self, config: BrokerConfig | None) -> None:
        """Take new settings, if there are any, and certificates as they are on disk now.

        Both are for new connections, but for the log level and `spin_us`.
        """
        services = self._services
        if config is not None:
            self._connections.renew()
            services.config = config
            self._connections.offer()
            set_level(config.log_level)
            self._spin.change(config.spin_us)
            self._connections.tell_channel_counts()
        self._listeners.reload(services.config)

    async def tick(self) -> None:
        """Keep connections, the watchdog and memory in order, once a second."""
        while True:
            await asyncio.sleep(TICK_S)
            now = self._loop.now = self._loop.aio.time()
            self._connections.tick(now)
            notify.watchdog()
            self._spin.tick()
            if self._services.alarms.text:
                give_back()  # free memory counts as used, and would keep the alarm on
            else:
                self._memory.give_back_if_over(self._services.catalog.version)

    async def join(self) -> None:
        """Keep telling the shards where this front door is."""
        while True:
            await asyncio.sleep(JOIN_S)
            self._links.tick()
            self._publishing.dedup.tick(self._loop.aio.time())

    async def drain(self, wait_s: float = DRAIN_S) -> None:
        """Take no new clients, tell those that are there to go, and wait for them."""
        self._listeners.close()
        text = "broker forced connection closure with reason 'shutdown'"
        for connection in self._connections.all():
            connection.close(ConnectionException(320, text, 0, 0))
        until = self._loop.aio.time() + wait_s
        while self._connections.by_number and self._loop.aio.time() < until:
            await asyncio.sleep(0.01)
        for connection in self._connections.all():
            connection.disconnect()
        self._loop.end_of_pass()
        if self._services.spans is not None:
            self._services.spans.flush()
        self._services.steps.close()
        self._links.stop()
        if self._linking is not None:
            self._linking.cancel()
