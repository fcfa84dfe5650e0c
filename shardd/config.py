"""Define the settings of a shard.

They are checked once, at the start, and only read afterwards.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shardmq.cluster.secret import Keys
from shardmq.cluster.settings import EtcdSettings
from shardmq.shardd.wire.session import SessionKeys


class CopiesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of this node in the copies of a shard.

    node: the name of this node in the cluster.
    fd: the TCP socket at which nodes with copies are let in, with `keys`, when this node leads.
    founds: this node is the home of the shard: it may begin to lead a shard that nobody has led.
    replicas: on how many nodes the messages of the shard are to be.
    min_in_sync: with fewer nodes that have all, nothing is confirmed; 0: half of them, rounded up.
    replica_lag_s: a node that does not answer for so long is taken out of those in sync.
    give_back_after_s: when the home of the shard has been in sync for so long, it gets the lead
        back; 0: never.
    compression: of what this node sends to the nodes that follow it, if they understand it.
    """

    cluster: str
    node: str
    fd: int
    founds: bool
    replicas: Annotated[int, Meta(ge=1)] = 1
    min_in_sync: Annotated[int, Meta(ge=0)] = 0
    replica_lag_s: Annotated[float, Meta(gt=0)] = 5.0
    give_back_after_s: Annotated[float, Meta(ge=0)] = 0
    compression: Literal["none", "lz4", "zstd"] = "none"
    keys: Keys
    etcd: EtcdSettings


class ShardConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    data_dir: str
    runtime_dir: str
    shard: Annotated[int, Meta(ge=0)]
    # Small enough to stay in the cache while a segment is written, emptied and written again.
    segment_bytes: Annotated[int, Meta(ge=4096, le=256 << 20)] = 3 << 20
    durability: Literal["fsync", "page-cache"] = "fsync"
    disk_free_min_bytes: Annotated[int, Meta(ge=0)] = 256 << 20
    disk_free_warn_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    disk_stall_s: Annotated[float, Meta(gt=0)] = 10.0
    consumer_timeout_ms: Annotated[int, Meta(ge=0)] = 0
    consumer_timeout_action: Literal["requeue", "close"] = "requeue"
    spin_us: Annotated[int, Meta(ge=0, le=1000)] = 0
    producer_idle_s: Annotated[float, Meta(gt=0)] = 604800.0
    log_level: str = "info"
    log_format: str = "auto"
    # In a cluster: the TCP socket at which peers on other nodes are let in, and the keys they have.
    session_fd: int = -1
    session_keys: SessionKeys | None = None
    # None: no other node has copies of this shard.
    copies: CopiesConfig | None = None


def read(text: str) -> ShardConfig:
    """Return the settings in this JSON.

    Raises msgspec.ValidationError with the path of the wrong value.
    """
    return msgspec.json.decode(text, type=ShardConfig)
