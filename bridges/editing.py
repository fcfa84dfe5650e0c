"""A shovel changes properties of messages before it publishes them.

A shovel may set properties, say in the header `x-shovelled` where a message came from, and in
`x-shovelled-timestamp` when. The two headers by which a broker like this one recognises a repeated
publish are taken away from messages for such a broker: the numbers are those of the producer's
order, and a message that comes late, because it was requeued, would be taken for a repeated one.

Properties that do not change stay as they are, byte for byte: their text may be of any encoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from shardmq.broker.amqp.methods import decode_table, encode_table
from shardmq.broker.amqp.properties import (
    entries,
    headers_inside,
    with_entries,
    with_properties,
)
from shardmq.broker.model.amqp_uri import without_credentials
from shardmq.broker.model.federation import ExchangeLink, QueueLink
from shardmq.broker.model.shovels import Shovel

FORWARDED: Final = b"x-shovelled"
FORWARDED_AT: Final = b"x-shovelled-timestamp"
PRODUCER_HEADERS: Final = (b"x-producer-id", b"x-sequence")
_SEQUENCE: Final = b"\x0ax-sequence"
# Headers of federation.
RECEIVED_FROM: Final = b"x-received-from"
ORIGINAL_EXCHANGE, ORIGINAL_KEY = b"x-original-exchange", b"x-original-routing-key"
CC, ORIGINAL_CC = b"CC", b"x-original-cc"
_SIZE_BYTES: Final = 4  # of a table, before its entries

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
        given = dict(shovel.properties)
        table = given.pop("headers", None)
        if given:
            props = with_properties(props, given)
        inside = headers_inside(props) if table is None else encode_table(table)[_SIZE_BYTES:]
        before = entries(inside)
        headers = dict(before)
        if own:
            for name in PRODUCER_HEADERS:
                headers.pop(name, None)
        if shovel.forward_headers:
            headers[FORWARDED] = _encoded([forwarded, *_list(headers.get(FORWARDED))])
        if shovel.timestamp_header:
            headers[FORWARDED_AT] = _encoded(int(now()))
        if headers == before and table is None:
            return props
        return with_entries(props, headers)

    return edit


def received_from(link: QueueLink, uri: str) -> Callable[[bytes, bytes], bytes]:
    """Return the function that edits properties of messages that come by a link of queues.

    The function also takes what the delivery says, as `Relay` has it. The header `x-received-from`
    gets an entry for the upstream queue in front. If the queue is in the header already, its entry
    moves and counts on. `x-original-exchange` and `x-original-routing-key` say where a message was
    published first.

    Args:
        link: The link.
        uri: The URI of the upstream in use.
    """
    place = {"uri": without_credentials(uri), "queue": link.queue}  # as RabbitMQ: the name here

    def edit(props: bytes, names: bytes) -> bytes:
        if not link.trust_user_id:
            props = with_properties(props, {"user_id": None})
        headers = entries(headers_inside(props))
        for name in PRODUCER_HEADERS:
            headers.pop(name, None)
        before, visits = _list(headers.get(RECEIVED_FROM)), 0
        if not before:
            headers[ORIGINAL_EXCHANGE] = _name(names, 1)
            headers[ORIGINAL_KEY] = _name(names, 2 + names[1])
        others = []
        for entry in before:
            if _is_at(entry, place):
                count = entry.get("visit-count")
                visits = max(visits, count if isinstance(count, int) else 0)
            else:
                others.append(entry)
        entry = {**place, "redelivered": names[0] & 1 == 1, "visit-count": visits + 1}
        headers[RECEIVED_FROM] = _encoded([entry, *others])
        if CC in headers:
            headers[ORIGINAL_CC] = headers.pop(CC)
        return with_entries(props, headers)

    return edit


def forwarded_by(
    link: ExchangeLink, uri: str, here: str, upstream: tuple[str | None, str]
) -> Callable[[bytes, bytes], bytes | None]:
    """Return the function that edits properties of messages that come by a link of exchanges.

    The function also takes whether a message was redelivered, as `Relay` has it. The header
    `x-received-from` gets an entry for the upstream in front. A message that came through as many
    links as `max_hops` says, or through this broker, is dropped: the function returns None. The
    upstream does so itself if it knows the exchange type `x-federation-upstream`.

    Args:
        link: The link.
        uri: The URI of the upstream in use.
        here: The name of this broker.
        upstream: The name of the upstream broker, if it tells one, and the vhost there.
    """
    place: dict[str, Any] = {
        "uri": without_credentials(uri),
        "exchange": link.exchange,  # as RabbitMQ: the name here
        "redelivered": False,
        "cluster-name": upstream[0],
        "vhost": upstream[1],
    }
    if upstream[0] is None:
        del place["cluster-name"]
    own = {"cluster-name": here, "vhost": link.vhost}

    def edit(props: bytes, told: bytes) -> bytes | None:
        headers = entries(headers_inside(props))
        given = headers.get(RECEIVED_FROM)
        before = _list(given)
        if (given is not None and len(before) >= link.max_hops) or any(
            _is_at(each, own) for each in before
        ):
            return None
        if not link.trust_user_id:
            props = with_properties(props, {"user_id": None})
        for name in PRODUCER_HEADERS:
            headers.pop(name, None)
        entry = {**place, "redelivered": told[0] & 1 == 1}
        headers[RECEIVED_FROM] = _encoded([entry, *before])
        return with_entries(props, headers)

    return edit


def _is_at(entry: Any, place: dict[str, str]) -> bool:
    return isinstance(entry, dict) and all(entry.get(key) == place[key] for key in place)


def _name(names: bytes, at: int) -> bytes:
    """Return a short string as the value of a header, whatever its bytes are."""
    return b"S" + bytes(3) + names[at : at + 1 + names[at]]


def _without_sequence(props: bytes) -> bytes:
    if _SEQUENCE not in props:
        return props
    headers = entries(headers_inside(props))
    return with_entries(
        props, {name: value for name, value in headers.items() if name not in PRODUCER_HEADERS}
    )


def _encoded(value: Any) -> bytes:
    """Return the value of a header with its type before it."""
    return encode_table({"": value})[_SIZE_BYTES + 1 :]


def _list(value: bytes | None) -> list[Any]:
    """Return the elements of a header; none if it is no list."""
    if value is None or value[:1] != b"A":
        return []
    found = decode_table((len(value) + 1).to_bytes(_SIZE_BYTES, "big") + b"\0" + value)[""]
    return found if isinstance(found, list) else []


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
