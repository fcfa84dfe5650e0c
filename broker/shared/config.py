"""The settings of one front door: one JSON object that the supervisor hands it at its start.

The command is `python -m shardmq.broker.front_door --config fd:N`, or the JSON itself in place of `fd:N`.

It is checked once. The supervisor reads the settings file and hands each process its own section; nothing here reads
files or the environment. A wrong key or value is a ConfigError whose text names the key.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shardmq.supervisor.notify import section

FRAME_BYTES_FLOOR = (
    8192  # clients may count on this much before they have negotiated (RabbitMQ 4.1 and later)
)
FRAME_BYTES_CEILING = 16 << 20
MESSAGE_BYTES_CEILING = 512 << 20

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ConfigError(Exception):
    """A setting that cannot be used; the text names it."""


class Sni(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Another certificate for clients that ask for `host`: a name, or *. and what follows its first label."""

    host: Annotated[str, msgspec.Meta(min_length=1)]
    cert: Annotated[str, msgspec.Meta(min_length=1)]
    key: str = ""


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Paths are of PEM files; an empty `key`: it lies in the file of `cert`."""

    cert: Annotated[str, msgspec.Meta(min_length=1)]
    key: str = ""
    ca: str = ""  # who may have signed the clients' certificates
    min_version: Literal["1.2", "1.3"] = "1.2"
    ciphers: str = ""  # OpenSSL's words, for TLS 1.2; empty: its own choice
    verify: Literal["none", "peer"] = "none"
    fail_if_no_peer_cert: bool = False
    login_from: Literal["distinguished_name", "common_name", "subject_alternative_name"] = (
        "distinguished_name"
    )
    san_type: Literal["dns", "email", "uri", "ip"] = "dns"
    san_index: Count = 0
    sni: list[Sni] = []

    def __post_init__(self) -> None:
        if self.verify == "peer" and not self.ca:
            raise ValueError("verify is peer, but there is no ca to verify by")


class BrokerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    runtime_dir: Annotated[str, msgspec.Meta(min_length=1)]
    door: Annotated[int, msgspec.Meta(ge=0, lt=0xFFFF)]  # 0xffff names the controller on the wire
    doors: Annotated[int, msgspec.Meta(ge=1)] = 1  # how many there are
    shards: Annotated[int, msgspec.Meta(ge=1, le=64)]  # the packer keeps them in a word
    listen_fds: list[Count]  # listening sockets, bound by the supervisor
    boot: Annotated[str, msgspec.Meta(min_length=1)]  # names one life of the broker
    tls_listen_fds: list[Count] = []
    tls: Tls | None = None

    heartbeat_s: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 60
    frame_bytes_max: Annotated[int, msgspec.Meta(ge=FRAME_BYTES_FLOOR, le=FRAME_BYTES_CEILING)] = (
        131072
    )
    channels_max: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 2047
    channel_consumers_max: Count = 0  # 0: no limit
    channel_max_per_node: Count = 0  # over all front doors, which the controller knows; 0: no limit
    message_bytes_max: Annotated[int, msgspec.Meta(ge=1, le=MESSAGE_BYTES_CEILING)] = 128 << 20
    set_timestamp: bool = False  # of a message that came without one: when it came
    handshake_timeout_s: Seconds = 10
    connections_max: Count = 0  # of this door; 0: no limit but that of open files
    connections_are_limited: bool = False  # over all doors: the controller is asked
    proxy_protocol_from: list[str] = []  # networks whose connections may begin with a PROXY header

    # How long small reads may pile up while there are many of them; never applied when idle.
    tick_us: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 300

    loopback_users: frozenset[str] = frozenset(
        {"guest"}
    )  # may log in from this host only: their password is known to everybody
    log_level: Annotated[str, msgspec.Meta(pattern="(?i)^(debug|info|warning|error|critical)$")] = (
        "info"
    )
    log_format: str = "auto"


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
    except (
        msgspec.DecodeError,
        ValueError,
    ) as error:  # ValidationError too: its text ends with the path of the key
        raise ConfigError(f"front door: {error}") from None
