"""The children of the supervisor: which there are, in which order, and the settings of each.

The plan follows from the settings, the number of cores and the open sockets. This module does no
I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from shardmq.supervisor.config import SHARDS_MAX, Settings

# Stages are started in this order and drained in the reverse order.
STAGES = ("controller", "shard", "front-door", "reader")


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

    @property
    def name(self) -> str:
        """The name in the log and in status.json, such as `shard-0`."""
        return self.kind if self.kind in ("controller", "reader") else f"{self.kind}-{self.index}"

    def arguments(self, section_fd: int) -> list[str]:
        """Return the arguments for the Python interpreter.

        -P keeps Python from importing a folder of the working directory that has the name of one
        of the packages.

        Args:
            section_fd: The descriptor of the file that holds the section of the settings.
        """
        return ["-P", "-m", self.module, "--config", f"fd:{section_fd}"]


def shard_count(settings: Settings, cores: int) -> int:
    """Return the number of shards: the configured one or, for `auto`, one for each core."""
    count = settings.shards.count
    return min(max(1, cores), SHARDS_MAX) if count == "auto" else count


def children(
    settings: Settings, cores: int, runtime_dir: str, boot: str, listening: Listening
) -> list[ChildPlan]:
    """Return the plans of all children in the order of STAGES.

    Args:
        settings: The settings of the broker.
        cores: The number of cores that the broker may use.
        runtime_dir: The directory of the sockets between the processes.
        boot: A name of this life of the broker, which no other life has.
        listening: The sockets that the children inherit.
    """
    shards = shard_count(settings, cores)
    tls = msgspec.to_builtins(settings.tls) if settings.tls.cert else None
    plans = [_controller(settings, shards, runtime_dir, boot, listening, tls)]
    plans += [_shard(settings, index, runtime_dir) for index in range(shards)]
    plans += [
        _front_door(settings, shards, index, listening, runtime_dir, boot, tls)
        for index in range(len(listening.amqp_fds))
    ]
    if listening.reader_fd >= 0:
        section = {
            "listen_fd": listening.reader_fd,
            "data_dir": settings.data_dir,
            "runtime_dir": runtime_dir,
            "shards": shards,
            "scans_max": settings.reader.scans_max,
            "bytes_per_s": settings.reader.bytes_per_s,
            "log_level": settings.log_level,
            "log_format": settings.log_format,
        }
        reader = ChildPlan(
            "reader",
            0,
            "shardmq.shardd.reader",
            section,
            (listening.reader_fd,),
            needed=False,
            called_at=listening.reader_fd,
        )
        plans.append(reader)
    return plans


def _controller(
    settings: Settings,
    shards: int,
    runtime_dir: str,
    boot: str,
    listening: Listening,
    tls: dict[str, Any] | None,
) -> ChildPlan:
    addresses: list[str] = []
    for bind in (settings.listen.bind, settings.listen.tls_bind):
        addresses += [bind] if isinstance(bind, str) else bind
    section = {
        "data_dir": settings.data_dir,
        "runtime_dir": runtime_dir,
        "boot": boot,
        "shards": shards,
        "doors": len(listening.amqp_fds),
        "http_fds": listening.http_fds,
        "https_fds": listening.https_fds,
        "tls": tls,
        "metrics_fds": listening.metrics_fds,
        "http_address": listening.http_address,
        "http": msgspec.to_builtins(settings.http),
        "default_user": settings.users.default_user,
        "default_pass": settings.users.default_pass,
        "hashing": settings.users.hashing,
        "http_without_tls": settings.users.http_without_tls,
        "http_hosts": settings.listen.http_hosts,
        "listen_names": addresses,
        "channel_max_per_node": settings.front_doors.channel_max_per_node,
        "load_definitions": settings.load_definitions,
        "connections_max": settings.front_doors.connections_max,
        "memory_high_watermark": settings.memory.high_watermark,
        "memory_high_watermark_bytes": settings.memory.high_watermark_bytes,
        "log_level": settings.log_level,
        "log_format": settings.log_format,
    }
    fds = listening.http_fds + listening.https_fds + listening.metrics_fds
    return ChildPlan("controller", 0, "shardmq.broker.controller", section, fds)


def _shard(settings: Settings, index: int, runtime_dir: str) -> ChildPlan:
    section = {
        "data_dir": settings.data_dir,
        "runtime_dir": runtime_dir,
        "shard": index,
        "segment_bytes": settings.shards.segment_bytes,
        "durability": settings.shards.durability,
        "disk_free_min_bytes": settings.shards.disk_free_min_bytes,
        "disk_free_warn_bytes": settings.shards.disk_free_warn_bytes,
        "disk_stall_s": settings.shards.disk_stall_s,
        "consumer_timeout_ms": settings.shards.consumer_timeout_ms,
        "consumer_timeout_action": settings.shards.consumer_timeout_action,
        "producer_idle_s": settings.shards.producer_idle_s,
        "log_level": settings.log_level,
        "log_format": settings.log_format,
    }
    return ChildPlan("shard", index, "shardmq.shardd", section)


def _front_door(
    settings: Settings,
    shards: int,
    index: int,
    listening: Listening,
    runtime_dir: str,
    boot: str,
    tls: dict[str, Any] | None,
) -> ChildPlan:
    doors = settings.front_doors
    plain, secure = (
        listening.amqp_fds[index],
        listening.amqps_fds[index] if listening.amqps_fds else (),
    )
    section = {
        "runtime_dir": runtime_dir,
        "door": index,
        "doors": len(listening.amqp_fds),
        "shards": shards,
        "listen_fds": list(plain),
        "tls_listen_fds": list(secure),
        "proxy_protocol_from": settings.listen.proxy_protocol_from,
        "tls": tls,
        "boot": boot,
        "heartbeat_s": doors.heartbeat_s,
        "frame_bytes_max": doors.frame_bytes_max,
        "channels_max": doors.channels_max,
        "channel_consumers_max": doors.channel_consumers_max,
        "channel_max_per_node": doors.channel_max_per_node,
        "message_bytes_max": doors.message_bytes_max,
        "set_timestamp": doors.set_timestamp,
        "handshake_timeout_s": doors.handshake_timeout_s,
        "tick_us": doors.tick_us,
        "connections_are_limited": doors.connections_max > 0,
        "log_level": settings.log_level,
        "log_format": settings.log_format,
    }
    return ChildPlan("front-door", index, "shardmq.broker.front_door", section, plain + secure)
