"""The controller of a node in a cluster: it relays to the leader, or leads.

A node begins as a relay, which keeps a copy of the definitions. `shardmq.cluster.rules` decide when
it leads: the record in etcd names the leader, its term and the nodes whose copies have all that was
answered. A leader that is replaced ends with the status DEPOSED, and its process starts again as a
relay. While etcd is away, everything stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from shardmq.broker.controller.cluster_view import places_of
from shardmq.broker.controller.config import Cluster, ControllerConfig, read_config
from shardmq.broker.controller.loading import load
from shardmq.broker.controller.management.tls_handshakes import Handshakes, TlsServer
from shardmq.broker.controller.node_checks import NodeState
from shardmq.broker.controller.node_facts import OwnShard, own_doors, own_shards, status
from shardmq.broker.controller.nodes.assurance import Assurance
from shardmq.broker.controller.nodes.cluster_snapshots import ClusterSnapshots, NodesAlive
from shardmq.broker.controller.nodes.facts import tell_facts
from shardmq.broker.controller.nodes.nodes import Nodes
from shardmq.broker.controller.nodes.own_checks import OwnChecks
from shardmq.broker.controller.nodes.own_copies import OwnCopies
from shardmq.broker.controller.nodes.own_facts import OwnFacts
from shardmq.broker.controller.nodes.own_streams import OwnStreams
from shardmq.broker.controller.nodes.relay import Relay
from shardmq.broker.controller.nodes.snapshot_parts import LINE_BYTES_MAX, make_part
from shardmq.broker.controller.nodes.unclean_elections import UncleanElections
from shardmq.broker.controller.peers.links import SOCKET_NAME
from shardmq.broker.controller.server import WATCHDOG_S, Controller, stop_at_the_end
from shardmq.broker.controller.stored.definitions import (
    Definitions,
    is_of_definitions,
    stored_format,
    unread_secrets,
)
from shardmq.broker.controller.stored.key_ring import key_ring
from shardmq.broker.controller.stored.room import OWNER_ONLY
from shardmq.broker.controller.stored.snapshot_part import OwnPart
from shardmq.broker.controller.streams.elsewhere import Elsewhere
from shardmq.broker.controller.streams.tickets import Tickets
from shardmq.broker.routing.placement import NodeShards
from shardmq.broker.shared.certificates import Certificates
from shardmq.broker.shared.config import ConfigError
from shardmq.cluster import records
from shardmq.cluster.copy_streams import CopyStreams, copies_protocol
from shardmq.cluster.etcd import client
from shardmq.cluster.following import FollowerOfCopies, HeldFile, new_life
from shardmq.cluster.leading import LeaderOfCopies
from shardmq.cluster.membership import Claims
from shardmq.cluster.operations import CopiedDirectory, OperationLog
from shardmq.cluster.pairs import EtcdRefused
from shardmq.cluster.record_store import EtcdRecord
from shardmq.cluster.records import DOORS_PER_NODE, KeyNames
from shardmq.cluster.replicas import ReplicasOfShards, of_settings
from shardmq.cluster.replicated_files import Deposed
from shardmq.cluster.rules import Lead, Record, Settings, heartbeat_s_of
from shardmq.cluster.secret import tls_context
from shardmq.cluster.streams import (
    CONTROL,
    COPIES,
    FACTS,
    HTTP,
    HTTPS,
    LOCAL,
    LOCAL_SOCKET,
    METRICS,
    RANGES,
    READER,
    SNAPSHOT,
    Address,
    NoStream,
    Opening,
    OpeningProtocol,
    Receiving,
    TooDifferent,
    open_pair,
    open_stream,
)
from shardmq.cluster.versions import (
    CATALOG,
    Range,
    disagreement,
    highest_common,
    own_versions,
)
from shardmq.supervisor import notify
from shardmq.supervisor.logs import set_level

HAND_OVER_S_MAX: Final = 2.0
# The last syncs of a leader wait so long for nodes that may be gone, as etcd may be.
LAST_SYNCS_S_MAX: Final = 10.0
STORE_BYTES: Final = 8
REFUSED_MAX: Final = 1000  # different refusals of streams that are logged
# Beside the definitions, and no part of them: what this node knows of its copy.
HELD_NAME: Final = "definitions.copy"

log = logging.getLogger(__name__)


class Node:
    """The controller of one node, in both of its roles."""

    def __init__(self, config: ControllerConfig, cluster: Cluster, stop: asyncio.Event) -> None:
        self._config = config
        self._cluster = cluster
        self._stop = stop
        self._keys = key_ring(config.secrets.key_file, encrypts=config.secrets.encrypt)
        self._life = new_life()
        self._began_at = time.monotonic()
        self._server_tls = tls_context(cluster.keys, server=True)
        self._client_tls = tls_context(cluster.keys, server=False)
        self._etcd = client(cluster.etcd)
        keys = KeyNames(cluster.name)
        self._nodes = Nodes(self._etcd, keys, self._changed, cluster.number)
        self._record = EtcdRecord(self._etcd, keys.controller)
        lag_s = cluster.replica_lag_s
        self._times = Settings(lag_s=lag_s, heartbeat_s=heartbeat_s_of(lag_s))
        self._operations = OperationLog()
        self._follower: FollowerOfCopies | None = None
        self._copies: LeaderOfCopies | None = None
        self._leader: Controller | None = None
        self._relaying: Relay | None = None
        self._relayed: Relay | None = None  # has the last calls from before this node led
        self._begins_to_lead = False
        self._is_up = asyncio.Event()  # the controller of this node leads, and serves all
        self._to_leader = CopyStreams(
            self._client_tls,
            self._opening(COPIES, None, None),
            lambda: self._nodes.record,
            self._nodes.address,
            self._leader_gone,
        )
        self._refused: set[str] = set()
        self._format = CATALOG.most  # of the definitions that this node writes
        self._certificates = None if config.tls is None else Certificates(config.tls)
        tickets, owners = Tickets(cluster.keys.ticket_key), self._nodes.owners
        self._elsewhere = Elsewhere(
            cluster.number,
            tickets,
            self._nodes.nodes,
            owners,
            self._connect_to,
            OwnCopies(self._etcd, keys, self._nodes, cluster.node, config.runtime_dir),
        )
        self._streams = OwnStreams(
            config.runtime_dir,
            tickets,
            lambda shard: owners.get(shard) == cluster.number,
            self._elsewhere,
        )
        self._facts = OwnFacts(lambda: self._config, self._etcd_silent_s)
        self._checks = OwnChecks(lambda: self._config, self._state)

    async def run(self) -> int:
        """Relay and follow, then lead, until `stop` is set; return the exit status."""
        await self._streams.start()
        await self._checks.start()
        server = TlsServer(
            socket.socket(fileno=os.dup(self._cluster.fd)),
            self._server_tls,
            lambda: OpeningProtocol(self._accept),
            Handshakes(),
            lambda: self._config.http,
        )
        watching = asyncio.create_task(self._nodes.run())
        working = asyncio.create_task(self._play_roles())
        stopping = asyncio.create_task(self._stop.wait())
        tasks = (watching, working, stopping)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._leader is not None and not working.done():
                await working  # it has been told, and drains
            elif self._follower is not None and stopping.done():
                await self._follower.leave()
            if watching.done():
                watching.result()
            return working.result() if working.done() else 0
        except EtcdRefused as error:
            log.critical("etcd refuses: %s", error)
            return 1
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            server.close()
            if self._relayed is not None:
                await self._relayed.close()
            await self._checks.close()
            await self._streams.close()
            await self._etcd.close()

    async def _play_roles(self) -> int:
        lead = await self._follow()
        return await self._lead(lead)

    def _changed(self) -> None:
        """Look at what etcd has now of the nodes and of the leader."""
        nodes, record = self._nodes, self._nodes.record
        near = [node for node in nodes.nodes.values() if self._understands(node)]
        for copies in (self._follower, self._copies):
            if copies is not None:
                copies.recorded(record, nodes.revision)
        if self._relaying is not None and record is not None:
            self._relaying.led_by(record.leader, record.term)
        if self._follower is not None and record is not None:
            is_other = record.leader != self._cluster.node
            if is_other and nodes.address(record.leader) is None:
                self._follower.leader_gone(record.term)
        if self._copies is not None:
            self._copies.copies_are(len(nodes.members))
        if self._leader is not None:
            in_sync = [] if record is None else record.in_sync
            shards = nodes.shards()
            self._leader.know(
                nodes.known(), in_sync, nodes.copies(), self._replicas(), nodes.claims()
            )
            self._leader.learn({each.number: shards[each.number] for each in near}, doors_of(near))

    def _replicas(self) -> ReplicasOfShards:
        others = of_settings(self._cluster.replicas, self._cluster.min_in_sync)
        return ReplicasOfShards(dict(self._nodes.in_sets), others)

    def _understands(self, node: records.Node) -> bool:
        """Return whether this node can work with another one; log it if not."""
        own = self._cluster.node
        why = disagreement(own, own_versions(), node.name, node.versions)
        if why and why not in self._refused and len(self._refused) < REFUSED_MAX:
            self._refused.add(why)
            log.error("%s (release %s) is not of use: %s", node.name, node.version, why)
        return not why

    def _leader_gone(self, term: int) -> None:
        if self._follower is not None:
            self._follower.leader_gone(term)

    async def _connect_to(
        self, node: records.Node, service: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream to a node. Raises NoStream."""
        if (port := node.ports.get("cluster")) is None:
            raise NoStream(f"{node.name} has no port for nodes")
        return await self._connect_at((node.address, port), service)

    async def _connect_at(
        self, address: Address, service: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream to a service at an address. Raises NoStream."""
        return await open_pair(address, self._client_tls, self._opening(service, None, None))

    # -- the two roles -----------------------------------------------------------------------------

    async def _relay(self) -> Relay:
        """Listen for the clients of this node, as a relay."""
        config, runtime_dir = self._config, Path(self._config.runtime_dir)
        relay = Relay(
            self._client_tls,
            self._leader_address,
            self._opening,
            lambda: self._config.http,
            {
                HTTP: (self._streams, self._checks),
                HTTPS: (self._streams, self._checks),
                LOCAL: (self._checks,),
            },
        )
        await relay.listen_unix(runtime_dir / SOCKET_NAME, CONTROL, 0o700)
        await relay.listen_unix(runtime_dir / LOCAL_SOCKET, LOCAL, 0o660)
        tls = None if self._certificates is None else self._certificates.http_context()
        for service, fds in (
            (HTTP, config.http_fds),
            (HTTPS, config.https_fds),
            (METRICS, config.metrics_fds),
        ):
            for fd in fds:
                listening = socket.socket(fileno=os.dup(fd))
                await relay.listen(listening, service, tls if service == HTTPS else None)
        notify.ready()
        return relay

    async def _leader_address(self, wait_s: float) -> Address | None:
        """Return the address of the leader; None if none can be asked within so many seconds."""
        if self._begins_to_lead:
            try:
                async with asyncio.timeout(wait_s):
                    await self._is_up.wait()
            except TimeoutError:
                return None
        return await self._nodes.leader(wait_s)

    def _up(self) -> None:
        """Hear that the controller of this node serves all."""
        self._is_up.set()
        if self._relayed is not None:
            self._relayed.lead_has_begun()

    def _etcd_silent_s(self) -> float:
        """Return for how many seconds etcd has not answered."""
        return time.monotonic() - max(self._began_at, self._etcd.heard_at)

    def _state(self) -> NodeState:
        """Return what the checks of this node look at while it does not lead."""
        facts, found = self._facts.now(), status(self._config.runtime_dir)
        own, owners = self._cluster.number, self._nodes.owners
        shards, led = own_shards(found), sorted(n for n, owner in owners.items() if owner == own)
        return NodeState(
            self._cluster.node,
            True,
            [facts],
            facts.processes,
            [shards.get(number, OwnShard(number, False, "")) for number in led],
            own_doors(found),
        )

    async def _tell(self) -> None:
        """Tell the leader the facts of this node."""

        def connect(address: Address, protocol: asyncio.Protocol) -> Awaitable[object]:
            opening = self._opening(FACTS, None, None)
            return open_stream(address, self._client_tls, opening, protocol)

        facts, nodes = self._facts, self._nodes
        await tell_facts(facts.now, nodes.leader, connect, nodes.lead, facts.news)

    async def _follow(self) -> Lead:
        """Follow the leader until this node leads; meanwhile relay what clients say to it."""
        data_dir = self._config.data_dir
        follower = self._follower = FollowerOfCopies(
            self._cluster.node,
            self._life,
            HeldFile(OWNER_ONLY, f"{data_dir}/{HELD_NAME}"),
            CopiedDirectory(OWNER_ONLY, data_dir, is_of_definitions),
            self._operations,
            self._record,
            self._to_leader.connect,
            self._times,
            founds=os.urandom(STORE_BYTES).hex() if self._cluster.founds else "",
        )
        if unread := await asyncio.to_thread(unread_secrets, Path(data_dir), self._keys):
            log.warning(
                "this node has no key in secrets.key_file for the secrets of %s; while it leads, "
                "what needs them does not run",
                unread,
            )
        relay = self._relaying = await self._relay()
        telling = asyncio.create_task(self._tell())
        self._changed()
        try:
            lead = await follower.run()
        except BaseException:
            await relay.close()
            raise
        finally:
            self._follower = self._relaying = None
            telling.cancel()
        self._relayed, self._begins_to_lead = relay, True
        relay.lead_begins(self._cluster.node, lead.record.term)
        log.info("this node leads in term %d", lead.record.term)
        return lead

    async def _lead(self, lead: Lead) -> int:
        """Be the controller of the whole cluster until the role or the process ends."""
        record = lead.record
        config = msgspec.structs.replace(self._config, term=record.term, boot=record.store)
        held = await asyncio.to_thread(stored_format, Path(config.data_dir))
        self._format = self._chosen_format(record, held or CATALOG.most)
        copies = self._copies = LeaderOfCopies(
            self._cluster.node,
            self._life,
            lead,
            self._operations,
            self._record,
            OWNER_ONLY,
            config.data_dir,
            is_of_definitions,
            self._times,
        )
        copies.copies_are(len(self._nodes.members))
        ends = asyncio.Event()
        leading = asyncio.create_task(copies.run())
        ending = asyncio.create_task(self._stop.wait())
        for task in (leading, ending):
            task.add_done_callback(lambda _: ends.set())
        leaving = asyncio.create_task(self._leave(leading))
        try:
            definitions = Definitions(
                Path(config.data_dir),
                config.boot,
                copies.replicated,
                waits_for_others=True,
                format=self._format,
                keys=self._keys,
            )
            places = await self._places()
            loaded = await asyncio.to_thread(load, definitions, config, places, self._replicas())
            doors = doors_of(filter(self._understands, self._nodes.nodes.values()))
            controller = Controller(config, doors, loaded, self._etcd_silent_s, self._elsewhere)
            controller.forget_node = Claims(self._etcd, self._cluster.name).forget
            controller.elections = UncleanElections(
                self._etcd, KeyNames(self._cluster.name), self._nodes, self._connect_at
            )
            controller.leads = Assurance(copies.replicated, config.data_dir).leads
            controller.on_up = self._up
            controller.snapshots.cluster = ClusterSnapshots(
                NodesAlive(
                    self._etcd,
                    KeyNames(self._cluster.name),
                    self._nodes,
                    self._cluster.node,
                    self._own_part,
                    controller.leads,
                    self._connect_to,
                )
            )
            self._leader = controller
            self._changed()
            status = await controller.run(ends)
            await self._hand_over(copies, leading)
        except Deposed as error:
            log.error("this node leads no more: %s", error)
            return notify.DEPOSED
        finally:
            self._leader = None
            self._copies = None
            is_deposed = leading.done()
            leading.cancel()
            ending.cancel()
            leaving.cancel()
        return notify.DEPOSED if is_deposed and not self._stop.is_set() else status

    async def _places(self) -> list[NodeShards]:
        """Return the nodes for those who place queues. That of this controller is alive."""
        own = self._cluster.node
        known = await self._nodes.with_member(own)
        return places_of(
            node._replace(is_alive=node.is_alive or node.name == own) for node in known
        )

    def _chosen_format(self, record: Record, held: int) -> int:
        """Return the highest format of definitions that all nodes of the in-sync set understand.

        `held` is the format of the copies. A node that is not alive may understand no other.
        """
        known = {node.name: node.versions.catalog for node in self._nodes.nodes.values()}
        others = (
            known.get(name, Range(held, held))
            for name in record.in_sync.keys() - {self._cluster.node}
        )
        return highest_common((CATALOG, *others)) or held

    async def _leave(self, leading: asyncio.Task[str]) -> None:
        """Lead no more, some time after the process is to end: what waits for others then ends."""
        await self._stop.wait()
        await asyncio.sleep(LAST_SYNCS_S_MAX)
        leading.cancel()

    async def _hand_over(self, copies: LeaderOfCopies, leading: asyncio.Task[str]) -> None:
        """Let another member of the in-sync set lead at once, if this process ends in order."""
        heirs = sorted(copies.record.in_sync.keys() - {self._cluster.node})
        if heirs and self._stop.is_set() and not leading.done():
            copies.hand_over(heirs[0])
            await asyncio.wait((leading,), timeout=HAND_OVER_S_MAX)

    def reload(self) -> None:
        """Take new settings from the supervisor, and read certificates again."""
        if self._leader is not None:
            self._leader.reload()
            return
        if (section := notify.new_section()) is not None:
            self._config = read_config(section)
            set_level(self._config.log_level)
        if self._certificates is not None and self._config.tls is not None:
            try:
                self._certificates.reload(self._config.tls)
            except ConfigError as error:
                log.error("certificates stay as they were: %s", error)

    def _own_part(self) -> OwnPart:
        """Return the part of a snapshot that this node is to make."""
        own = self._cluster
        return OwnPart(self._config.data_dir, own.name, own.node, own.number)

    # -- streams -----------------------------------------------------------------------------------

    def _opening(self, service: str, peer: Address | None, own: Address | None) -> Opening:
        return Opening(own_versions(), self._cluster.name, self._cluster.node, service, peer, own)

    def _accept(self, opening: Opening) -> Receiving:
        """Return the protocol of the service that a node asks for. Raises NoStream."""
        try:
            if opening.cluster != self._cluster.name:
                raise NoStream(f"this is a node of the cluster '{self._cluster.name}'")
            own = self._cluster.node
            if why := disagreement(own, own_versions(), opening.node, opening.versions):
                raise TooDifferent(why)
            if opening.service in (RANGES, READER):
                return self._streams.connection(opening.service)
            if opening.service == SNAPSHOT:
                return asyncio.StreamReaderProtocol(
                    asyncio.StreamReader(LINE_BYTES_MAX),
                    lambda reader, writer: make_part(reader, writer, self._own_part()),
                )
            if opening.service == COPIES and self._copies is not None:
                if self._format not in opening.versions.catalog:
                    raise TooDifferent(
                        f"the definitions have version {self._format}, and {opening.node} "
                        f"understands {opening.versions.catalog}"
                    )
                return copies_protocol(self._copies)
            if self._leader is None:
                raise NoStream(f"{self._cluster.node} does not lead", self._life)
            return self._leader.connection(opening.service, opening.node)
        except NoStream as error:
            why = f"{opening.node} ({opening.service}): {error}"
            if why not in self._refused and len(self._refused) < REFUSED_MAX:
                self._refused.add(why)
                log.warning("a stream is refused: %s", why)
            raise


def doors_of(nodes: Iterable[records.Node]) -> set[int]:
    """Return the numbers of the front doors of these nodes."""
    return {
        node.number * DOORS_PER_NODE + index for node in nodes for index in range(node.front_doors)
    }


async def serve(config: ControllerConfig, cluster: Cluster) -> int:
    """Run the controller of a node until SIGTERM, SIGINT or the end of the supervisor."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    stop_at_the_end(loop, stop)
    node = Node(config, cluster, stop)
    loop.add_signal_handler(signal.SIGHUP, node.reload)
    watchdog = asyncio.create_task(_watchdog())
    try:
        return await node.run()
    finally:
        watchdog.cancel()


async def _watchdog() -> None:
    while True:
        notify.watchdog()
        await asyncio.sleep(WATCHDOG_S)
