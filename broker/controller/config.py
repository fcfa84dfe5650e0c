"""The controller's settings: one JSON argument from the supervisor, checked once, then read only."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shardmq.broker.model.passwords import FOR_NEW
from shardmq.broker.shared.config import Tls

SHARDS_MAX = 64
DOORS_MAX = 1024

Count = Annotated[int, msgspec.Meta(ge=1)]


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the ports of HTTP and of metrics together. `deploy/broker.toml` says what each is for."""

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


class ControllerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """`boot` names one life of the broker: what is not durable outlives a restart of the controller within it.

    `http_fds`, `https_fds` and `metrics_fds` are listening sockets the supervisor opened. Keys of other processes are
    passed over.
    """

    data_dir: str
    runtime_dir: str
    boot: str
    shards: Annotated[int, msgspec.Meta(ge=1, le=SHARDS_MAX)]
    doors: Annotated[int, msgspec.Meta(ge=1, le=DOORS_MAX)] = 1
    http_fds: list[int] = []
    metrics_fds: list[int] = []
    https_fds: list[int] = []
    tls: Tls | None = None
    http_address: str = ""
    http: HttpLimits = HttpLimits()
    default_user: str = "guest"
    default_pass: str = "guest"
    hashing: Literal["scrypt", "sha256", "sha512"] = "scrypt"  # of new passwords
    default_vhost: str = "/"
    loopback_users: list[str] = msgspec.field(default_factory=lambda: ["guest"])
    channel_max_per_node: Annotated[int, msgspec.Meta(ge=0)] = (
        0  # over all front doors; 0: no limit
    )
    load_definitions: str = ""  # a file of RabbitMQ's JSON, taken in at each start
    http_hosts: list[
        str
    ] = []  # names by which alone the API is called, beside those of this machine; none: any
    listen_names: list[str] = []  # addresses and names that are listened at: names of this machine
    http_without_tls: bool = False  # passwords from other hosts by plain HTTP
    connections_max: int = 0  # open at once, over all front doors; 0: no limit
    memory_high_watermark: float = (
        0.0  # of this machine's memory, or our control group's; 0: no alarm
    )
    memory_high_watermark_bytes: int = 0  # if not 0, this instead
    log_level: str = "info"
    log_format: str = "auto"

    @property
    def hashing_algorithm(self) -> str:
        """The algorithm of new passwords, by the name that users and definitions carry."""
        return FOR_NEW[self.hashing]


def read_config(text: str | bytes) -> ControllerConfig:
    """Raises msgspec.ValidationError with the key's path."""
    return msgspec.json.decode(text, type=ControllerConfig)
