"""The settings of one front door: one JSON object that the supervisor hands it at its start.

The command is `python -m shardmq.broker.front_door --config fd:N`, or the JSON itself in place of
`fd:N`. The settings are checked once. The supervisor reads the settings file and hands each process
its own section; nothing here reads files or the environment. A wrong key or value is a ConfigError
whose text names the key.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shardmq.shardd.wire.session import SessionKeys
from shardmq.supervisor.notify import section

# Clients may count on this much before they have negotiated (RabbitMQ 4.1 and later).
FRAME_BYTES_FLOOR = 8192
FRAME_BYTES_CEILING = 16 << 20
MESSAGE_BYTES_CEILING = 512 << 20

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ConfigError(Exception):
    """A setting cannot be used; the text names it."""


class Sni(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Another certificate for clients that ask for `host`.

    `host` is a name, or *. and what follows the first label of a name.
    """

    host: Annotated[str, msgspec.Meta(min_length=1)]
    cert: Annotated[str, msgspec.Meta(min_length=1)]
    key: str = ""


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The TLS settings of a listener. Paths are of PEM files.

    - An empty `key` lies in the file of `cert`.
    - `ca`: certificates that may have signed those of clients.
    - `ciphers`: OpenSSL's words, for TLS 1.2; an empty text leaves the choice to OpenSSL.
    """

    cert: Annotated[str, msgspec.Meta(min_length=1)]
    key: str = ""
    ca: str = ""
    min_version: Literal["1.2", "1.3"] = "1.2"
    ciphers: str = ""
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
    """The settings of one front door.

    - `door` is its number and `doors` how many there are on this node.
    - `shards` are the numbers of the shards of this node.
    - `session_keys` are those by which the shards of other nodes are reached; None: there are no
      other nodes.
    - `node_timeout_s`: other nodes take over the shards of one that is gone after so long.
    - `boot` names one life of the broker.
    - `listen_fds` and `tls_listen_fds` are sockets that the supervisor has bound. `backlog` is how
      many connections may wait at each until they are accepted.
    - `channel_consumers_max`, `channel_max_per_node` and `connections_max`: 0 means no limit. The
      second one counts the channels of all front doors, which the controller knows.
    - `set_timestamp`: a message without a timestamp gets the time when it came.
    - `connections_are_limited`: there is a limit over all front doors, so the controller is asked.
    - `bodies_bytes`: the memory from which large bodies are lent to the shards; 0: they are copied.
    - `proxy_protocol_from`: networks whose connections may begin with a PROXY header.
    - `tick_us`: how long small reads may pile up while there are many of them; not used when idle.
    - `spin_us`: how long to look at rings and sockets again before sleeping.
    - `tracing_ratio`: the part of the messages without a trace context that begin a trace; None: no
      spans are made.
    - `loopback_users` may log in from this host only: their password is known to everybody.
    """

    runtime_dir: Annotated[str, msgspec.Meta(min_length=1)]
    door: Annotated[int, msgspec.Meta(ge=0, lt=0xFFFF)]  # 0xffff names the controller on the wire
    doors: Annotated[int, msgspec.Meta(ge=1)] = 1
    shards: list[Annotated[int, msgspec.Meta(ge=0, lt=64)]]
    listen_fds: list[Count]
    boot: Annotated[str, msgspec.Meta(min_length=1)]
    tls_listen_fds: list[Count] = []
    backlog: Count = 4096
    tls: Tls | None = None

    heartbeat_s: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 60
    frame_bytes_max: Annotated[int, msgspec.Meta(ge=FRAME_BYTES_FLOOR, le=FRAME_BYTES_CEILING)] = (
        131072
    )
    channels_max: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 2047
    channel_consumers_max: Count = 0
    channel_max_per_node: Count = 0
    message_bytes_max: Annotated[int, msgspec.Meta(ge=1, le=MESSAGE_BYTES_CEILING)] = 128 << 20
    set_timestamp: bool = False
    handshake_timeout_s: Seconds = 10
    connections_max: Count = 0
    connections_are_limited: bool = False
    proxy_protocol_from: list[str] = []
    bodies_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 36)] = 0

    tick_us: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 300
    spin_us: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0

    tracing_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None

    session_keys: SessionKeys | None = None
    node_timeout_s: Seconds = 6

    loopback_users: frozenset[str] = frozenset({"guest"})
    log_level: Annotated[str, msgspec.Meta(pattern="(?i)^(debug|info|warning|error|critical)$")] = (
        "info"
    )
    log_format: str = "auto"

    @property
    def is_alone(self) -> bool:
        """Return whether there is no other front door, here or on another node."""
        return self.doors == 1 and self.session_keys is None


def read_config(arguments: list[str]) -> BrokerConfig:
    """Return the settings of a command line: `--config JSON` or `--config=JSON`.

    Raises ConfigError.
    """
    match arguments:
        case ["--config", text]:
            pass
        case [argument] if argument.startswith("--config="):
            text = argument.removeprefix("--config=")
        case _:
            raise ConfigError("expected --config JSON")
    try:
        return msgspec.json.decode(section(text).encode(), type=BrokerConfig)
    except (msgspec.DecodeError, ValueError) as error:
        # A ValidationError too, whose text ends with the path of the key.
        raise ConfigError(f"front door: {error}") from None
