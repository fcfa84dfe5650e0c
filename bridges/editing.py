"""A shovel changes properties of messages before it publishes them.

A shovel may set properties, say in the header `x-shovelled` where a message came from, and in
`x-shovelled-timestamp` when. The two headers by which a broker like this one recognises a repeated
publish are taken away from messages for such a broker: the numbers are those of the producer's
order, and a message that comes late, because it was requeued, would be taken for a repeated one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from shardmq.broker.amqp import properties
from shardmq.broker.amqp.properties import PROPERTIES, encode_properties
from shardmq.broker.model.amqp_uri import without_credentials
from shardmq.broker.model.shovels import Shovel

FORWARDED: Final = "x-shovelled"
FORWARDED_AT: Final = "x-shovelled-timestamp"
PRODUCER_HEADERS: Final = ("x-producer-id", "x-sequence")
_SEQUENCE: Final = b"\x0ax-sequence"

Edit = Callable[[bytes], bytes]


def editor(
    shovel: Shovel, src_uri: str, dest_uri: str, cluster: str, now: Callable[[], float], own: bool
) -> Edit | None:
    """Return the function that edits properties (flags and values); None if none is to be edited.

    Args:
        shovel: What is to be set.
        src_uri: The URI of the source in use.
        dest_uri: The URI of the destination in use.
        cluster: The name of this broker.
        now: Returns Unix time in seconds.
        own: Whether the destination recognises repeated publishes by `PRODUCER_HEADERS`.
    """
    changes = shovel.forward_headers or shovel.timestamp_header or bool(shovel.properties)
    if not changes:
        return _without_sequence if own else None
    forwarded = _forwarded(shovel, src_uri, dest_uri, cluster)

    def edit(props: bytes) -> bytes:
        found = _read(props)
        found.update(shovel.properties)
        headers = dict(found.get("headers") or {})
        if own:
            for name in PRODUCER_HEADERS:
                headers.pop(name, None)
        if shovel.forward_headers:
            before = headers.get(FORWARDED)
            headers[FORWARDED] = [forwarded, *(before if isinstance(before, list) else [])]
        if shovel.timestamp_header:
            headers[FORWARDED_AT] = int(now())
        if headers or "headers" in found:
            found["headers"] = headers
        return encode_properties(found)

    return edit


def _without_sequence(props: bytes) -> bytes:
    if _SEQUENCE not in props:
        return props
    found = _read(props)
    headers = found.get("headers") or {}
    found["headers"] = {
        name: value for name, value in headers.items() if name not in PRODUCER_HEADERS
    }
    return encode_properties(found)


def _read(props: bytes) -> dict[str, Any]:
    """Return the properties that a message has. Raises ConnectionException if they are broken."""
    read = properties.read(props)
    every = ((name, getattr(read, name)) for name, _ in PROPERTIES)
    return {name: value for name, value in every if value is not None}


def _forwarded(shovel: Shovel, src_uri: str, dest_uri: str, cluster: str) -> dict[str, Any]:
    """Return the entry of `x-shovelled`, with RabbitMQ's keys."""
    entry = {
        "src-uri": without_credentials(src_uri),
        "dest-uri": without_credentials(dest_uri),
        "src-queue": shovel.src_queue,
        "src-exchange": shovel.src_exchange,
        "src-exchange-key": shovel.src_exchange_key,
        "dest-queue": shovel.dest_queue,
        "dest-exchange": shovel.dest_exchange,
        "dest-exchange-key": shovel.dest_key if not shovel.dest_queue else "",
    }
    found: dict[str, Any] = {name: value for name, value in entry.items() if value}
    return found | {
        "shovelled-by": cluster,
        "shovel-type": "dynamic",
        "shovel-name": shovel.name,
        "shovel-vhost": shovel.vhost,
    }
