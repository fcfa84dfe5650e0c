"""The settings of the controller: one JSON argument from the supervisor, checked once."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shardmq.broker.model.passwords import FOR_NEW
from shardmq.broker.shared.config import Tls
from shardmq.cluster.records import DOORS_PER_NODE, SHARDS_MAX
from shardmq.cluster.secret import Keys
from shardmq.cluster.settings import EtcdSettings
from shardmq.shardd.wire.session import SessionKeys

Count = Annotated[int, msgspec.Meta(ge=1)]


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the ports of HTTP and of metrics together; `deploy/broker.toml` explains them."""

    connections_max: Count = 1000
    connections_per_address_max: Count = 400
    handshakes_max: Count = 256
    handshakes_per_address_max: Count = 64
    answers_max: Count = 256
    answers_per_address_max: Count = 128
    made_max: Count = 8
    answer_bytes_max: Count = 64 << 20
    answer_bytes_per_address_max: Count = 32 << 20
    unread_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    answer_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0


class Secrets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys that encrypt the secrets of parameters; `deploy/SECURITY.md` explains the settings.

    key_file: "" if nothing is encrypted.
    encrypt: false to decrypt what is encrypted, and to write it so from now on.
    """

    key_file: str = ""
    encrypt: bool = True


class Tracing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way of spans to a collector; `deploy/TRACING.md` explains the settings."""

    endpoint: str = ""
    headers: str = ""
    service_name: str = ""


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cluster that this node is of.

    node: the name of this node, which has the number `number`.
    fd: the socket at which the other nodes reach this controller, at `host` and `port`.
    node_timeout_s: other nodes take over from one that is gone after so many seconds.
    replica_lag_s: a node that does not answer the leader for so long is waited for no longer.
    release: the version of the program, for people.
    replicas, min_in_sync: those of the shards that are in no set, as the settings of this node say.
    founds: this node may begin to lead a cluster that nobody has led, with the definitions it has.
    """

    name: str
    node: str
    number: int
    fd: int
    host: str
    port: int
    keys: Keys
    etcd: EtcdSettings
    node_timeout_s: float = 6.0
    replica_lag_s: float = 5.0
    release: str = ""
    replicas: int = 1
    min_in_sync: int = 0
    founds: bool = True


class ControllerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The settings; keys of other processes are ignored.

    boot: names one life of the broker, in which the controller may restart and keeps what is not
        durable.
    http_fds, https_fds, metrics_fds: listening sockets that the supervisor opened.
    hashing: the algorithm of new passwords.
    channel_max_per_node, connections_max: over all front doors; 0 for no limit.
    load_definitions: a file of RabbitMQ's JSON, taken in at each start.
    http_hosts: names that callers of the API may use besides those of this machine; [] for any.
    listen_names: addresses and names that the broker listens at, which count as this machine's.
    http_without_tls: whether passwords may come from other hosts by plain HTTP.
    memory_high_watermark: a part of the memory of this machine or control group; 0: no alarm.
    memory_high_watermark_bytes: used instead if it is not 0.
    tracing: where the spans of front doors go; None: they make none.
    first_door: the number of the first of `doors` front doors.
    cluster: None: this host is the whole broker.
    own_shards: the shards of this node; None: all.
    session_keys: the keys by which shards of other nodes are reached; None: there are no others.
    term: the term in which this controller leads a cluster.
    streams_from_followers: rows of streams are read at nodes that have copies of their shards.
    """

    data_dir: str
    runtime_dir: str
    boot: str
    shards: Annotated[int, msgspec.Meta(ge=1, le=SHARDS_MAX)]
    doors: Annotated[int, msgspec.Meta(ge=1, le=DOORS_PER_NODE)] = 1
    first_door: int = 0
    http_fds: list[int] = []
    metrics_fds: list[int] = []
    https_fds: list[int] = []
    tls: Tls | None = None
    http_address: str = ""
    http: HttpLimits = HttpLimits()
    default_user: str = "guest"
    default_pass: str = "guest"
    hashing: Literal["scrypt", "sha256", "sha512"] = "scrypt"
    default_vhost: str = "/"
    loopback_users: list[str] = msgspec.field(default_factory=lambda: ["guest"])
    channel_max_per_node: Annotated[int, msgspec.Meta(ge=0)] = 0
    load_definitions: str = ""
    http_hosts: list[str] = []
    listen_names: list[str] = []
    http_without_tls: bool = False
    connections_max: int = 0
    memory_high_watermark: float = 0.0
    memory_high_watermark_bytes: int = 0
    tracing: Tracing | None = None
    secrets: Secrets = Secrets()
    cluster: Cluster | None = None
    own_shards: list[int] | None = None
    session_keys: SessionKeys | None = None
    streams_from_followers: bool = False
    term: int = 0
    log_level: str = "info"
    log_format: str = "auto"

    @property
    def hashing_algorithm(self) -> str:
        """The algorithm of new passwords, by the name that users and definitions carry."""
        return FOR_NEW[self.hashing]


def read_config(text: str | bytes) -> ControllerConfig:
    """Decode the settings. Raises msgspec.ValidationError with the path of the wrong key."""
    return msgspec.json.decode(text, type=ControllerConfig)
