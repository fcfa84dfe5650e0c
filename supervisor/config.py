"""The table of all settings: their keys, types, bounds and defaults, and the check of given values.

`deploy/broker.toml` documents every key. `sources.py` reads the file, the environment and the
flags; all of them take their keys from this table. A wrong key or value raises ConfigError, and the
text of the error begins with the path of the key. `plan.py` cuts the section of each child out of
these settings, and each child checks its section again.
"""

from __future__ import annotations

import functools
import importlib.util
import ipaddress
import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct, inspect

from shardmq.cluster.compression import EXTRA, PLAIN, is_there
from shardmq.cluster.records import CLUSTER_NAME, DOORS_PER_NODE, SHARDS_MAX
from shardmq.cluster.replicas import shard_set
from shardmq.supervisor.nearest import did_you_mean

# The nodes that are to have the messages of a shard, if no setting says so.
REPLICAS: Final = 3
# The flags of a start that win over the settings file: the key and the help.
FLAGS: Final[dict[str, tuple[str, str]]] = {
    "--data-dir": ("data_dir", "Directory of messages and definitions."),
    "--runtime-dir": ("runtime_dir", "Directory of the sockets between the processes."),
    "--bind": ("listen.bind", "Addresses to listen at, separated by commas; * is all."),
    "--amqp-port": ("listen.amqp_port", "0: any free one."),
    "--http-port": ("listen.http_port", "0: any free one."),
    "--metrics-port": ("listen.metrics_port", "0: any free one."),
    "--amqps-port": ("listen.amqps_port", "With a certificate. 0: any free one."),
    "--https-port": ("listen.https_port", "With a certificate. 0: any free one."),
    "--tls-cert": ("tls.cert", "Certificate chain, PEM. It opens the ports for TLS."),
    "--tls-key": ("tls.key", "Key of the certificate, PEM, unless the same file holds both."),
    "--tls-ca": ("tls.ca", "Certificates that may sign those of clients, PEM."),
    "--tls-verify": ("tls.verify", "none or peer: ask clients for certificates."),
    "--shards": ("shards.count", "A number, or auto: one for each core."),
    "--front-doors": ("front_doors.count", "Processes that speak AMQP; 0: those of the shards."),
    "--durability": ("shards.durability", "fsync or page-cache."),
    "--load-definitions": ("load_definitions", "JSON file, loaded at each start."),
    "--cluster-name": ("cluster.name", "The cluster that this host is a node of."),
    "--etcd": ("cluster.etcd", "Endpoints of etcd, separated by commas."),
    "--secret": ("cluster.secret", "The secret of the cluster. A variable or a file hides it."),
    "--node": ("cluster.node", "The name of this node. Empty: that of the host."),
    "--address": ("cluster.address", "Where the other nodes reach this one. Empty: it is found."),
    "--log-level": ("log_level", "debug, info, warning or error."),
    "--log-format": ("log_format", "auto, text, json or journal."),
}

Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Text = Annotated[str, Meta(min_length=1)]
LogLevel = Literal["debug", "info", "warning", "error"]
Addresses = Text | list[Text]


# Settings with `from_file` can be given by the name of a file that holds the value. The value of a
# setting with `secret` is never shown.
Name = Annotated[str, Meta(min_length=1, extra={"from_file": True})]
Secret = Annotated[str, Meta(min_length=1, extra={"from_file": True, "secret": True})]


class ConfigError(Exception):
    """A setting cannot be used. The text names the setting and says why.

    Args:
        text: The text, which begins with the path of the key.
        key: The path of the key alone. It is empty if the error is that of no key.
    """

    def __init__(self, text: str, key: str = "") -> None:
        super().__init__(text)
        self.key = key


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
    tracing: Tracing = msgspec.field(default_factory=lambda: Tracing())
    users: Users = msgspec.field(default_factory=lambda: Users())
    secrets: Secrets = msgspec.field(default_factory=lambda: Secrets())
    cluster: Cluster = msgspec.field(default_factory=lambda: Cluster())
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
            try:
                ipaddress.ip_network(text)
            except ValueError as error:
                raise ValueError(f"proxy_protocol_from: {error}") from None


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
    count: Annotated[int, Meta(ge=0, le=DOORS_PER_NODE)] = 1
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
    from_followers: bool = False  # in a cluster: rows are read where copies are


