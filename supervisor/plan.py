"""The children of the supervisor: which there are, in which order, and the settings of each.

The plan follows from the settings, the number of cores and the open sockets. This module does no
I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from shardmq.cluster.records import COPIES_FOLDER, DOORS_PER_NODE, SHARDS_MAX
from shardmq.supervisor import modules
from shardmq.supervisor.config import REPLICAS, Settings

# Connections that may wait at a listening socket until they are accepted.
BACKLOG = 4096
# Stages are started in this order and drained in the reverse order.
STAGES = ("controller", "shard", "front-door", "reader", "bridges")
# Kinds of which there is one process.
SINGLE = ("controller", "reader", "bridges")


@dataclass(frozen=True)
class Listening:
    """The descriptors of the listening sockets, one for each address.

    Those of AMQP come in one tuple for each front door.
    """

    amqp_fds: tuple[tuple[int, ...], ...]
    http_fds: tuple[int, ...]
    metrics_fds: tuple[int, ...]
    http_address: str
    # Descriptors for TLS are empty if no certificate is set.
    amqps_fds: tuple[tuple[int, ...], ...] = ()
    https_fds: tuple[int, ...] = ()
    reader_fd: int = -1  # The controller calls the reader at this socket. -1: there is no reader.
    bridges_fd: int = -1  # The same for the process of bridges.


@dataclass(frozen=True)
class SeatPlan:
    """A copy of a shard on this node, which leads the shard or follows.

    `copies_fd` is the TCP socket at which the nodes that follow are let in. At `session_fd` peers
    on other nodes are let in; -1: that of `ClusterPlan.session_fds`, because the node is the home.
    """

    shard: int
    copies_fd: int
    session_fd: int = -1


@dataclass(frozen=True)
class ClusterPlan:
    """The part that this node has in a cluster.

    `node` is its number, and `shards` are the numbers of its shards. `session_fds` has the TCP
    socket of each of them, at which peers on other nodes are let in, and `keys` the section
    `session_keys` of all children (shardd/wire/session.py). `controller` is the section `cluster`
    of the controller, and `fd` the TCP socket at which other controllers reach it. `seats` has the
    shards with copies, first those that are of this node, and `copies` the part of their sections
    that is the same for all. Other nodes take over from one that is gone after `node_timeout_s`.
    """

    node: int
    shards: tuple[int, ...]
    session_fds: tuple[int, ...]
    keys: dict[str, Any]
    controller: dict[str, Any] | None = None
    fd: int = -1
    seats: tuple[SeatPlan, ...] = ()
    copies: dict[str, Any] | None = None
    node_timeout_s: float = 6.0


@dataclass(frozen=True)
class ChildPlan:
    """The plan of a child process: its module, its section of the settings and its descriptors."""

    kind: str
    index: int
    module: str
    section: dict[str, Any]
    fds: tuple[int, ...] = ()
    needed: bool = True  # The broker is not ready, and does not go on, without this child.
    # A listening socket: the child is started when somebody connects there. -1: it starts at once.
    called_at: int = -1
    # The number of the front door in this process, which may be a shard, too. None: there is none.
    front_door: int | None = None

    @property
    def name(self) -> str:
        """The name in the log and in status.json, such as `shard-0`."""
        return self.kind if self.kind in SINGLE else f"{self.kind}-{self.index}"

    def arguments(self, section_fd: int) -> list[str]:
        """Return the command line. `section_fd` is the file that holds the section."""
        return modules.command(self.module, "--config", f"fd:{section_fd}")


def shard_count(settings: Settings, cores: int) -> int:
    """Return the number of shards: the configured one or, for `auto`, one for each core."""
    count = settings.shards.count
    return min(max(1, cores), SHARDS_MAX) if count == "auto" else count


def front_door_count(settings: Settings, cores: int) -> int:
    """Return the number of front doors, in processes of their own or in those of the shards."""
    return settings.front_doors.count or shard_count(settings, cores)


def replicas_wanted(settings: Settings) -> int:
    """Return on how many nodes the messages of a shard are to be, if there are so many."""
    return settings.cluster.replicas or (1 if copies_refused(settings) else REPLICAS)


def copies_refused(settings: Settings) -> str:
    """Return why shards cannot have copies with these settings; "" if they can."""
    if settings.shards.durability != "fsync":
        return "cluster.replicas: shards have copies only with shards.durability = 'fsync'"
    if settings.front_doors.count == 0:
        return "cluster.replicas: shards have copies only with front_doors.count above 0"
    return ""


def children(
    settings: Settings,
    cores: int,
    runtime_dir: str,
    boot: str,
    listening: Listening,
    cluster: ClusterPlan | None = None,
) -> list[ChildPlan]:
    """Return the plans of all children in the order of STAGES.

    Args:
        settings: The settings of the broker.
        cores: The number of cores that the broker may use.
        runtime_dir: The directory of the sockets between the processes.
        boot: A name of this life of the broker, which no other life has.
        listening: The sockets that the children inherit.
        cluster: The part of this node in a cluster, if there is one.
    """
    shards, doors = shard_count(settings, cores), len(listening.amqp_fds)
    numbers = tuple(range(shards)) if cluster is None else cluster.shards
    keys = None if cluster is None else cluster.keys
    first_door = 0 if cluster is None else cluster.node * DOORS_PER_NODE
    tls = msgspec.to_builtins(settings.tls) if settings.tls.cert else None
    for_all = {
        "runtime_dir": runtime_dir,
        "log_level": settings.log_level,
        "log_format": settings.log_format,
    }
    tracing, ratio = None, None
    if settings.tracing.enabled:
        tracing = _without(settings.tracing, "enabled", "sample_ratio")
        ratio = settings.tracing.sample_ratio
    addresses: list[str] = []
    for bind in (settings.listen.bind, settings.listen.tls_bind):
        addresses += [bind] if isinstance(bind, str) else bind
    section = {
        **for_all,
        **msgspec.to_builtins(settings.users),
        "data_dir": settings.data_dir,
        "boot": boot,
        "shards": shards,
        "doors": doors,
        "http_fds": listening.http_fds,
        "https_fds": listening.https_fds,
        "tls": tls,
        "metrics_fds": listening.metrics_fds,
        "http_address": listening.http_address,
        "http": msgspec.to_builtins(settings.http),
        "http_hosts": settings.listen.http_hosts,
        "listen_names": addresses,
        "channel_max_per_node": settings.front_doors.channel_max_per_node,
        "load_definitions": settings.load_definitions,
        "connections_max": settings.front_doors.connections_max,
        "memory_high_watermark": settings.memory.high_watermark,
        "memory_high_watermark_bytes": settings.memory.high_watermark_bytes,
        "tracing": tracing,
        "secrets": msgspec.to_builtins(settings.secrets),
        "first_door": first_door,
        "cluster": None if cluster is None else cluster.controller,
        "own_shards": numbers,
        "session_keys": keys,
        "streams_from_followers": settings.reader.from_followers,
    }
    fds = listening.http_fds + listening.https_fds + listening.metrics_fds
    if cluster is not None and cluster.fd >= 0:
        fds += (cluster.fd,)
    plans = [ChildPlan("controller", 0, "shardmq.broker.controller", section, fds)]
    front_doors = []
    for index, plain in enumerate(listening.amqp_fds):
        secure = listening.amqps_fds[index] if listening.amqps_fds else ()
        section = {
            **for_all,
            **_without(settings.front_doors, "count", "connections_max"),
            "door": first_door + index,
            "doors": doors,
            "shards": numbers,
            "session_keys": keys,
            **({} if cluster is None else {"node_timeout_s": cluster.node_timeout_s}),
            "listen_fds": list(plain),
            "tls_listen_fds": list(secure),
            "backlog": BACKLOG,
            "proxy_protocol_from": settings.listen.proxy_protocol_from,
            "bodies_bytes": settings.memory.bodies_bytes,
            "tls": tls,
            "boot": boot,
            "tracing_ratio": ratio,
            "connections_are_limited": settings.front_doors.connections_max > 0,
        }
        module, fds = "shardmq.broker.front_door", plain + secure
        plan = ChildPlan("front-door", index, module, section, fds, front_door=index)
        front_doors.append(plan)
    seats = {} if cluster is None else {seat.shard: seat for seat in cluster.seats}
    for_shards = {**for_all, **_without(settings.shards, "count")}
    for index, number in enumerate(numbers):
        section = {**for_shards, "data_dir": settings.data_dir, "shard": number}
        fds = ()
        if cluster is not None:
            fds = (cluster.session_fds[index],)
            section |= {"session_fd": fds[0], "session_keys": keys}
            if (seat := seats.pop(number, None)) is not None and cluster.copies is not None:
                copies = {**cluster.copies, "fd": seat.copies_fd, "founds": True}
                section["copies"] = copies
                fds += (seat.copies_fd,)
        plan = ChildPlan("shard", number, "shardmq.shardd", section, fds)
        if settings.front_doors.count == 0:
            door = front_doors[index]
            both = {"shard": section, "front_door": door.section}
            plan = ChildPlan(
                "shard", number, "shardmq.combined", both, door.fds + fds, front_door=index
            )
        plans.append(plan)
    for seat in seats.values():
        assert cluster is not None and cluster.copies is not None
        section = {
            **for_shards,
            "data_dir": f"{settings.data_dir}/{COPIES_FOLDER}",
            "shard": seat.shard,
            "session_fd": seat.session_fd,
            "session_keys": keys,
            "copies": {**cluster.copies, "fd": seat.copies_fd, "founds": False},
        }
        fds = (seat.session_fd, seat.copies_fd)
        plans.append(ChildPlan("shard", seat.shard, "shardmq.shardd", section, fds, needed=False))
    if settings.front_doors.count:
        plans += front_doors
    if (fd := listening.reader_fd) >= 0:
        section = {
            **for_all,
            **_without(settings.reader, "enabled", "from_followers"),
            "listen_fd": fd,
            "data_dir": settings.data_dir,
            "shards": numbers,
        }
        module = "shardmq.shardd.reader"
        plans.append(ChildPlan("reader", 0, module, section, (fd,), needed=False, called_at=fd))
    if (fd := listening.bridges_fd) >= 0:
        section = {**for_all, "listen_fd": fd, "first_door": first_door, "doors": doors}
        module = "shardmq.bridges"
        plans.append(ChildPlan("bridges", 0, module, section, (fd,), needed=False, called_at=fd))
    return plans


def _without(table: msgspec.Struct, *names: str) -> dict[str, Any]:
    """Return the settings of a table without those that the child does not read."""
    found: dict[str, Any] = msgspec.to_builtins(table)
    return {name: value for name, value in found.items() if name not in names}
