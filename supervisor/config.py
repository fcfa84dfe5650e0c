"""The settings of the broker: read from one TOML file, completed with defaults and checked.

`deploy/broker.toml` documents every key. A wrong key or value raises ConfigError, and the text of
the error begins with the path of the key. `plan.py` cuts the section of each child out of these
settings, and each child checks its section again.
"""

from __future__ import annotations

import ipaddress
import tomllib
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

SHARDS_MAX = 64
FRONT_DOORS_MAX = 256

# The flags of a start that win over the settings file: the key, the type of the value, the help.
FLAGS: Final[dict[str, tuple[str, type[int | str], str]]] = {
    "--data-dir": ("data_dir", str, "Directory of messages and definitions."),
    "--runtime-dir": ("runtime_dir", str, "Directory of the sockets between the processes."),
    "--bind": ("listen.bind", str, "Addresses to listen at, separated by commas; * is all."),
    "--amqp-port": ("listen.amqp_port", int, "0: any free one."),
    "--http-port": ("listen.http_port", int, "0: any free one."),
    "--metrics-port": ("listen.metrics_port", int, "0: any free one."),
    "--amqps-port": ("listen.amqps_port", int, "With a certificate. 0: any free one."),
    "--https-port": ("listen.https_port", int, "With a certificate. 0: any free one."),
    "--tls-cert": ("tls.cert", str, "Certificate chain, PEM. It opens the ports for TLS."),
    "--tls-key": ("tls.key", str, "Key of the certificate, PEM, unless the same file holds both."),
    "--tls-ca": ("tls.ca", str, "Certificates that may sign those of clients, PEM."),
    "--tls-verify": ("tls.verify", str, "none or peer: ask clients for certificates."),
    "--shards": ("shards.count", str, "A number, or auto: one for each core."),
    "--front-doors": (
        "front_doors.count",
        int,
        "Processes that speak AMQP; 0: those of the shards.",
    ),
    "--durability": ("shards.durability", str, "fsync or page-cache."),
    "--load-definitions": ("load_definitions", str, "JSON file, loaded at each start."),
    "--log-level": ("log_level", str, "debug, info, warning or error."),
    "--log-format": ("log_format", str, "auto, text, json or journal."),
}

Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Text = Annotated[str, Meta(min_length=1)]
LogLevel = Literal["debug", "info", "warning", "error"]
Addresses = Text | list[Text]


