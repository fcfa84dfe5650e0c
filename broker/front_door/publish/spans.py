"""Spans for OpenTelemetry: what the broker did with a message that takes part in a trace.

**Which messages.** A message says in the header `traceparent` (W3C Trace Context) that it belongs
to a trace, and whether that trace is sampled. The broker follows this decision. Of the messages
without a context, the part `tracing.sample_ratio` begins a trace; such a message gets a
`traceparent`, so that its consumers and its deliveries belong to the same trace. All other headers,
and a context that came with the message, are handed on as they are.

**Which spans.** `publish`, from the read to the last answer of a shard, is a child of the context.
It has the children `route` and, for each shard, `store`: from the batch that the message is packed
into, to the answer of the shard, which comes behind the sync if the message waits for one.
`deliver` is a child of the context in the message, not of `publish`, because only the header goes
through queues, dead letters and streams. All spans are made here. A shard takes no part: the
process that knows when a shard has answered also knows when the shard died instead. If nobody waits
for the answer, because the channel neither confirms nor commits, nothing waits for it here either:
there is no `store`, and `publish` ends when the message is packed.

**What it costs.** Without tracing, `Spans` is None, which is looked at once for each read and each
delivery of many messages. With tracing, compiled code searches each read and each delivery for the
name of the header, and counts how many publishes to pass until the next one is chosen
(`until_chosen`). A read with a message of a sampled trace leaves the short way. `mark` notes the
time of the read in the row of the message, with a flag at which the packer stops, so that the
message alone is decided about one by one (single_message.py); its neighbours are packed as ever.

**Where spans go.** To the controller, some at a time, which sends them to the collector. Messages
never wait for it: spans for which there is no room on the way are dropped, and counted.
"""

from __future__ import annotations

import math
import random
import re
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from shardmq.broker.amqp import ConnectionException, Publishes, contents, frames, properties
from shardmq.broker.amqp.properties import Properties
from shardmq.broker.front_door.hot_state import SpansState
from shardmq.broker.front_door.session import Session
from shardmq.broker.shared.control import Span

HEADER, STATE_HEADER = "traceparent", "tracestate"
# Spans that wait for the controller. That many are sent at once; others wait FLUSH_S for more.
SPANS_MAX = 512
FLUSH_S = 0.2
STATE_CHARS_MAX = 512  # W3C asks for as much to be handed on
NEVER = (1 << 62) - 1

_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_ROW_BYTES = 48
_READ_NS = struct.Struct("<40xQ")  # of a row: `reserved`, see amqp/octets.pxd


class Context(NamedTuple):
    """The place of a message in a trace: ids as in OTLP, and the text of `tracestate`."""

    trace_id: bytes
    span_id: bytes
    state: str
    is_sampled: bool


def context_in(headers: dict[str, Any]) -> Context | None:
    """Return the context that headers have; None if there is none, or one that is not valid."""
    said = headers.get(HEADER)
    found = _PARENT.fullmatch(_text(said)) if said is not None else None
    if found is None or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = bytes.fromhex(found[2]), bytes.fromhex(found[3])
    if not any(trace_id) or not any(span_id):
        return None
    state = _text(headers.get(STATE_HEADER))
    return Context(
        trace_id,
        span_id,
        state if len(state) <= STATE_CHARS_MAX else "",
        bool(int(found[4], 16) & 1),
    )


def _text(value: Any) -> str:
    """Return the text of a header: AMQP has strings and byte arrays."""
    if isinstance(value, bytes | bytearray):
        return value.decode("ascii", "replace")
    return value if isinstance(value, str) else ""


