"""Shovels: the check of the runtime parameter `shovel`, and what its value means.

The names, the defaults and the texts of faults are those of RabbitMQ's plugin rabbitmq_shovel. A
destination may also be `http://` or `https://`, as in LavinMQ. One row of `KEYS` is one key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from shardmq.broker.model import amqp_uri
from shardmq.broker.model import parameter_keys as keys
from shardmq.broker.model.encrypted import NO_KEY, is_encrypted
from shardmq.broker.model.erlang import cut
from shardmq.broker.model.erlang import json_term as term
from shardmq.broker.model.parameter_keys import Key
from shardmq.broker.model.values import NAME_BYTES_MAX

SHOVEL: Final = "shovel"
# The component of parameters for shovels that are paused; the value is true.
PAUSED: Final = "shovel-paused"
ACK_MODES: Final = ("no-ack", "on-publish", "on-confirm")
PROTOCOLS: Final = ("amqp10", "amqp091", "local")
AMQP10: Final = "amqp10"
NEVER, QUEUE_LENGTH = "never", "queue-length"
PREFETCH: Final = 1000
RECONNECT_DELAY_S: Final = 5.0
HTTP_SCHEMES: Final = ("http", "https")
MESSAGES_MAX: Final = (1 << 63) - 1
# Properties of a message that `dest-publish-properties` sets, with the type of each.
PROPERTIES: Final[Mapping[str, type]] = {
    "content_type": str, "content_encoding": str, "headers": dict, "delivery_mode": int,
    "priority": int, "correlation_id": str, "reply_to": str, "expiration": str, "message_id": str,
    "timestamp": int, "type": str, "user_id": str, "app_id": str, "cluster_id": str,
}  # fmt: skip
_INTEGERS_MAX: Final = {"delivery_mode": 255, "priority": 255, "timestamp": MESSAGES_MAX}


def _delete_after(name: str, value: Any) -> str:
    if value in (NEVER, QUEUE_LENGTH):
        return ""
    if type(value) is int and 0 <= value <= MESSAGES_MAX:
        return ""
    return f'{name} should be number, "never" or "queue-length", actually was {term(value)}'


def _properties(name: str, value: Any) -> str:
    if fault := keys.table(name, value):
        return fault
    for key, item in value.items() if isinstance(value, dict) else ():
        kind = PROPERTIES.get(key)
        if kind is None:
            return f"unrecognised property {cut(key, NAME_BYTES_MAX)} in {name}"
        if type(item) is not kind:
            return f"{key} in {name} has a wrong type, actually was {term(item)}"
        if kind is str and (fault := keys.text(key, item)):
            return fault
        if isinstance(item, int) and not 0 <= item <= _INTEGERS_MAX[key]:
            return f"{key} in {name} should be from 0 to {_INTEGERS_MAX[key]}"
    return ""


def _dest_uris(name: str, value: Any) -> str:
    uris = value if isinstance(value, list) else [value]
    if not any(is_http(uri) for uri in uris):
        return keys.uris(name, value)
    if len(uris) > keys.URIS_MAX or not all(is_http(uri) or is_encrypted(uri) for uri in uris):
        return f"{name} should have at most {keys.URIS_MAX} URIs, all of HTTP or all of AMQP"
    for uri in filter(is_http, uris):
        try:
            parts = urlsplit(uri)
            fits = bool(parts.hostname) and (parts.port or 0) >= 0 and uri.isprintable()
        except ValueError:
            fits = False
        if not fits or len(uri) > amqp_uri.URI_CHARS_MAX:
            shown = cut(amqp_uri.without_credentials(uri), NAME_BYTES_MAX)
            return f'"{shown}" not a valid URI: it has no host, or a wrong port'
    return ""


def is_http(uri: Any) -> bool:
    return isinstance(uri, str) and uri.lower().startswith(("http://", "https://"))


_SOURCE: Final = {
    "src-uri": Key(keys.uris, is_needed=True, is_secret=True),
    "src-exchange": Key(keys.filled),
    "src-exchange-key": Key(keys.text),
    "src-queue": Key(keys.filled),
    "src-queue-args": Key(keys.table),
    "src-consumer-args": Key(keys.table),
    "src-prefetch-count": Key(keys.prefetch, "prefetch-count"),
    "src-delete-after": Key(_delete_after, "delete-after"),
    "src-predeclared": Key(keys.flag),
}
_DESTINATION: Final = {
    "dest-uri": Key(_dest_uris, is_needed=True, is_secret=True),
    "dest-exchange": Key(keys.text),
    "dest-exchange-key": Key(keys.text),
    "dest-queue": Key(keys.filled),
    "dest-queue-args": Key(keys.table),
    "dest-address": Key(keys.text),
    "dest-add-forward-headers": Key(keys.flag, "add-forward-headers"),
    "dest-add-timestamp-header": Key(keys.flag, "add-timestamp-header"),
    "dest-publish-properties": Key(_properties, "publish-properties"),
    "dest-predeclared": Key(keys.flag),
}
_ANY: Final = {
    "internal": Key(keys.flag),
    "internal_owner": Key(keys.table),
    "reconnect-delay": Key(keys.delay),
    "ack-mode": Key(keys.one_of(*ACK_MODES)),
    "src-protocol": Key(keys.one_of(*PROTOCOLS)),
    "dest-protocol": Key(keys.one_of(*PROTOCOLS)),
    # LavinMQ's page sends these two, which say what the other keys say.
    "src-type": Key(keys.text),
    "dest-type": Key(keys.text),
}
KEYS: Final[Mapping[str, Key]] = {**_ANY, **_SOURCE, **_DESTINATION}
# The names that a key may have, the newer one first.
NAMES: Final = {name: (name, key.older) if key.older else (name,) for name, key in KEYS.items()}


def faults(name: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with the value of the parameter `name`, in RabbitMQ's words."""
    if not isinstance(value, dict):
        yield f"{name} should be a table, actually was {term(value)}"
        return
    if is_amqp10(value):
        return  # kept without effect; the keys of AMQP 1.0 are not looked at
    queues = [key in value for key in ("src-exchange", "src-queue")]
    if not any(queues):
        yield "Must specify 'src-exchange' or 'src-queue'"
    if all(queues):
        yield "Cannot specify 'src-exchange' and 'src-queue'"
    after = value.get("src-delete-after", value.get("delete-after"))
    if type(after) is int and value.get("ack-mode") == "no-ack":
        yield "Cannot specify 'no-ack' and numerical 'delete-after'"
    if "dest-exchange" in value and "dest-queue" in value:
        yield "Cannot specify 'dest-exchange' and 'dest-queue'"
    yield from keys.faults(name, value, KEYS)


