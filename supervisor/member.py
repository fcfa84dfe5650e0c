"""A host as a node of a cluster: what it claims in etcd at its start, and its sign of life.

The lease of the node is renewed from the first to the last moment of the supervisor, whatever the
other processes do. That etcd is away is no error: the node waits for it at its start, and tries on
later.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Collection
from contextlib import aclosing
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from shardmq.cluster.lease import ENDED, Barred, Lease
from shardmq.cluster.membership import (
    Claims,
    NoPlace,
    Place,
    Refused,
    Seats,
    forgotten_key,
    read_place,
    was_forgotten,
    write_place,
)
from shardmq.cluster.pairs import EtcdAway, EtcdRefused
from shardmq.cluster.records import (
    COPIES_PORT,
    SHARD_PORT,
    BadRecord,
    KeyNames,
    Node,
    decoded,
    encoded,
)
from shardmq.cluster.replicas import shard_set
from shardmq.cluster.secret import keys_of
from shardmq.cluster.versions import disagreement, own_versions
from shardmq.supervisor.config import Cluster, ConfigError
from shardmq.supervisor.plan import ClusterPlan, SeatPlan
from shardmq.supervisor.sockets import Sockets

AGAIN_S: Final = 1.0
LEAVE_S_MAX: Final = 2.0
# How often a node looks whether others are lost, whose copies it is to replace.
LOOK_S: Final = 5.0
NODE_PREFIX: Final = "shardmq@"

log = logging.getLogger("supervisor")


def version() -> str:
    """Return the version of the program."""
    try:
        return metadata.version("shardmq")
    except metadata.PackageNotFoundError:
        return "0"


def node_name(settings: Cluster) -> str:
    """Return the name of this node, such as `shardmq@host`."""
    name = settings.node or socket.gethostname()
    return name if "@" in name else NODE_PREFIX + name


def own_address(settings: Cluster) -> str:
    """Return the address at which the other nodes reach this one.

    Without a setting it is the one by which this host reaches an endpoint of etcd. An etcd on this
    host tells an address of the loopback only, so the others are asked before that counts. Raises
    ConfigError.
    """
    if settings.address:
        return settings.address
    loopback, errors = "", []
    for endpoint in settings.endpoints:
        parts = urlsplit(endpoint)
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
                probe.connect((parts.hostname or "", parts.port or 2379))
                found = str(probe.getsockname()[0])
        except (OSError, ValueError) as error:
            errors.append(f"{endpoint}: {error}")
            continue
        if not ip_address(found).is_loopback:
            return found
        loopback = loopback or found
    if loopback:
        return loopback
    raise ConfigError(f"cluster.address: not set, and etcd does not tell it: {'; '.join(errors)}")


class Member:
    """The claims and the lease of this node.

    Args:
        settings: The section `cluster` of the settings.
        data_dir: The data directory, which keeps the place of the node.
        shards: The number of shards that the node is to have.
        held: The numbers of the shards whose directories there are.
        replicas: On how many nodes the messages of a shard are to be that is in no set.

    `shards` is the number of shards that the node has made, or is to make.
    `failed` is called with the task that renews the lease, when that task has ended by itself.

    Raises:
        ConfigError: A setting is wrong, or the place of the node cannot be read.
    """

    failed: Callable[[asyncio.Task[None]], None]

    def __init__(
        self,
        settings: Cluster,
        data_dir: Path,
        shards: int,
        held: Collection[int],
        replicas: int,
    ) -> None:
        self.name = node_name(settings)
        self.address = own_address(settings)
        self._settings = settings
        self._data_dir = data_dir
        self.shards = max(shards, len(held))
        self._held = held
        self.replicas = replicas
        self._sets = [shard_set(text) for text in settings.sets_of_shards]
        from shardmq.cluster.etcd import Etcd, Tls  # only a node of a cluster needs it

        self._why_misplaced = ""
        try:
            self.place = read_place(data_dir, settings.name, self.name)
        except NoPlace as error:  # which `join` tells the other nodes, too
            self._why_misplaced = str(error)
            self.place = Place(settings.name, self.name, identity="")
        except OSError as error:
            raise ConfigError(f"cluster: {error}") from None
        try:
            self._etcd = Etcd(
                settings.endpoints,
                user=settings.etcd_user,
                password=settings.etcd_password,
                tls=Tls(settings.etcd_ca, settings.etcd_cert, settings.etcd_key),
            )
        except (ValueError, OSError) as error:
            raise ConfigError(f"cluster.etcd: {error}") from None
        # The shards that have copies here, those of this node first: the socket for those who have
        # copies, too, and the one for peers on other nodes, unless it is that of a shard.
        self._seats: dict[int, tuple[socket.socket, socket.socket | None]] = {}
        self._claims = Claims(self._etcd, settings.name)
        self._lease = Lease(self._etcd, settings.node_timeout_s, _lease_changed)
        self._holding: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[None] | None = None
        self._incarnation = time.time_ns() // 1_000_000

    @property
    def takes_copies(self) -> bool:
        """True if this node is to take copies of shards of other nodes."""
        return max([self.replicas, *(each.replicas.count for each in self._sets)]) > 1

    async def join(self, tell: Callable[[str], None]) -> list[int]:
        """Claim the number of the node and of its shards, and note them in `place`.

        Returns the shards that have copies here, those of this node first.

        Args:
            tell: Called with a text while etcd does not answer.

        Raises:
            ConfigError: The node cannot be of this cluster.
        """
        claims = self._claims
        if self._why_misplaced:
            raise await self._refusal(self._why_misplaced)
        self._keys = await asyncio.to_thread(keys_of, self._settings.secret, self._settings.name)
        while True:
            try:
                await claims.secret(self._keys.fingerprint)
                place = await claims.number(self.place)
                place = await claims.shards(place, self.shards, self._held)
                in_sets = await claims.replicas(place, self._sets)
                own, seats = await claims.copied(place, self.replicas, in_sets)
                break
            except EtcdAway as error:
                text = f"waits for etcd: {error}"
                log.warning("%s", text)
                tell(text)
                await asyncio.sleep(AGAIN_S)
            except NoPlace as error:
                raise await self._refusal(str(error)) from None
            except BadRecord as error:
                raise ConfigError(f"cluster: {error}") from None
            except EtcdRefused as error:
                raise ConfigError(f"cluster.etcd: {error}") from None
        if place != self.place:
            await asyncio.to_thread(write_place, self._data_dir, place)
            self.place = place
        log.info("node %d of cluster '%s', shards %s", place.number, place.cluster, place.shards)
        return own + seats

    async def _refusal(self, why: str) -> ConfigError:
        """Tell the other nodes why this one is refused, if etcd answers; return the error."""
        try:
            await self._claims.tell_refused(Refused(self.name, self.address, why))
        except (EtcdAway, EtcdRefused) as error:
            log.warning("the other nodes do not hear that this one is refused: %s", error)
        return ConfigError(f"cluster: {why}")

    def open_seat(self, shard: int, sockets: Sockets) -> None:
        """Open the sockets of a shard that has copies here. Raises ConfigError."""
        port = self._settings.port
        copies = sockets.open_for_nodes(self.address, port)
        is_home = shard in self.place.shards
        self._seats[shard] = copies, None if is_home else sockets.open_for_nodes(self.address, port)

    def node(self, sockets: Sockets) -> ClusterPlan:
        """Return what the children need to know."""
        place = self.place
        first, *others = self._listening(sockets)
        settings, keys = self._settings, self._keys
        etcd = {
            "endpoints": settings.endpoints,
            "user": settings.etcd_user,
            "password": settings.etcd_password,
            "ca": settings.etcd_ca,
            "cert": settings.etcd_cert,
            "key": settings.etcd_key,
        }
        controller = {
            "name": place.cluster,
            "node": self.name,
            "number": place.number,
            "fd": first.fileno(),
            "host": self.address,
            "port": first.getsockname()[1],
            "keys": msgspec.to_builtins(keys),
            "etcd": etcd,
            "node_timeout_s": settings.node_timeout_s,
            "replica_lag_s": settings.replica_lag_s,
            "replicas": self.replicas,
            "min_in_sync": settings.min_in_sync,
            "founds": place.founds,
        }
        copies = {
            "cluster": place.cluster,
            "node": self.name,
            "min_in_sync": settings.min_in_sync,
            "replica_lag_s": settings.replica_lag_s,
            "give_back_after_s": settings.give_back_after_s,
            "replicas": self.replicas,
            "compression": settings.compression,
            "keys": msgspec.to_builtins(keys),
            "etcd": etcd,
        }
        return ClusterPlan(
            node=place.number,
            shards=tuple(place.shards),
            session_fds=tuple(sock.fileno() for sock in others),
            keys={"public": keys.curve_public, "secret": keys.curve_secret},
            controller=controller,
            fd=first.fileno(),
            seats=tuple(
                SeatPlan(shard, copies.fileno(), -1 if session is None else session.fileno())
                for shard, (copies, session) in self._seats.items()
            ),
            copies=copies,
            node_timeout_s=settings.node_timeout_s,
        )

    def _listening(self, sockets: Sockets) -> list[socket.socket]:
        """Return the socket of the controller, and one for each shard of this node."""
        return sockets.cluster[: 1 + len(self.place.shards)]

    def announce(self, sockets: Sockets) -> None:
        """Say in etcd that this node lives and where, from now on until `leave`."""
        first, *others = self._listening(sockets)
        ports = {"cluster": first.getsockname()[1]}
        for shard, sock in zip(self.place.shards, others, strict=True):
            ports[f"{SHARD_PORT}{shard}"] = sock.getsockname()[1]
        for shard, (copies, session) in self._seats.items():
            ports[f"{COPIES_PORT}{shard}"] = copies.getsockname()[1]
            if session is not None:
                ports[f"{SHARD_PORT}{shard}"] = session.getsockname()[1]
        for protocol, where in sockets.addresses().items():
            ports[protocol] = int(where.rpartition(":")[2])
        node = Node(
            number=self.place.number,
            name=self.name,
            address=self.address,
            ports=ports,
            version=version(),
            cores=len(os.sched_getaffinity(0)),
            incarnation=self._incarnation,
            front_doors=len(sockets.amqp),
            versions=own_versions(),
        )
        self._lease.put(KeyNames(self._settings.name).node(node.number), encoded(node))
        self._announced = node
        if self._holding is None:
            self._lease.bar = forgotten_key(KeyNames(self._settings.name), node.number)
            self._holding = asyncio.create_task(self._hold())
            self._holding.add_done_callback(self.failed)

    async def _hold(self) -> None:
        """Hold the lease. Raises ConfigError when the node was forgotten meanwhile."""
        try:
            await self._lease.hold()
        except Barred:
            raise ConfigError(f"cluster: {was_forgotten(self.name)}") from None

    async def check_versions(self) -> None:
        """Return when this node, which is announced, may work with those that were there before.

        Those see the record of this node, and log the same when it is refused.

        Raises:
            ConfigError: It has no version of something in common with one of them.
        """
        await self._lease.wait_until_held()
        own, prefix = self._announced, KeyNames(self._settings.name).nodes
        try:
            listing = await self._etcd.range(prefix)
            others = [decoded(pair.key, pair.value, Node) for pair in listing.pairs]
        except (EtcdAway, EtcdRefused, BadRecord) as error:
            log.warning("the versions of the other nodes are not known: %s", error)
            return
        for other in others:
            why = disagreement(self.name, own.versions, other.name, other.versions)
            if why and other.incarnation < own.incarnation:
                raise ConfigError(f"cluster: {why} (release {other.version})")

    async def take_seats(self, taken: Callable[[int], None]) -> None:
        """Take copies of shards of other nodes, as long as these have too few.

        `leave` cancels the task that does this.

        Args:
            taken: Called with each shard that this node is to have a copy of, at least once.
        """
        self._taking = asyncio.current_task()
        names, number = KeyNames(self._settings.name), self.place.number
        seats = Seats(names, number, self.replicas, self._settings.replace_after_s)
        changed = asyncio.Event()
        async with asyncio.TaskGroup() as group:  # the end of one of them ends both
            group.create_task(self._take_wanted(seats, changed))
            group.create_task(self._look_for_seats(names.all, seats, changed, taken))

    async def _look_for_seats(
        self, prefix: str, seats: Seats, changed: asyncio.Event, taken: Callable[[int], None]
    ) -> None:
        """Keep `seats` in step with etcd, and tell of those that this node has."""
        while True:
            try:
                async with aclosing(self._etcd.watch(prefix)) as watch:
                    async for news in watch:
                        seats.take(news, time.monotonic())
                        for shard in sorted(seats.taken() - self._seats.keys()):
                            taken(shard)
                        changed.set()
            except (EtcdAway, EtcdRefused, BadRecord) as error:
                log.warning("no copies are taken for now: %s", error)
                await asyncio.sleep(AGAIN_S)

    async def _take_wanted(self, seats: Seats, changed: asyncio.Event) -> None:
        """Take the seats that are wanted, at each change, and when time has passed."""
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await changed.wait()
            except TimeoutError:
                pass
            changed.clear()
            for wanted in seats.wanted(time.monotonic()):
                gone = set(wanted.claim.members) - set(wanted.members)
                log.info(
                    "takes a copy of shard %d%s",
                    wanted.shard,
                    f" in place of node {', '.join(map(str, sorted(gone)))}" if gone else "",
                )
                try:
                    await self._claims.take_seat(wanted)
                except (EtcdAway, EtcdRefused) as error:
                    log.warning("no copy of shard %d is taken for now: %s", wanted.shard, error)

    async def leave(self) -> None:
        """End the lease, so that the other nodes need not wait for its end."""
        if self._taking is not None:  # its watch must end before the connections do
            self._taking.cancel()
            await asyncio.gather(self._taking, return_exceptions=True)
        if self._holding is not None:
            self._holding.cancel()
            await asyncio.gather(self._holding, return_exceptions=True)
            try:
                async with asyncio.timeout(LEAVE_S_MAX):
                    await self._lease.end()
            except (EtcdAway, EtcdRefused, TimeoutError) as error:
                log.warning("the lease of this node ends later: %s", error)
        await self._etcd.close()


def _lease_changed(lease: Lease) -> None:
    if lease.lost == ENDED:
        log.info("this node has left the cluster until its next start")
    elif lease.lost:
        log.error("the cluster does not hear of this node: %s", lease.lost or lease.trouble)
    else:
        log.info("the cluster hears of this node")
