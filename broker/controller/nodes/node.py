"""The controller of a node in a cluster: it relays to the leader, or leads.

The first node that finds no leader in etcd leads, and a node that led before its process ended
leads again. A leader that finds another one in etcd ends with the status DEPOSED: its process
starts again and relays. While etcd is away, everything stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from shardmq.broker.controller.cluster_view import KnownNode
from shardmq.broker.controller.config import Cluster, ControllerConfig, read_config
from shardmq.broker.controller.management.tls_handshakes import Handshakes, TlsServer
from shardmq.broker.controller.memory import MemoryWatch, pids
from shardmq.broker.controller.node_facts import NodeFacts, facts_of
from shardmq.broker.controller.nodes.facts import tell_facts
from shardmq.broker.controller.nodes.nodes import Nodes
from shardmq.broker.controller.nodes.relay import Relay
from shardmq.broker.controller.nodes.streams import (
    CONTROL,
    FACTS,
    HTTP,
    HTTPS,
    LOCAL,
    METRICS,
    VERSION,
    Address,
    NoStream,
    Opening,
    OpeningProtocol,
    open_stream,
)
from shardmq.broker.controller.peers.links import SOCKET_NAME
from shardmq.broker.controller.server import WATCHDOG_S, Controller, stop_at_the_end
from shardmq.broker.shared.certificates import Certificates
from shardmq.broker.shared.config import ConfigError
from shardmq.broker.shared.control import DOORS_PER_NODE, ShardElsewhere
from shardmq.cluster import records
from shardmq.cluster.etcd import Etcd, Tls
from shardmq.cluster.pairs import Compare, EtcdAway, EtcdRefused, Put
from shardmq.cluster.records import SHARD_PORT, KeyNames, Leader
from shardmq.cluster.secret import tls_context
from shardmq.supervisor import notify
from shardmq.supervisor.logs import set_level

DEPOSED: Final = 3
AGAIN_S: Final = 0.5
REFUSED_MAX: Final = 1000  # different refusals of streams that are logged
LOCAL_SOCKET: Final = "shardctl.sock"

log = logging.getLogger(__name__)


class Node:
    """The controller of one node, in both of its roles."""

    def __init__(self, config: ControllerConfig, cluster: Cluster, stop: asyncio.Event) -> None:
        self._config = config
        self._cluster = cluster
        self._stop = stop
        self._server_tls = tls_context(cluster.keys, server=True)
        self._client_tls = tls_context(cluster.keys, server=False)
        etcd = cluster.etcd
        self._etcd = Etcd(
            etcd.endpoints,
            user=etcd.user,
            password=etcd.password,
            tls=Tls(etcd.ca, etcd.cert, etcd.key),
        )
        self._keys = KeyNames(cluster.name)
        self._nodes = Nodes(self._etcd, self._keys, self._changed)
        self._leader: Controller | None = None
        self._term = 0  # in which this node leads
        self._role_ends = asyncio.Event()
        self._refused: set[str] = set()
        self._certificates = None if config.tls is None else Certificates(config.tls)
        self._status = 0

    async def run(self) -> int:
        """Relay, lead, and relay no more, until `stop` is set; return the exit status."""
        server = TlsServer(
            socket.socket(fileno=os.dup(self._cluster.fd)),
            self._server_tls,
            lambda: OpeningProtocol(self._accept),
            Handshakes(),
            lambda: self._config.http,
        )
        watching = asyncio.create_task(self._nodes.run())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            while not self._stop.is_set() and not self._status:
                leads = asyncio.create_task(self._may_lead())
                relay = await self._relay()
                telling = asyncio.create_task(self._tell())
                await asyncio.wait((leads, stopping, watching), return_when=asyncio.FIRST_COMPLETED)
                telling.cancel()
                await relay.close()
                if watching.done():
                    watching.result()
                if leads.done():
                    leads.result()
                    await self._lead()
                else:
                    leads.cancel()
        except EtcdRefused as error:
            log.critical("etcd refuses: %s", error)
            return 1
        finally:
            stopping.cancel()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            server.close()
            await self._etcd.close()
        return self._status

    # -- who leads ---------------------------------------------------------------------------------

    async def _may_lead(self) -> None:
        """Return when this node leads, by etcd's word, in the term `_term`."""
        while True:
            version = self._nodes.version
            known, revision = self._nodes.controller, self._nodes.revision
            if version and (known is None or self._is_own(known)):
                term = 1 if known is None else known.term + 1
                if await self._claim(term, revision):
                    self._term = term
                    return
            await self._nodes.newer(version)

    async def _claim(self, term: int, revision: int) -> bool:
        """Say in etcd that this node leads, unless the record has changed since `revision`."""
        cluster = self._cluster
        address = f"[{cluster.host}]" if ":" in cluster.host else cluster.host
        record = Leader(
            term=term,
            leader=cluster.number,
            in_sync=[cluster.number],
            address=f"{address}:{cluster.port}",
        )
        key = self._keys.controller
        unchanged = (
            Compare(key, mod_revision=revision) if revision else Compare(key, create_revision=0)
        )
        try:
            outcome = await self._etcd.transact([unchanged], [Put(key, records.encoded(record))])
        except EtcdAway as error:
            # If etcd has it all the same, the watch will show it as this node's, and it is raised.
            log.warning("etcd is away: %s", error)
            await asyncio.sleep(AGAIN_S)
            return False
        if outcome.succeeded:
            log.info("this node leads in term %d", term)
        return outcome.succeeded

    def _changed(self) -> None:
        """Look at what etcd has now of the nodes and of the leader."""
        known = self._nodes.controller
        if self._leader is None or known is None:
            return
        if known.term > self._term or (known.term == self._term and not self._is_own(known)):
            log.error("node %d leads in term %d: this one begins anew", known.leader, known.term)
            self._status = DEPOSED
            self._role_ends.set()
            return
        nodes = self._nodes.nodes.values()
        self._leader.know(known_nodes(nodes))
        self._leader.learn(shards_of(nodes), doors_of(nodes))

    def _is_own(self, record: Leader) -> bool:
        return record.leader == self._cluster.number

    # -- the two roles -----------------------------------------------------------------------------

    async def _relay(self) -> Relay:
        """Listen for the clients of this node, as a relay."""
        config, runtime_dir = self._config, Path(self._config.runtime_dir)
        relay = Relay(
            self._client_tls, self._nodes.leader, self._opening, lambda: self._config.http
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

    async def _tell(self) -> None:
        """Tell the leader the facts of this node, and watch the memory for that."""
        watch = MemoryWatch()

        def facts() -> NodeFacts:
            config = self._config
            watch.look(
                pids(config.runtime_dir),
                config.memory_high_watermark,
                config.memory_high_watermark_bytes,
            )
            return facts_of(config, watch)

        def connect(address: Address, protocol: asyncio.Protocol) -> Awaitable[None]:
            opening = self._opening(FACTS, None, None)
            return open_stream(address, self._client_tls, opening, protocol)

        await tell_facts(facts, self._nodes.leader, connect)

    async def _lead(self) -> None:
        """Be the controller of the whole cluster until the role or the process ends."""
        self._role_ends.clear()
        config = msgspec.structs.replace(self._config, term=self._term)
        controller = Controller(config, doors_of(self._nodes.nodes.values()))
        self._leader = controller
        self._changed()
        ending = asyncio.create_task(self._end_role())
        try:
            status = await controller.run(self._role_ends)
        finally:
            ending.cancel()
            self._leader = None
        self._status = self._status or status
        self._stop.set()

    async def _end_role(self) -> None:
        await self._stop.wait()
        self._role_ends.set()

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

    # -- streams -----------------------------------------------------------------------------------

    def _opening(self, service: str, peer: Address | None, own: Address | None) -> Opening:
        return Opening(VERSION, self._cluster.name, self._cluster.node, service, peer, own)

    def _accept(self, opening: Opening) -> asyncio.Protocol:
        """Return the protocol of the service that a node asks for. Raises NoStream."""
        try:
            if opening.cluster != self._cluster.name:
                raise NoStream(f"this is a node of the cluster '{self._cluster.name}'")
            if opening.version != VERSION:
                raise NoStream(
                    f"{self._cluster.node} speaks version {VERSION} of the streams between nodes, "
                    f"{opening.node} version {opening.version}"
                )
            if self._leader is None:
                raise NoStream(f"{self._cluster.node} does not lead")
            return self._leader.connection(opening.service, opening.node)
        except NoStream as error:
            why = f"{opening.node} ({opening.service}): {error}"
            if why not in self._refused and len(self._refused) < REFUSED_MAX:
                self._refused.add(why)
                log.warning("a stream is refused: %s", why)
            raise


def known_nodes(nodes: Iterable[records.Node]) -> list[KnownNode]:
    """Return the nodes that are alive as the leader knows them."""
    return [
        KnownNode(
            node.number, node.name, [each.number for each in shards_of([node])[node.number]], True
        )
        for node in nodes
    ]


def shards_of(nodes: Iterable[records.Node]) -> dict[int, list[ShardElsewhere]]:
    """Return the shards of each node, by the number of the node."""
    return {
        node.number: [
            ShardElsewhere(
                int(name.removeprefix(SHARD_PORT)), node.name, f"tcp://{node.address}:{port}"
            )
            for name, port in node.ports.items()
            if name.startswith(SHARD_PORT)
        ]
        for node in nodes
    }


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