class ConfigError(Exception):
    """A setting cannot be used. The text names the setting and says why."""


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of a broker. A field whose type is a class here is a table of the TOML file."""

    data_dir: Text = "./data"
    runtime_dir: str = ""
    log_level: LogLevel = "info"
    log_format: Literal["auto", "text", "json", "journal"] = "auto"
    load_definitions: str = ""
    listen: Listen = msgspec.field(default_factory=lambda: Listen())
    tls: Tls = msgspec.field(default_factory=lambda: Tls())
    http: Http = msgspec.field(default_factory=lambda: Http())
    front_doors: FrontDoors = msgspec.field(default_factory=lambda: FrontDoors())
    shards: Shards = msgspec.field(default_factory=lambda: Shards())
    reader: Reader = msgspec.field(default_factory=lambda: Reader())
    memory: Memory = msgspec.field(default_factory=lambda: Memory())
    users: Users = msgspec.field(default_factory=lambda: Users())
    supervision: Supervision = msgspec.field(default_factory=lambda: Supervision())


class Listen(Struct, frozen=True, forbid_unknown_fields=True):
    """The addresses and ports at which the broker listens."""

    # Every address is open, as clients expect. The default user may log in from this host only.
    bind: Addresses = "*"
    amqp_port: Port = 5672
    http_port: Port = 15672
    metrics_port: Port = 15692
    tls_bind: str | list[Text] = ""  # The addresses for TLS. If it is empty, `bind` holds.
    # Ports for TLS are opened only if `tls.cert` is set.
    amqps_port: Port = 5671
    https_port: Port = 15671
    proxy_protocol_from: list[Text] = []
    http_hosts: list[Text] = []

    def __post_init__(self) -> None:
        for text in self.proxy_protocol_from:
            ipaddress.ip_network(text)  # The text of its ValueError says what is wrong.


class Tls(Struct, frozen=True, forbid_unknown_fields=True):
    """The certificates and the rules for logins by certificate.

    No socket listens for TLS if `cert` is empty. The processes that use the files check them.
    """

    cert: str = ""
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
    san_index: Annotated[int, Meta(ge=0)] = 0
    sni: list[Sni] = []

    def __post_init__(self) -> None:
        if self.cert and self.verify == "peer" and not self.ca:
            raise ValueError("verify is peer, but there is no ca to verify by")
        if not self.cert and (self.key or self.ca or self.sni):
            raise ValueError("there is no cert")


class Sni(Struct, frozen=True, forbid_unknown_fields=True):
    """A certificate for one host name that clients ask for."""

    host: Text
    cert: Text
    key: str = ""


class Http(Struct, frozen=True, forbid_unknown_fields=True):
    """The bounds of the HTTP API."""

    connections_max: Annotated[int, Meta(ge=1, le=100_000)] = 1000
    connections_per_address_max: Annotated[int, Meta(ge=1, le=100_000)] = 400
    handshakes_max: Annotated[int, Meta(ge=1, le=100_000)] = 256
    handshakes_per_address_max: Annotated[int, Meta(ge=1, le=100_000)] = 64
    answers_max: Annotated[int, Meta(ge=1, le=100_000)] = 256
    answers_per_address_max: Annotated[int, Meta(ge=1, le=100_000)] = 128
    made_max: Annotated[int, Meta(ge=1, le=1000)] = 8
    answer_bytes_max: Annotated[int, Meta(ge=1 << 20, le=1 << 40)] = 64 << 20
    answer_bytes_per_address_max: Annotated[int, Meta(ge=1 << 20, le=1 << 40)] = 32 << 20
    unread_timeout_s: Seconds = 10
    answer_timeout_s: Seconds = 300


class FrontDoors(Struct, frozen=True, forbid_unknown_fields=True):
    """The number of front doors and the limits of connections, channels and messages."""

    # 0: the process of each shard is a front door, too.
    count: Annotated[int, Meta(ge=0, le=FRONT_DOORS_MAX)] = 1
    heartbeat_s: Annotated[int, Meta(ge=0, le=65535)] = 60
    frame_bytes_max: Annotated[int, Meta(ge=8192, le=16 << 20)] = 131072
    channels_max: Annotated[int, Meta(ge=1, le=65535)] = 2047
    channel_consumers_max: Annotated[int, Meta(ge=0)] = 0
    channel_max_per_node: Annotated[int, Meta(ge=0)] = 0
    message_bytes_max: Annotated[int, Meta(ge=1, le=512 << 20)] = 128 << 20
    set_timestamp: bool = False
    handshake_timeout_s: Seconds = 10
    tick_us: Annotated[int, Meta(ge=0, le=100_000)] = 300
    spin_us: Annotated[int, Meta(ge=0, le=1000)] = 0
    connections_max: Annotated[int, Meta(ge=0)] = 0


class Shards(Struct, frozen=True, forbid_unknown_fields=True):
    """The number of shards, and how they store messages."""

    count: Annotated[int, Meta(ge=1, le=SHARDS_MAX)] | Literal["auto"] = "auto"
    segment_bytes: Annotated[int, Meta(ge=1 << 20, le=256 << 20)] = 3 << 20
    durability: Literal["fsync", "page-cache"] = "fsync"
    disk_free_min_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 256 << 20
    disk_free_warn_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 1 << 30
    disk_stall_s: Seconds = 10
    consumer_timeout_ms: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    consumer_timeout_action: Literal["requeue", "close"] = "requeue"
    spin_us: Annotated[int, Meta(ge=0, le=1000)] = 0
    producer_idle_s: Annotated[float, Meta(gt=0, le=365 * 86400)] = 604800


class Memory(Struct, frozen=True, forbid_unknown_fields=True):
    """The memory above which publishers are blocked. 0 bytes means that the share holds."""

    # The share of the memory of this machine or, if its limit is smaller, of the control group.
    high_watermark: Annotated[float, Meta(ge=0, le=1)] = 0.6
    high_watermark_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    # The memory of each front door for large bodies, which the shards see; 0: bodies are copied.
    bodies_bytes: Annotated[int, Meta(ge=0, le=1 << 36)] = 128 << 20


class Reader(Struct, frozen=True, forbid_unknown_fields=True):
    """The process that serves streams as Arrow. `auto` starts it if pyarrow is installed."""

    enabled: bool | Literal["auto"] = "auto"
    scans_max: Annotated[int, Meta(ge=1, le=64)] = 4
    bytes_per_s: Annotated[int, Meta(ge=0, le=1 << 40)] = 512 << 20


class Users(Struct, frozen=True, forbid_unknown_fields=True):
    """The first user, and how passwords are stored."""

    default_user: Text = "guest"
    default_pass: Text = "guest"
    hashing: Literal["scrypt", "sha256", "sha512"] = "scrypt"
    http_without_tls: bool = False


class Supervision(Struct, frozen=True, forbid_unknown_fields=True):
    """The timeouts and the number of deaths after which the supervisor gives up."""

    drain_timeout_s: Seconds = 30
    start_timeout_s: Seconds = 300
    watchdog_s: Seconds = 30
    deaths_max: Annotated[int, Meta(ge=1, le=1000)] = 10
    deaths_within_s: Seconds = 60


def read_settings(path: Path | None, overrides: dict[str, Any] | None = None) -> Settings:
    """Read the settings file and lay overrides over it.

    Args:
        path: The TOML file. None means that every setting has its default.
        overrides: Values by the path of the key, such as {"listen.amqp_port": 0}.

    Returns:
        The checked settings.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong.
    """
    document: dict[str, Any] = {}
    try:
        if path is not None:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    for key, value in (overrides or {}).items():
        table = document
        *tables, last = key.split(".")
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{name}: expected a table")
        table[last] = value
    try:
        return msgspec.convert(document, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error))) from None


def explain(text: str) -> str:
    """Return an error text of msgspec, "what - at `$.path`", with the path of the key in front."""
    what, _, where = text.partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    if what.startswith("Object contains unknown field "):
        name = what.removeprefix("Object contains unknown field ").strip("`")
        return f"{path + '.' if path else ''}{name}: there is no such key"
    if what.startswith("Invalid enum value ") and (choices := _choices(path)):
        return f"{path}: expected {choices}, got {what.removeprefix('Invalid enum value ')}"
    what = what[:1].lower() + what[1:]
    return f"{path}: {what}" if path else what


def _choices(path: str) -> str:
    """Return the words that a key accepts, such as "auto or a number".

    The text is empty if the key does not accept a fixed set of words.
    """
    kind: Any = Settings
    for name in path.split("."):
        kind = get_type_hints(kind).get(name)
        if kind is None:
            return ""
    kinds = (
        get_args(kind) if get_origin(kind) is UnionType or get_origin(kind) is Union else (kind,)
    )
    words = [str(word) for each in kinds if get_origin(each) is Literal for word in get_args(each)]
    words += [
        {int: "a number", bool: "true or false"}[each] for each in kinds if each in (int, bool)
    ]
    return " or ".join(words)
