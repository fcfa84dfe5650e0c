"""A publish that is decided about alone: its line and its properties.

A *line* is the arguments of basic.publish behind the reserved word: exchange, routing key (short
strings) and the bits.
"""

from __future__ import annotations

import random
import struct
from typing import Any

from shardmq.broker.amqp import ChannelException, Publishes, contents, frames, properties
from shardmq.broker.front_door.publish.spans import PublishSpan
from shardmq.broker.model import checks
from shardmq.broker.model.checks import type_name
from shardmq.broker.routing import Message as Routable
from shardmq.broker.routing import delaying
from shardmq.broker.routing.spreading import hash_facts
from shardmq.shardd.wire import codec

PUBLISH = (60, 40)  # class and method
NO_ROUTE = 312
ROW = 48  # bytes of a row of Publishes.table
MANDATORY = 1  # in the bits of a line

_LINE = struct.Struct("<IH")
# Of a row: ttl in ms, delivery mode, priority, flags. amqp/octets.pxd draws it.
FACTS = struct.Struct("<32xIBBB")


class Message:
    """The facts of one publish, read from its line and its properties."""

    __slots__ = (
        "_row_flags",
        "delay_ms",
        "exchange",
        "headers",
        "in_sequence",
        "keys",
        "late_ms",
        "mandatory",
        "persistent",
        "priority",
        "properties",
        "span",
        "stored",
        "ttl_ms",
    )

    def __init__(self, event: Publishes, at: int) -> None:
        line = line_of(event, at)
        self.exchange, key = exchange_and_key(line)
        self.mandatory = bool(line[-1] & MANDATORY)
        self.ttl_ms, mode, self.priority, self._row_flags = FACTS.unpack_from(event.table, at * ROW)
        self.persistent = mode == 2
        self.stored = contents.stored(event.buffer, event.table, at)
        self.properties = properties.read(contents.read_stored(self.stored)[2])
        self.headers: dict[str, Any] = self.properties.headers or {}
        self.keys = [key]
        self.in_sequence = False
        # Added to the message's time, because its ttl is more than a record has room for.
        self.late_ms = 0
        self.delay_ms = delaying.delay_of(self.headers) if delaying.HEADER in self.headers else 0
        self.span: PublishSpan | None = None  # None: the message takes part in no trace

    def check(self, user: str, may_impersonate: bool) -> None:
        """Raise ChannelException for a wrong expiration, user_id, sequence, CC or BCC.

        Reads what these say of the message as well: its ttl, whether it is in sequence, more
        routing keys.
        """
        expiration = self.properties.expiration
        if self._row_flags & frames.BAD_EXPIRATION and expiration is not None:
            if (
                not (expiration.isascii() and expiration.isdigit())
                or int(expiration) > checks.EXPIRY_MS_MAX
            ):
                raise ChannelException(406, _bad_expiration(expiration), *PUBLISH)
            self.late_ms, self.ttl_ms = checks.in_record(int(expiration))
        claimed = self.properties.user_id
        if claimed is not None and claimed != user and not may_impersonate:
            text = f"user_id property set to '{claimed}' but authenticated user was '{user}'"
            raise ChannelException(406, text, *PUBLISH)
        if self._row_flags & frames.MAY_HAVE_SEQUENCE:
            try:
                self.in_sequence = codec.place_of(contents.read_stored(self.stored)[2]) is not None
            except ValueError as error:
                raise ChannelException(406, str(error), *PUBLISH) from None
        for name in ("CC", "BCC"):
            more = self.headers.get(name)
            if more is None:
                continue
            if not isinstance(more, list):
                text = (
                    f'invalid message: {{unacceptable_type_in_header,"{name}",{type_name(more)}}}'
                )
                raise ChannelException(406, text, *PUBLISH)
            # RabbitMQ ignores values of other types.
            self.keys += [key for key in more if isinstance(key, str)]

    def check_delay(self, now_ms: int) -> None:
        """Raise ChannelException when the message is to wait for a time that is not possible."""
        if not delaying.is_possible(self.delay_ms, now_ms):
            said = self.headers[delaying.HEADER]
            term = checks.erlang_term(said)
            text = f"invalid header '{delaying.HEADER}': {term} is no number of milliseconds"
            if self.delay_ms > 0:
                text = f"invalid header '{delaying.HEADER}': {{value_too_big,{self.delay_ms}}}"
            raise ChannelException(406, text, *PUBLISH)

    def without_bcc(self) -> bytes:
        """Return the stored message as clients see it.

        A queue keeps BCC, for its keys route the dead letter.
        """
        return (
            properties.without_header(self.stored, "BCC") if "BCC" in self.headers else self.stored
        )

    def routable(self) -> Routable:
        """Return what exchanges look at."""
        said = hash_facts(self.properties)
        key, *more = self.keys
        return Routable(key, self.headers, said, random.getrandbits(64), tuple(more), self.delay_ms)

    def direct_replies_to(self, queue: str) -> None:
        """Replace a reply_to that means the publisher's channel by the name of its queue.

        `queue` is "" when the channel has none: then the message cannot be published.
        """
        if self._row_flags & frames.DIRECT_REPLY_TO:
            if not queue:
                raise ChannelException(406, "fast reply consumer does not exist", *PUBLISH)
            self.stored = properties.with_reply_to(self.stored, queue)

    def returned(self, channel: int, frame_bytes_max: int) -> bytes:
        """Return the frames of basic.return."""
        exchange, key, props, body = contents.read_stored(self.without_bcc())
        payload = (
            struct.pack(">HHHB", 60, 50, NO_ROUTE, 8)
            + b"NO_ROUTE"
            + bytes([len(exchange)])
            + exchange
        )
        return contents.content(
            channel, payload + bytes([len(key)]) + key, props, body, frame_bytes_max
        )


def _bad_expiration(value: str) -> str:
    """Return RabbitMQ's words for an expiration that is no number of milliseconds."""
    if value.startswith("-") and value[1:].isdigit():
        return f"invalid expiration '{value}': {{value_negative,{value}}}"
    if value.isascii() and value.isdigit():
        return f"invalid expiration '{value}': {{value_too_large,{value}}}"
    digits = len(value) - len(value.lstrip("0123456789"))
    if digits:
        return f"invalid expiration '{value}': {{leftover_string,\"{value[digits:]}\"}}"
    return f"invalid expiration '{value}': no_integer"


def line_of(event: Publishes, at: int) -> bytes:
    """Return the line of the event's message with this index."""
    offset, length = _LINE.unpack_from(event.table, at * ROW)
    return bytes(event.buffer[offset : offset + length])


def exchange_and_key(line: bytes) -> tuple[str, str]:
    """Return exchange and routing key of a line, which may lack its bits."""
    n = line[0]
    m = line[n + 1]
    return line[1 : n + 1].decode("utf-8", "replace"), line[n + 2 : n + 2 + m].decode(
        "utf-8", "replace"
    )