class Tracing(Struct, frozen=True, forbid_unknown_fields=True):
    """The spans that the broker sends to an OpenTelemetry collector.

    Empty texts leave the choice to OpenTelemetry's own variables, such as
    `OTEL_EXPORTER_OTLP_ENDPOINT`.
    """

    enabled: bool = False
    endpoint: str = ""
    headers: Annotated[str, Meta(extra={"from_file": True, "secret": True})] = ""
    # The part of the messages without a trace context that begin a trace.
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.0
    service_name: str = ""

    def __post_init__(self) -> None:
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError("endpoint must begin with http:// or https://")
        if self.enabled and not _has_module("opentelemetry.exporter.otlp.proto.http"):
            raise ValueError(
                "enabled, but OpenTelemetry is not installed where the broker runs: "
                "pip install 'shardmq[tracing]'"
            )


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


class Users(Struct, frozen=True, forbid_unknown_fields=True):
    """The first user, and how passwords are stored."""

    default_user: Name = "guest"
    default_pass: Secret = "guest"
    hashing: Literal["scrypt", "sha256", "sha512"] = "scrypt"
    http_without_tls: bool = False


class Secrets(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys that encrypt passwords in URIs of shovels and upstreams. The controller reads them.

    With an empty `key_file` nothing is encrypted.
    """

    key_file: str = ""
    encrypt: bool = True  # false: with the keys, all is decrypted at the next start


class Cluster(Struct, frozen=True, forbid_unknown_fields=True):
    """The cluster that this host is a node of. With an empty name this host is the whole broker."""

    name: str = ""
    etcd: Text | list[Text] = "http://127.0.0.1:2379"
    etcd_user: str = ""
    etcd_password: Annotated[str, Meta(extra={"from_file": True, "secret": True})] = ""
    etcd_ca: str = ""
    etcd_cert: str = ""
    etcd_key: str = ""
    secret: Annotated[str, Meta(extra={"from_file": True, "secret": True})] = ""
    node: Annotated[str, Meta(max_length=255)] = ""
    address: str = ""
    # That of the controller. The shards have the ports behind it. 0: any free ones.
    port: Annotated[int, Meta(ge=0, le=65535 - SHARDS_MAX)] = 25672
    node_timeout_s: Annotated[int, Meta(ge=2, le=600)] = 6
    # A node with copies that does not answer for so long is waited for no longer.
    replica_lag_s: Annotated[float, Meta(ge=1, le=10)] = 5.0
    replicas: Annotated[int, Meta(ge=0, le=7)] = 0  # 0: 3, if the other settings allow copies
    min_in_sync: Annotated[int, Meta(ge=0, le=7)] = 0  # 0: half of the copies, rounded up
    # Of the shards that this node makes, those with other numbers: SHARDS:REPLICAS/MIN_IN_SYNC.
    shard_sets: Text | list[Text] = []
    # A node that is back leads its shards again when it has been in sync for so long. 0: never.
    give_back_after_s: Annotated[float, Meta(ge=0, le=86400)] = 60.0
    # Another node takes the copies of one that has been away for so long. 0: never.
    replace_after_s: Annotated[float, Meta(ge=0, le=30 * 86400)] = 3600.0
    # Of what leaders send to the nodes with copies of their shards.
    compression: Literal["none", "lz4", "zstd"] = "none"

    def __post_init__(self) -> None:
        if self.min_in_sync > (self.replicas or REPLICAS):
            raise ValueError("min_in_sync: it is more than replicas")
        try:
            for each in self.sets_of_shards:
                shard_set(each)
        except ValueError as error:
            raise ValueError(f"shard_sets: {error}") from None
        if not self.name:
            return
        if not CLUSTER_NAME.fullmatch(self.name):
            raise ValueError("name: expected 1 to 64 letters, digits, '.', '-' and '_'")
        if not self.secret:
            raise ValueError(
                "secret: it must be set, because the nodes of a cluster know each other by it"
            )
        if self.compression != PLAIN and not is_there(self.compression):
            raise ValueError(
                f"compression: {self.compression} is not installed where the broker runs: "
                f"pip install '{EXTRA}'"
            )
        if self.etcd_key and not self.etcd_cert:
            raise ValueError("etcd_key: it is of no use without etcd_cert")
        if self.etcd_password and not self.etcd_user:
            raise ValueError("etcd_password: it is of no use without etcd_user")

    @property
    def sets_of_shards(self) -> list[str]:
        """The texts of `shard_sets`."""
        return [self.shard_sets] if isinstance(self.shard_sets, str) else self.shard_sets

    @property
    def endpoints(self) -> list[str]:
        """The endpoints of etcd as URLs."""
        given = [self.etcd] if isinstance(self.etcd, str) else self.etcd
        return [each if "://" in each else f"http://{each}" for each in given]


class Supervision(Struct, frozen=True, forbid_unknown_fields=True):
    """The timeouts and the number of deaths after which the supervisor gives up."""

    drain_timeout_s: Seconds = 30
    start_timeout_s: Seconds = 300
    watchdog_s: Seconds = 30
    deaths_max: Annotated[int, Meta(ge=1, le=1000)] = 10
    deaths_within_s: Seconds = 60


class Kind(Struct, frozen=True):
    """The type of the value of a setting, as msgspec describes it, and the marks of the setting."""

    value: inspect.Type
    from_file: bool = False
    secret: bool = False

    @property
    def types(self) -> tuple[inspect.Type, ...]:
        """The types that the value may have; more than one if the setting is a union."""
        return self.value.types if isinstance(self.value, inspect.UnionType) else (self.value,)

    def has(self, *types: type[inspect.Type]) -> bool:
        """Return whether the value may be one of these types."""
        return any(isinstance(each, types) for each in self.types)


@functools.cache
def kinds() -> dict[str, Kind]:
    """Return the kind of each setting by the path of its key, such as `listen.amqp_port`."""
    found: dict[str, Kind] = {}
    settings = inspect.type_info(Settings)
    assert isinstance(settings, inspect.StructType)
    for field in settings.fields:
        if isinstance(field.type, inspect.StructType):
            for inner in field.type.fields:
                found[f"{field.name}.{inner.name}"] = _kind(inner.type)
        else:
            found[field.name] = _kind(field.type)
    return found


def _kind(found: inspect.Type) -> Kind:
    if isinstance(found, inspect.Metadata):
        return Kind(found.type, **(found.extra or {}))
    return Kind(found)


def checked(document: dict[str, Any]) -> Settings:
    """Complete settings with their defaults and check them.

    Args:
        document: The tables of a settings file.

    Raises:
        ConfigError: A key or a value is wrong. The text says which values are allowed.
    """
    try:
        return msgspec.convert(document, Settings)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        raise _explained(what, where.rstrip("`").lstrip("."), document) from None


def _explained(what: str, path: str, document: dict[str, Any]) -> ConfigError:
    """Return the error for what msgspec says of the value at a path."""
    if what.startswith("Object contains unknown field "):
        name = what.removeprefix("Object contains unknown field ").strip("`")
        key = f"{path}.{name}" if path else name
        return ConfigError(f"{key}: there is no such key{did_you_mean(key, _near(key))}", key)
    field, _, reason = what.partition(": ")
    if (key := f"{path}.{field}") in kinds():  # The check of a table has named the key.
        return ConfigError(f"{key}: {reason}", key)
    what = what[:1].lower() + what[1:]
    if not path:
        return ConfigError(what)
    if path in Settings.__struct_fields__ and what.startswith("expected `object`"):
        return ConfigError(f"{path}: expected a table, got {_shown(document[path])}", path)
    kind = kinds().get(path.partition("[")[0])
    if kind is None or path.startswith("tls.sni"):  # The text has the key in that table.
        return ConfigError(f"{path}: {what}", path)
    text = f"{path}: expected {_allowed(kind, of_item=path.endswith(']'))}"
    return ConfigError(
        text if kind.secret else f"{text}, got {_shown(_value(document, path))}", path
    )


def _value(document: Any, path: str) -> Any:
    for name in re.findall(r"[^.\[\]]+", path):
        document = document[int(name) if isinstance(document, list) else name]
    return document


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _allowed(kind: Kind, of_item: bool = False) -> str:
    """Return the values that a setting accepts, such as "auto or a whole number from 1 to 64".

    Args:
        kind: The kind of the setting.
        of_item: The value is an item of the list that the setting is.
    """
    types = kind.types
    if of_item:
        types = tuple(each.item_type for each in types if isinstance(each, inspect.ListType))
    in_order = sorted(types, key=lambda each: not isinstance(each, inspect.LiteralType))
    return " or ".join(dict.fromkeys(map(_described, in_order)))


def _described(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.Metadata):
        return _described(kind.type)
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(map(str, kind.values))
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        number = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        above = f" above {kind.gt}" if kind.gt is not None else ""
        if kind.ge is not None and kind.le is not None:
            return f"{number} from {kind.ge} to {kind.le}"
        least = f" of at least {kind.ge}" if kind.ge is not None else above
        return f"{number}{least}" + (f" and up to {kind.le}" if kind.le is not None else "")
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.StrType):
        return "a text that is not empty" if kind.min_length else "a text"
    assert isinstance(kind, inspect.ListType)
    return "a list of texts"


def _near(key: str) -> list[str]:
    """Return the keys and tables that somebody who writes this key may mean."""
    table, _, name = key.rpartition(".")
    if table.startswith("tls.sni["):
        return [f"{table}.{each}" for each in Sni.__struct_fields__]
    same = [each for each in kinds() if each.rpartition(".")[2] == name]
    siblings = [each for each in kinds() if each.rpartition(".")[0] == table]
    tables = [each for each in Settings.__struct_fields__ if each not in kinds()]
    return same or [*siblings, *tables, *kinds()]
