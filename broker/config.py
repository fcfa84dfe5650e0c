"""What one front door is told at its start: one JSON object, `python -m broker --config fd:N` (or the JSON itself).

It is checked once. The supervisor reads the settings file and hands each process its own section; nothing here reads
files or the environment. A wrong key or value is a ConfigError whose text names the key.
"""

from __future__ import annotations

import socket
from typing import Annotated

import msgspec

from supervisor.notify import section

FRAME_BYTES_FLOOR = 8192  # clients may count on this much before they have negotiated (RabbitMQ 4.1 and later)
FRAME_BYTES_CEILING = 16 << 20
MESSAGE_BYTES_CEILING = 512 << 20

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ConfigError(Exception):
    """A setting that cannot be used; the text names it."""


class BrokerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    runtime_dir: Annotated[str, msgspec.Meta(min_length=1)]
    door: Annotated[int, msgspec.Meta(ge=0, lt=0xFFFF)]  # 0xffff names the controller on the wire
    shards: Annotated[int, msgspec.Meta(ge=1, le=64)]  # the packer keeps them in a word
    listen_fds: list[Count]  # listening sockets, bound by the supervisor
    boot: Annotated[str, msgspec.Meta(min_length=1)]  # names one life of the broker

    heartbeat_s: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 60
    frame_bytes_max: Annotated[int, msgspec.Meta(ge=FRAME_BYTES_FLOOR, le=FRAME_BYTES_CEILING)] = 131072
    channels_max: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 2047
    message_bytes_max: Annotated[int, msgspec.Meta(ge=1, le=MESSAGE_BYTES_CEILING)] = 128 << 20
    handshake_timeout_s: Seconds = 10
    connections_max: Count = 0  # of this door; 0: no limit but that of open files

    # How long small reads may pile up while there are many of them; never applied when idle.
    tick_us: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 250
    # How long to wait awake for a shard's answer to a rare message; 0: never.
    awake_us: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 250

    loopback_users: frozenset[str] = frozenset(
        {"guest"}
    )  # may log in from this host only: their password is known to everybody
    cluster_name: str = ""  # shown to clients; empty: the host's name
    log_level: Annotated[str, msgspec.Meta(pattern="(?i)^(debug|info|warning|error|critical)$")] = "info"

    @property
    def shown_cluster_name(self) -> str:
        return self.cluster_name or f"shardmq@{socket.gethostname()}"


def read_config(arguments: list[str]) -> BrokerConfig:
    """The configuration from a command line: `--config JSON` or `--config=JSON`."""
    match arguments:
        case ["--config", text]:
            pass
        case [argument] if argument.startswith("--config="):
            text = argument.removeprefix("--config=")
        case _:
            raise ConfigError("expected --config JSON")
    try:
        return msgspec.json.decode(section(text).encode(), type=BrokerConfig)
    except (msgspec.DecodeError, ValueError) as error:  # ValidationError too: its text ends with the path of the key
        raise ConfigError(f"front door: {error}") from None
