"""Shovels and links change properties of messages before they publish the messages.

A shovel may set properties, say in the header `x-shovelled` where a message came from, and in
`x-shovelled-timestamp` when. The two headers by which a broker like this one recognises a repeated
publish are taken away from messages for such a broker: the numbers are those of the producer's
order, and a message that comes late, because it was requeued, would be taken for a repeated one.

Properties that do not change stay as they are, byte for byte: their text may be of any encoding.
So do the entries that other brokers have written into a list: they are decoded only to be looked
at, and one that cannot be decoded is an entry all the same. A message whose properties no bridge
can change must not stop those behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from shardmq.broker.amqp.errors import ConnectionException
from shardmq.broker.amqp.methods import decode_table, encode_table, skip_value
from shardmq.broker.amqp.properties import (
    entries,
    headers_inside,
    with_entries,
    with_properties,
)
from shardmq.broker.amqp.spec import FRAME_OVERHEAD_BYTES
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
_HEADER_BYTES: Final = FRAME_OVERHEAD_BYTES + 12  # of a header frame without properties
VISITS_MAX: Final = (1 << 63) - 1
UNCHANGED: Final = "the headers of a message cannot be read, or have no room: it has no new ones"
DROPPED: Final = "the headers of a message cannot be read, or have no room: it is dropped"

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
    forwarded = _encoded(_forwarded(shovel, src_uri, dest_uri, cluster))

    def edit(props: bytes) -> bytes:
        given = dict(shovel.properties)
        table = given.pop("headers", None)
        if given:
            props = with_properties(props, given)
        inside = headers_inside(props) if table is None else encode_table(table)[_SIZE_BYTES:]
        try:
            before = entries(inside)
        except ConnectionException:
            return props  # with headers that nobody can read
        headers = dict(before)
        if own:
            for name in PRODUCER_HEADERS:
                headers.pop(name, None)
        if shovel.forward_headers:
            headers[FORWARDED] = _array([forwarded, *(_items(headers.get(FORWARDED)))])
        if shovel.timestamp_header:
            headers[FORWARDED_AT] = _encoded(int(now()))
        if headers == before and table is None:
            return props
        return with_entries(props, headers)

    return edit


def received_from(
    link: QueueLink, uri: str, frame_bytes_max: int, say: Callable[[str], None]
) -> Callable[[bytes, bytes], bytes]:
    """Return the function that edits properties of messages that come by a link of queues.

    The function also takes what the delivery says, as `Relay` has it. The header `x-received-from`
    gets an entry for the upstream queue in front. If the queue is in the header already, its entry
    moves and counts on. `x-original-exchange` and `x-original-routing-key` say where a message was
    published first. Headers that cannot be read, or would be too large then, stay as they are.

    Args:
        link: The link.
        uri: The URI of the upstream in use.
        frame_bytes_max: The size of frames to this broker.
        say: Called with `UNCHANGED` for each such message.
    """
    place = {"uri": without_credentials(uri), "queue": link.queue}  # as RabbitMQ: the name here

    def edit(props: bytes, names: bytes) -> bytes:
        if not link.source.trust_user_id:
            props = with_properties(props, {"user_id": None})
        try:
            headers = entries(headers_inside(props))
        except ConnectionException:
            say(UNCHANGED)
            return props
        for name in PRODUCER_HEADERS:
            headers.pop(name, None)
        plain = with_entries(props, headers) if _SEQUENCE in props else props
        before, visits = _items(headers.get(RECEIVED_FROM)), 0
        if not before:
            headers[ORIGINAL_EXCHANGE] = _name(names, 1)
            headers[ORIGINAL_KEY] = _name(names, 2 + names[1])
        others = []
        for item in before:
            found = _decoded(item)
            if _is_at(found, place):
                count = found.get("visit-count")
                visits = max(visits, count if isinstance(count, int) else 0)
            else:
                others.append(item)
        visits = min(visits + 1, VISITS_MAX)
        entry = {**place, "redelivered": names[0] & 1 == 1, "visit-count": visits}
        headers[RECEIVED_FROM] = _array([_encoded(entry), *others])
        if CC in headers:
            headers[ORIGINAL_CC] = headers.pop(CC)
        edited = with_entries(props, headers)
        if len(edited) > frame_bytes_max - _HEADER_BYTES:
            say(UNCHANGED)
            return plain
        return edited

    return edit


def forwarded_by(
    link: ExchangeLink,
    uri: str,
    here: str,
    upstream: tuple[str | None, str],
    frame_bytes_max: int,
    say: Callable[[str], None],
) -> Callable[[bytes, bytes], bytes | None]:
    """Return the function that edits properties of messages that come by a link of exchanges.

    The function also takes whether a message was redelivered, as `Relay` has it. The header
    `x-received-from` gets an entry for the upstream in front. A message that came through as many
    links as `max_hops` says, or through this broker, is dropped: the function returns None. The
    upstream does so itself if it knows the exchange type `x-federation-upstream`. A message whose
    header cannot be written is dropped too, because nothing would keep it from going in circles.

    Args:
        link: The link.
        uri: The URI of the upstream in use.
        here: The name of this broker.
        upstream: The name of the upstream broker, if it tells one, and the vhost there.
        frame_bytes_max: The size of frames to this broker.
        say: Called with `DROPPED` for each message whose header cannot be written.
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
        try:
            headers = entries(headers_inside(props))
        except ConnectionException:
            say(DROPPED)
            return None
        given = headers.get(RECEIVED_FROM)
        before = _items(given)
        if (given is not None and len(before) >= link.max_hops) or any(
            _is_at(_decoded(each), own) for each in before
        ):
            return None
        if not link.source.trust_user_id:
            props = with_properties(props, {"user_id": None})
        for name in PRODUCER_HEADERS:
            headers.pop(name, None)
        entry = {**place, "redelivered": told[0] & 1 == 1}
        headers[RECEIVED_FROM] = _array([_encoded(entry), *before])
        edited = with_entries(props, headers)
        if len(edited) > frame_bytes_max - _HEADER_BYTES:
            say(DROPPED)
            return None
        return edited

    return edit