class PublishSpan:
    """The span of a publish that is under way, with its children.

    They are sent together when it ends: a transaction may be rolled back.
    """

    __slots__ = (
        "_attributes", "_children", "_error", "_exchange", "_parent", "_session", "_spans",
        "_started_ns", "_unanswered", "context",
    )  # fmt: skip

    def __init__(
        self,
        spans: Spans,
        parent: Context | None,
        session: Session,
        exchange: str,
        attributes: dict[str, str | int],
        started_ns: int,
    ) -> None:
        self._spans = spans
        self._parent = parent
        self._session = session
        self._exchange = exchange or "amq.default"
        self._attributes = attributes
        self._started_ns = started_ns
        self._unanswered = 1  # shards, and the caller while it packs
        self._error = ""
        self._children: list[Span] = []
        if parent is None:
            self.context = Context(spans.new_id(16), spans.new_id(8), "", True)
        else:
            self.context = parent._replace(span_id=spans.new_id(8))

    @property
    def header(self) -> str:
        """The `traceparent` of a message whose trace begins with this span; else an empty text."""
        if self._parent is not None:
            return ""
        return f"00-{self.context.trace_id.hex()}-{self.context.span_id.hex()}-01"

    def routed(self, began_ns: int, queues: int) -> None:
        """Note that the message was routed to so many queues."""
        self._child("route", began_ns, {"shardmq.queues": queues}, "")

    def store(self, shard: int, connection: int, channel: int, seq: int) -> StoreSpan:
        """Return the span of the message at a shard, which is to be told of the batch.

        The message has the confirm number `seq` of this channel, 0 in a transaction.
        """
        self._unanswered += 1
        return StoreSpan(self, shard, connection, channel, seq)

    def stored(self, began_ns: int, shard: int, error: str) -> None:
        """Note that a shard has answered, or is gone."""
        self._child("store", began_ns, {"shardmq.shard": shard}, error)
        self._error = self._error or error
        self.packed()

    def packed(self) -> None:
        """End the span if all shards have answered. The caller has packed the message."""
        self._unanswered -= 1
        if not self._unanswered:
            self.end(self._error)

    def end(self, error: str) -> None:
        """End the span. `error` says why the message was not published, if it was not."""
        for child in self._children:
            self._spans.add(child)
        peer = {"network.peer.address": self._session.peer_host}
        self._spans.add(
            Span(
                f"publish {self._exchange}",
                "consumer",
                self.context.trace_id,
                self.context.span_id,
                self._parent.span_id if self._parent is not None else b"",
                self.context.state,
                self._started_ns,
                time.time_ns(),
                {**self._attributes, **peer, "messaging.operation.name": "publish"},
                error,
            )
        )

    def _child(
        self, operation: str, began_ns: int, attributes: dict[str, str | int], error: str
    ) -> None:
        self._children.append(
            Span(
                f"{operation} {self._exchange}",
                "internal",
                self.context.trace_id,
                self._spans.new_id(8),
                self.context.span_id,
                self.context.state,
                began_ns,
                time.time_ns(),
                {**self._attributes, **attributes, "messaging.operation.name": operation},
                error,
            )
        )


class StoreSpan:
    """The span of a message at one shard. It waits beside the publish (shard_link.Unconfirmed)."""

    __slots__ = ("_began_ns", "_channel", "_connection", "_error", "_publish", "_seq", "_shard")

    in_sequence = False  # who waits for the publish itself says so

    def __init__(
        self, publish: PublishSpan, shard: int, connection: int, channel: int, seq: int
    ) -> None:
        self._publish = publish
        self._shard = shard
        self._connection = connection
        self._channel = channel
        self._seq = seq
        self._began_ns = time.time_ns()
        self._error = ""

    def refuse(self, connection: int, channel: int, first: int, last: int) -> None:
        if (connection, channel) == (
            self._connection,
            self._channel,
        ) and first <= self._seq <= last:
            self._error = "refused"

    def confirmed(self) -> None:
        self._publish.stored(self._began_ns, self._shard, self._error)

    def lost(self) -> None:
        self._error = "the shard was lost"
        self.confirmed()


