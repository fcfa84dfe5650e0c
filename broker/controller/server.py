"""The process of the controller: it starts its parts, carries news between them, and drains.

First what exists is read from disk, then the links listen, HTTP opens, and the supervisor is told
READY. At the end HTTP and the links close, and the definitions are synced.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from shardmq.broker.controller import memory
from shardmq.broker.controller.access import hash_new_password
from shardmq.broker.controller.authority import Authority
from shardmq.broker.controller.bridging import Bridges
from shardmq.broker.controller.cluster_view import Claimed, ClusterView, KnownNode, places_of
from shardmq.broker.controller.config import ControllerConfig, read_config
from shardmq.broker.controller.disk_watch import DiskWatch
from shardmq.broker.controller.groups.memberships import Memberships
from shardmq.broker.controller.loading import Loaded, load, read_given, warn_of_no_effect
from shardmq.broker.controller.moving.mover import Moves
from shardmq.broker.controller.moving.relocating import Relocating
from shardmq.broker.controller.node_facts import NodeFacts, facts_of
from shardmq.broker.controller.nodes.facts import FactsTold
from shardmq.broker.controller.peers.links import DoorLinks
from shardmq.broker.controller.peers.presence import Presence, door_of
from shardmq.broker.controller.peers.shard_links import HERE, ShardLinks
from shardmq.broker.controller.pending import INTERNAL_ERROR, no_answer
from shardmq.broker.controller.requests import NodesChanged
from shardmq.broker.controller.resharding import draining
from shardmq.broker.controller.resharding.resharding import Resharding
from shardmq.broker.controller.resharding.shard_sets import NODE
from shardmq.broker.controller.snapshots import Snapshots
from shardmq.broker.controller.span_export import SpanExport
from shardmq.broker.controller.stored import imported
from shardmq.broker.controller.stored.definitions import Definitions
from shardmq.broker.controller.stored.errors import DefinitionsError
from shardmq.broker.controller.stored.key_ring import key_ring
from shardmq.broker.controller.stored.room import write_whole
from shardmq.broker.controller.streams.elsewhere import Elsewhere
from shardmq.broker.controller.streams.ended_streams import EndedStreams
from shardmq.broker.controller.streams.stream_ranges import StreamRanges
from shardmq.broker.model import checks
from shardmq.broker.model.changes import AnyChange
from shardmq.broker.model.checks import Refusal
from shardmq.broker.shared.certificates import Certificates
from shardmq.broker.shared.config import ConfigError
from shardmq.broker.shared.control import (
    Ask,
    AssignmentGivenUp,
    ChannelClose,
    ChannelOpen,
    ConnectionInfo,
    ConnectionOpen,
    ConsumerJoin,
    ConsumerLeave,
    ConsumersHere,
    MarkPassed,
    ShardElsewhere,
    Span,
    VirtualLook,
    node_of,
)
from shardmq.cluster.membership import Inheritance
from shardmq.cluster.replicas import ReplicasOfShards
from shardmq.cluster.replicated_files import Deposed
from shardmq.cluster.streams import (
    CONTROL,
    FACTS,
    HTTP,
    HTTPS,
    LOCAL,
    METRICS,
    NoStream,
)
from shardmq.cluster.unclean import Elections
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.memory import BURST_CHANGES, AfterBursts, give_back
from shardmq.supervisor import notify
from shardmq.supervisor.logs import set_level

WATCHDOG_S = 1.0
# A front door that has not come back so long after a restart of the controller is gone, with its
# connections.
DOORS_RETURN_S_MAX = 30.0
# The shards of each node, and the numbers of all front doors.
Nodes = tuple[Mapping[int, list[ShardElsewhere]], Collection[int]]
# Requests that do not change the catalog.
NOT_OF_THE_CATALOG = frozenset(
    (ConnectionOpen, ConsumerJoin, VirtualLook, ChannelOpen, ChannelClose)
)

log = logging.getLogger(__name__)


class Servers(Protocol):
    """The servers of HTTP, `management.app.Servers`, which are imported only if they are needed."""

    def connection(self, service: str) -> asyncio.Protocol: ...

    async def cleanup(self) -> None: ...


class Controller:
    """The parts of the controller, and the news that goes between them."""

    def __init__(
        self,
        config: ControllerConfig,
        doors: Collection[int] = (),
        loaded: Loaded | None = None,
        etcd_silent_s: Callable[[], float | None] = lambda: None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """Prepare with what exists, which is loaded from the data directory if it is not given.

        `doors` are the front doors of other nodes, and `elsewhere` is the way to their streams.
        `etcd_silent_s` returns the seconds since etcd has answered.
        """
        # Returns when this node is known to have led after the call, and raises Deposed or OSError.
        # Without it nobody else can lead.
        self.leads: Callable[[], Awaitable[None]] | None = None
        self.on_up: Callable[[], None] = lambda: None  # called when this controller serves all
        self._looking: set[asyncio.Task[None]] = set()
        if loaded is None:
            keys = key_ring(config.secrets.key_file, encrypts=config.secrets.encrypt)
            loaded = load(Definitions(Path(config.data_dir), config.boot, keys=keys), config)
        doors = {*range(config.first_door, config.first_door + config.doors), *doors}
        self.config = config
        self.definitions = loaded.definitions
        self.presence = Presence()
        self.presence.connections_max, self.presence.channels_max = (
            config.connections_max,
            config.channel_max_per_node,
        )
        self.placement = loaded.placement
        self._own_shards = tuple(config.own_shards or range(config.shards))
        name = NODE if config.cluster is None else config.cluster.node
        self.memory = memory.MemoryWatch()
        self.disk = DiskWatch(config.data_dir)
        self._etcd_silent_s = etcd_silent_s
        self.cluster = ClusterView(
            node_of(config.first_door),
            name,
            self._own_shards,
            self._facts,
        )
        self.links = DoorLinks(config.boot, doors)
        self.shards = ShardLinks(
            max(self._own_shards) + 1,
            wire.incarnation_at(time.monotonic_ns()),
            config.own_shards,
            config.session_keys,
            config.term,
            0.0 if config.cluster is None else config.cluster.node_timeout_s,
        )
        self.authority = Authority(
            loaded.catalog,
            self.definitions,
            self.links,
            self.shards,
            self.presence,
            self.placement,
            hashing_algorithm=config.hashing_algorithm,
        )
        self.memberships = Memberships(
            self.authority.catalog, self.links, self.shards, doors, self.cluster.number_of_shard
        )
        self.resharding = Resharding(
            self.authority.catalog, self.authority, self.shards, self.links
        )
        self.moves = Moves(self.authority.catalog, self.authority, self.shards, self.links)
        self.relocating = Relocating(
            self.authority.catalog, self.authority, self.shards, self.cluster
        )
        self.bridges = Bridges(self.authority, lambda: self.config.runtime_dir, self.shards)
        self.forget_node: Callable[..., Awaitable[Inheritance]] | None = None
        self.elections: Elections | None = None  # of a cluster
        self.snapshots = Snapshots(
            config.data_dir,
            self.authority.catalog,
            self.definitions,
            self.shards,
            lambda: self.moves.progress,
        )
        self.spans = None if config.tracing is None else SpanExport(config.tracing)
        self.streams = StreamRanges(elsewhere)
        self.ended_streams = EndedStreams(
            self.streams,
            lambda: self.config,
            partial(write_whole, files=self.definitions.files),
        )
        self._reloading: asyncio.Task[None] | None = None
        self._http: Servers | None = None  # the servers, while they run
        self._is_up = self._is_listening = False
        self._nodes: Nodes = {}, ()
        self.certificates = None if config.tls is None else Certificates(config.tls)
        self.links.handler = self
        self.shards.handler = self.authority
        self.shards.fence = self.links.fence

    async def run(self, stop: asyncio.Event) -> int:
        """Run until `stop` is set, and return the exit status."""
        runtime_dir = Path(self.config.runtime_dir)
        writer = asyncio.create_task(self.authority.run())
        writer.add_done_callback(lambda _: stop.set())
        await self.shards.start(runtime_dir)
        await self.links.start(runtime_dir, self.authority.catalog.version)
        self._is_listening = True
        self.learn(*self._nodes)
        self.memberships.start()
        if self.spans is not None:
            self.spans.start()
        self._http = await start_http(self)
        loop = asyncio.get_running_loop()
        doors_return = loop.call_later(DOORS_RETURN_S_MAX, self._forget_absent_doors)
        watchdog = asyncio.create_task(self._watchdog())
        drained = asyncio.create_task(
            draining.run(
                self.authority.catalog, self.shards, self.links, self.authority, self.ended_streams
            )
        )
        resharded = asyncio.create_task(self.resharding.run())
        moved = asyncio.create_task(self.moves.run())
        relocated = asyncio.create_task(self.relocating.run())
        bridged = asyncio.create_task(self.bridges.run())
        self._is_up = True
        self.on_up()
        notify.ready()
        give_back()
        log.info(
            "controller is ready, %d queues known", len(list(self.authority.catalog.index.all()))
        )
        await stop.wait()
        notify.stopping()
        doors_return.cancel()
        watchdog.cancel()
        drained.cancel()
        resharded.cancel()
        moved.cancel()
        relocated.cancel()
        bridged.cancel()
        self.memberships.stop()
        self._is_up = False
        if self._http is not None:
            await self._http.cleanup()
        await self.links.stop()
        if self.spans is not None:
            await asyncio.to_thread(self.spans.stop)
        error = writer.exception() if writer.done() and not writer.cancelled() else None
        if error is not None:
            log.critical("what exists can no longer be written: %s", error, exc_info=error)
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        await self.shards.stop()
        await asyncio.to_thread(self.definitions.close)
        return 0 if error is None else 1

    def know(
        self,
        nodes: Collection[KnownNode],
        in_sync: Collection[str],
        copies: Mapping[int, Collection[str]],
        replicas: ReplicasOfShards,
        claims: Mapping[int, Claimed],
    ) -> None:
        """Take the nodes of the cluster, and who has all definitions and all of which shards."""
        self.cluster.know(nodes, in_sync, copies, replicas, claims)
        self.placement.has_copies(replicas)

    def learn(self, nodes: Mapping[int, list[ShardElsewhere]], doors: Collection[int]) -> None:
        """Take the shards and front doors of the nodes of the cluster that live."""
        self._nodes = nodes, doors
        if not self._is_listening:
            return
        own = node_of(self.config.first_door)
        for node, shards in nodes.items():
            for shard in shards:
                self.shards.learn(shard.number, HERE if node == own else shard.address)
        # Etcd that has lost this node has lost others, and their shards, too.
        numbers = self.cluster.shard_numbers() if self.cluster.is_listed else None
        self.links.learn(nodes, doors, numbers)
        if self.cluster.is_listed and self.placement.change(places_of(self.cluster.nodes)):
            self.authority.submit(NodesChanged(), "", no_answer)

    def connection(self, service: str, node: str) -> asyncio.Protocol:
        """Return the protocol of a stream from another node. Raises NoStream."""
        if not self._is_up:
            raise NoStream("the controller starts or stops")
        if service == CONTROL:
            return self.links.connection()
        if service == FACTS:
            return FactsTold(partial(self.cluster.tell, node))
        if service in (HTTP, HTTPS, METRICS, LOCAL) and self._http is not None:
            return self._http.connection(service)
        raise NoStream(f"this node has no service '{service}'")

    def reload(self) -> None:
        """Take new settings from the supervisor, and read certificates and definitions again."""
        if (section := notify.new_section()) is not None:
            was = self.config
            self.config = msgspec.structs.replace(
                read_config(section), term=was.term, boot=was.boot
            )
            self.presence.connections_max = self.config.connections_max
            self.presence.channels_max = self.config.channel_max_per_node
            set_level(self.config.log_level)
        if self.certificates is not None and self.config.tls is not None:
            try:
                self.certificates.reload(self.config.tls)
                log.info("certificates are read anew")
            except ConfigError as error:
                log.error("certificates stay as they were: %s", error)
        if self.config.load_definitions:
            self._reloading = asyncio.create_task(self._load_given_anew())

    async def _load_given_anew(self) -> None:
        """Load the file of `load_definitions` as at the start.

        What exists stays, but users, permissions, policies and parameters are replaced.
        """
        try:
            document = await asyncio.to_thread(read_given, self.config)
            hashed = partial(hash_new_password, algorithm=self.config.hashing_algorithm)
            decrypted = self.definitions.keys.decrypted
            stages = await asyncio.to_thread(imported.stages, document, None, hashed, decrypted)
            for stage in stages:
                for ask in stage:
                    if imported.needed(ask, self.authority.catalog):
                        answer = await self.authority.ask(ask)
                        if answer.code:
                            raise DefinitionsError(imported.refused(ask, answer.text))
        except (DefinitionsError, Refusal) as error:
            log.error("load_definitions: not taken in to its end: %s", error)
        else:
            log.info("load_definitions: %s taken in", self.config.load_definitions)
            warn_of_no_effect(stages, self.placement.most)

    def _facts(self) -> NodeFacts:
        """Return the facts of this node; the room on its disk as of the look before."""
        return facts_of(self.config, self.memory, self._etcd_silent_s(), self.disk.free_bytes)

    async def _watchdog(self) -> None:
        after_bursts = AfterBursts(BURST_CHANGES)
        while True:
            notify.watchdog()
            after_bursts.give_back_if_over(self.authority.catalog.version)
            if self.cluster.is_cluster:  # on one host there are shards that tell it
                self.disk.look()
            # Publishers are held back before the kernel has to choose which process to kill.
            config = self.config
            self.memory.look(
                memory.pids(config.runtime_dir),
                config.memory_high_watermark,
                config.memory_high_watermark_bytes,
            )
            self.links.set_alarm(self.cluster.memory_alarm(self.memory.alarm))
            await asyncio.sleep(WATCHDOG_S)

    # -- news from front doors (links.Handler) -------------------------------------------------

    def snapshot(self) -> tuple[int, list[AnyChange]]:
        return self.authority.catalog.version, self.authority.catalog.changes()

    def door_up(self, door: int, incarnation: int, connections: list[ConnectionInfo]) -> None:
        self.presence.door_up(door, connections)
        self._drop_exclusive_of_absent(door)

    def door_gone(self, door: int, incarnation: int) -> None:
        self.presence.door_gone(door)
        self._drop_exclusive_of_absent(door)
        self.shards.door_gone(door, incarnation)
        self.memberships.door_gone(door, incarnation)

    def connection_up(self, info: ConnectionInfo) -> None:
        self.presence.up(info)

    def connection_down(self, owner: str) -> None:
        self.presence.down(owner)
        self.authority.connection_gone(owner)

    def connections_passed(self, door: int, count: int) -> None:
        self.presence.opened[node_of(door)] += count

    def spans_ended(self, spans: list[Span]) -> None:
        if self.spans is not None:
            self.spans.add(spans)

    def asked(self, ask: Ask, answer: Callable[[int, str, dict[str, Any]], None]) -> None:
        if type(ask.what) not in NOT_OF_THE_CATALOG:
            self.authority.submit(ask.what, ask.owner, answer)
        elif isinstance(ask.what, ConnectionOpen):
            answer(*self._may_open(ask.what, ask.owner), {})
        elif isinstance(ask.what, VirtualLook) and self.leads is not None:
            looking = asyncio.create_task(self._look(self.leads, ask, answer))
            self._looking.add(looking)
            looking.add_done_callback(self._looking.discard)
        elif isinstance(ask.what, ConsumerJoin | VirtualLook):
            self.memberships.asked(ask, answer)
        elif isinstance(ask.what, ChannelOpen):
            answer(*self._may_open_channel(ask.what, ask.owner), {})
        elif isinstance(ask.what, ChannelClose):
            self.presence.has_channels(ask.owner, ask.what.channels)
            answer(0, "", {})

    async def _look(
        self,
        leads: Callable[[], Awaitable[None]],
        ask: Ask,
        answer: Callable[[int, str, dict[str, Any]], None],
    ) -> None:
        """Answer a look at the catalog behind all that any node has answered before."""
        try:
            await leads()
        except Deposed:
            return  # the front door asks the next leader
        except OSError as error:
            answer(INTERNAL_ERROR, str(error), {})
        else:
            self.memberships.asked(ask, answer)

    def _may_open(self, ask: ConnectionOpen, owner: str) -> tuple[int, str]:
        """Check the limits for a new connection, by the catalog as it is."""
        connected = self.presence.before(owner)
        try:
            most = self.presence.connections_max
            checks.check_connection_limits(
                self.authority.catalog, ask.vhost, ask.user, *connected, most
            )
        except Refusal as refusal:
            return refusal.code, refusal.text
        return 0, ""

    def _may_open_channel(self, ask: ChannelOpen, owner: str) -> tuple[int, str]:
        in_all, of_user = self.presence.channels_beside(owner, ask.user)
        try:
            checks.check_channel_limits(
                self.authority.catalog,
                ask.user,
                of_user + ask.channels,
                in_all + ask.channels,
                self.presence.channels_max,
                NODE,
            )
        except Refusal as refusal:
            self.presence.has_channels(owner, 0)  # the refusal ends the connection
            return refusal.code, refusal.text
        self.presence.has_channels(owner, ask.channels)
        return 0, ""

    def consuming(
        self,
        door: int,
        incarnation: int,
        news: ConsumersHere | ConsumerLeave | AssignmentGivenUp | MarkPassed,
    ) -> None:
        self.memberships.news(door, incarnation, news)

    def handed_out(self, changes: list[AnyChange]) -> None:
        self.memberships.changed(changes)
        self.bridges.changed(changes)

    def has_room(self) -> bool:
        return self.authority.has_room()

    async def room(self) -> None:
        await self.authority.room()

    def _drop_exclusive_of_absent(self, door: int) -> None:
        for owner in self.authority.catalog.index.owners():
            if door_of(owner) == door and self.presence.connection(owner) is None:
                self.authority.connection_gone(owner)

    def _forget_absent_doors(self) -> None:
        here = {door.number for door in self.links.doors()}
        for door in {door_of(owner) for owner in self.authority.catalog.index.owners()} - here:
            self._drop_exclusive_of_absent(door)


async def start_http(controller: Controller) -> Servers | None:
    """Start the HTTP API, which is imported only if there is a socket for it."""
    config = controller.config
    if not config.http_fds and not config.https_fds and not config.metrics_fds:
        return None
    from shardmq.broker.controller.management import app
    from shardmq.broker.controller.management.context import Context
    from shardmq.broker.controller.management.metrics.stats_collector import StatsCollector

    catalog, certificates = controller.authority.catalog, controller.certificates
    context = Context(
        controller.authority,
        controller.presence,
        controller.shards,
        controller.links,
        lambda: controller.config,
        StatsCollector(
            controller.shards,
            controller.links,
            hidden_queues=catalog.hidden_queue_ids,
            cluster=controller.cluster,
        ),
        controller.cluster,
        controller.memberships.groups,
        controller.memory,
        streams=controller.streams,
        resharding=controller.resharding.progress,
        moves=controller.moves.progress,
        relocating=controller.relocating,
        bridges=controller.bridges,
        forget_node=controller.forget_node,
        elections=controller.elections,
        snapshots=controller.snapshots,
        ended=controller.ended_streams,
        spans=controller.spans,
    )
    return await app.start(context, None if certificates is None else certificates.http_context())


def stop_at_the_end(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Set `stop` at SIGTERM, at SIGINT and when the supervisor is gone."""
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    lifeline = notify.lifeline_fd()
    if lifeline is not None:

        def supervisor_gone() -> None:
            loop.remove_reader(lifeline)
            stop.set()

        loop.add_reader(lifeline, supervisor_gone)


async def serve(config: ControllerConfig) -> int:
    """Run the controller until SIGTERM, SIGINT or the end of the supervisor."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    stop_at_the_end(loop, stop)
    controller = Controller(config)
    loop.add_signal_handler(signal.SIGHUP, controller.reload)
    return await controller.run(stop)