def _is_at(entry: Any, place: dict[str, str]) -> bool:
    return isinstance(entry, dict) and all(entry.get(key) == place[key] for key in place)


def _name(names: bytes, at: int) -> bytes:
    """Return a short string as the value of a header, whatever its bytes are."""
    return b"S" + bytes(3) + names[at : at + 1 + names[at]]


def _without_sequence(props: bytes) -> bytes:
    if _SEQUENCE not in props:
        return props
    try:
        headers = entries(headers_inside(props))
    except ConnectionException:
        return props
    return with_entries(
        props, {name: value for name, value in headers.items() if name not in PRODUCER_HEADERS}
    )


def _encoded(value: Any) -> bytes:
    """Return the value of a header with its type before it."""
    return encode_table({"": value})[_SIZE_BYTES + 1 :]


def _array(items: list[bytes]) -> bytes:
    """Return a header whose value is a list of these values, which have their types before them."""
    inside = b"".join(items)
    return b"A" + len(inside).to_bytes(_SIZE_BYTES, "big") + inside


def _items(value: bytes | None) -> list[bytes]:
    """Return the values in a header, each with its type; none if the header is no whole list."""
    found: list[bytes] = []
    if value is None or value[:1] != b"A":
        return found
    at = 1 + _SIZE_BYTES
    while at < len(value):
        try:
            end = skip_value(value, at)
        except ConnectionException:
            return []
        found.append(value[at:end])
        at = end
    return found


def _decoded(item: bytes) -> Any:
    """Return what a value is, to look at; None if the value cannot be decoded."""
    try:
        return decode_table(item[1:]) if item[:1] == b"F" else None
    except ConnectionException:
        return None


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