class Shovel(msgspec.Struct, frozen=True, kw_only=True, tag="shovel"):
    """A shovel, as its parameter describes it.

    src_queue: "" if the source is an exchange.
    dest_exchange, dest_key: None leaves those of each message.
    delete_after: -1 for never, -2 for the length of the queue at the start, else so many messages.
    """

    vhost: str
    name: str
    src_uris: list[str]
    src_queue: str = ""
    src_exchange: str = ""
    src_exchange_key: str = ""
    src_queue_args: dict[str, Any] = {}
    src_consumer_args: dict[str, Any] = {}
    src_predeclared: bool = False
    prefetch: int = PREFETCH
    delete_after: int = -1
    dest_uris: list[str] = []
    dest_queue: str = ""
    dest_exchange: str | None = None
    dest_key: str | None = None
    dest_queue_args: dict[str, Any] = {}
    dest_address: str = ""
    dest_predeclared: bool = False
    forward_headers: bool = False
    timestamp_header: bool = False
    properties: dict[str, Any] = {}
    ack_mode: str = "on-confirm"
    reconnect_delay_s: float = RECONNECT_DELAY_S

    @property
    def is_http(self) -> bool:
        return bool(self.dest_uris) and is_http(self.dest_uris[0])


WHOLE_QUEUE: Final = -2


NO_AMQP10: Final = "AMQP 1.0 is not spoken here"


def is_amqp10(value: Any) -> bool:
    ends = ("src-protocol", "dest-protocol")
    return isinstance(value, dict) and any(value.get(end) == AMQP10 for end in ends)


def obstacle(name: str, value: Any) -> str:
    """Return why a parameter that is there does not run, "" if it does.

    A parameter may have been stored when nothing checked it.
    """
    if is_amqp10(value):
        return NO_AMQP10
    if fault := next(faults(name, value), ""):
        return fault
    uris = [value["src-uri"], value["dest-uri"]]
    texts = (text for given in uris for text in (given if isinstance(given, list) else [given]))
    return NO_KEY if any(map(is_encrypted, texts)) else ""


def read(vhost: str, name: str, value: Mapping[str, Any]) -> Shovel:
    """Return what a value without an obstacle means."""

    def given(key: str, otherwise: Any) -> Any:
        return next((value[each] for each in NAMES[key] if each in value), otherwise)

    def uris(key: str) -> list[str]:
        return value[key] if isinstance(value[key], list) else [value[key]]

    def table(key: str) -> dict[str, Any]:
        return given(key, {}) or {}

    queue = value.get("dest-queue")
    after = given("src-delete-after", NEVER)
    return Shovel(
        vhost=vhost,
        name=name,
        src_uris=uris("src-uri"),
        src_queue=given("src-queue", ""),
        src_exchange=given("src-exchange", ""),
        src_exchange_key=given("src-exchange-key", ""),
        src_queue_args=table("src-queue-args"),
        src_consumer_args=table("src-consumer-args"),
        src_predeclared=given("src-predeclared", False),
        prefetch=int(given("src-prefetch-count", PREFETCH)),
        delete_after={NEVER: -1, QUEUE_LENGTH: WHOLE_QUEUE}.get(after, after),
        dest_uris=uris("dest-uri"),
        dest_queue=queue or "",
        dest_exchange=given("dest-exchange", None) if queue is None else "",
        dest_key=given("dest-exchange-key", None) if queue is None else queue,
        dest_queue_args=table("dest-queue-args"),
        dest_address=given("dest-address", ""),
        dest_predeclared=given("dest-predeclared", False),
        forward_headers=given("dest-add-forward-headers", False),
        timestamp_header=given("dest-add-timestamp-header", False),
        properties=table("dest-publish-properties"),
        ack_mode=given("ack-mode", "on-confirm"),
        reconnect_delay_s=float(given("reconnect-delay", RECONNECT_DELAY_S)),
    )