class Spans(SpansState):
    """The spans of one front door, from the choice of messages to the way to the controller."""

    def __init__(
        self,
        ratio: float,
        say: Callable[[list[Span]], bool],
        call_later: Callable[[float, Callable[[], None]], object],
        randomness: random.Random | None = None,
    ) -> None:
        """Begin.

        Args:
            ratio: The part of the messages without a context that begin a trace, from 0 to 1.
            say: Sends spans to the controller; returns False if it did not.
            call_later: Calls a function after so many seconds.
            randomness: The source of ids and choices.
        """
        self._ratio = ratio
        self._say = say
        self._call_later = call_later
        self._random = randomness or random.Random()
        self._waiting: list[Span] = []
        self._is_flush_planned = False
        self.dropped = 0
        self.until_chosen = self._gap()

    def new_id(self, size: int) -> bytes:
        """Return an id of so many bytes, which is not zero."""
        return (self._random.getrandbits(8 * size) or 1).to_bytes(size, "big")

    def _gap(self) -> int:
        """Return how many publishes to pass: each is chosen with the same chance, for itself."""
        if self._ratio <= 0:
            return NEVER
        if self._ratio >= 1:
            return 0
        chance = 1 - self._random.random()
        return min(int(math.log(chance) / math.log1p(-self._ratio)), NEVER)

    # -- publishes -------------------------------------------------------------------------------

    def mark(self, event: Publishes, now_ns: int) -> None:
        """Note in the rows of an event, once, which messages take part in a trace."""
        chosen, at = [], self.until_chosen
        while at < event.count:
            chosen.append(at)
            at += 1 + self._gap()
        self.until_chosen = min(at - event.count, NEVER)
        table = frames.marked(event.buffer, event.table, chosen, now_ns)
        if table is not None:
            event.table = table

    def begin(
        self, session: Session, event: Publishes, at: int, said: Properties, stored: bytes
    ) -> PublishSpan | None:
        """Return the span of the event's message with index `at`, None if the message has none.

        `said` are the properties of the message, and `stored` is the message as it is stored.
        """
        (read_ns,) = _READ_NS.unpack_from(event.table, at * _ROW_BYTES)
        if not read_ns:
            return None
        parent = context_in(said.headers or {})
        if parent is not None and not parent.is_sampled:
            return None
        exchange, key, _, body = contents.read_stored(stored)
        attributes = _attributes(exchange, key, said, len(body), session.vhost)
        name = exchange.decode("utf-8", "replace")
        return PublishSpan(self, parent, session, name, attributes, read_ns)

    # -- deliveries ------------------------------------------------------------------------------

    def delivered(
        self,
        session: Session,
        queue: str,
        began_ns: int,
        count: int,
        blob: bytes | memoryview | Iterable[bytes],
    ) -> None:
        """Make the spans of stored messages that were written to a client.

        `blob` has `count` messages back to back, or is a list of messages, which may lack their
        bodies.
        """
        if isinstance(blob, bytes | memoryview):
            if not frames.is_traced(blob):
                return
            found = [
                (names, props, len(body)) for names, props, body in contents.split(blob, count)
            ]
        else:
            found = [_head(message) for message in blob if frames.is_traced(message)]
        for names, props, body_bytes in found:
            if frames.is_traced(props):
                self._deliver(session, queue, began_ns, names, props, body_bytes)

    def _deliver(
        self, session: Session, queue: str, began_ns: int, names: bytes, props: bytes, size: int
    ) -> None:
        try:
            said = properties.read(props)
        except ConnectionException:  # nobody has checked what a header with this name holds
            return
        context = context_in(said.headers or {})
        if context is None or not context.is_sampled:
            return
        exchange, key = names[1 : names[0] + 1], names[names[0] + 2 :]
        attributes = _attributes(exchange, key, said, size, session.vhost)
        self.add(
            Span(
                f"deliver {queue}",
                "producer",
                context.trace_id,
                self.new_id(8),
                context.span_id,
                context.state,
                began_ns,
                time.time_ns(),
                {
                    **attributes,
                    "messaging.destination.name": queue,
                    "network.peer.address": session.peer_host,
                    "messaging.operation.name": "deliver",
                },
                "",
            )
        )

    # -- the way to the controller ---------------------------------------------------------------

    def add(self, span: Span) -> None:
        """Send a span to the controller, soon."""
        self._waiting.append(span)
        if len(self._waiting) >= SPANS_MAX:
            self.flush()
        elif not self._is_flush_planned:
            self._is_flush_planned = True
            self._call_later(FLUSH_S, self._flush_planned)

    def _flush_planned(self) -> None:
        self._is_flush_planned = False
        self.flush()

    def flush(self) -> None:
        """Send the spans that wait. They are dropped if the controller takes none."""
        waiting, self._waiting = self._waiting, []
        if waiting and not self._say(waiting):
            self.dropped += len(waiting)


def _head(message: bytes) -> tuple[bytes, bytes, int]:
    """Return names, properties and length of the body of a stored message that lacks its body."""
    body_bytes, props_bytes = struct.unpack_from("<II", message)
    names_bytes = 2 + message[8]
    names_bytes += message[8 + names_bytes - 1]
    end = 8 + names_bytes
    return message[8:end], message[end : end + props_bytes], body_bytes


def _attributes(
    exchange: bytes, key: bytes, said: Properties, size: int, vhost: str
) -> dict[str, str | int]:
    """Return the attributes of a message that all its spans have, with the names of OpenTelemetry.

    The conventions for RabbitMQ hold for AMQP 0-9-1: tools that know them know these spans.
    """
    attributes: dict[str, str | int] = {
        "messaging.system": "rabbitmq",
        "messaging.destination.name": exchange.decode("utf-8", "replace"),
        "messaging.message.body.size": size,
        "shardmq.vhost": vhost,
    }
    for name, value in (
        ("messaging.rabbitmq.destination.routing_key", key.decode("utf-8", "replace")),
        ("messaging.message.id", said.message_id),
        ("messaging.message.conversation_id", said.correlation_id),
    ):
        if value:
            attributes[name] = value
    return attributes
