"""Bindings to exchanges that keep messages: the queue gets kept messages before new ones.

Kept messages lie in a stream (routing/keeping.py says which of them a binding gets). Before the
binding exists, the chosen messages are copied to the queue, in order. Then the binding is made.
When every front door has it, messages that were published meanwhile are copied too, except those
that already went to the queue: the record of each message names the queues it went to, wherever
they live, and the stream's shard remembers the records that named this queue. The same is done for
a time after bind-ok, for messages that were still on their way by the old routes.

So each message that was confirmed before the bind was sent comes as a copy, in order and before all
others. Each message that was published after bind-ok comes by the binding. Each message in between
comes once, by either way, in no defined order. If a shard dies during the bind, some may come
twice.

Nothing here asks, waits or reads a clock: the steps (steps.py) say what is to be asked next.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from pamqp import base

from shardmq.broker.amqp import contents, frames, properties
from shardmq.broker.front_door.publish.stored_runs import PERSISTENT
from shardmq.broker.front_door.publish.targets import is_shut
from shardmq.broker.front_door.topology.steps import (
    AskController,
    AskEach,
    AskShard,
    Clock,
    Follow,
    Now,
    SeeCatalog,
    Sleep,
    Steps,
    Store,
    Unwatch,
    Watch,
)
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import BindingPut, taking
from shardmq.broker.model.checks import Refusal
from shardmq.broker.routing import Message, keeping
from shardmq.broker.routing.delaying import inner_type
from shardmq.broker.routing.matching import Matcher, Target
from shardmq.broker.routing.spreading import Spread, hash_facts
from shardmq.broker.routing.types import TYPES
from shardmq.broker.shared.control import Bind
from shardmq.shardd.wire import codec
from shardmq.shardd.wire import messages as wire

log = logging.getLogger("shardmq.broker.front_door.topology.history")

# The number of no client: those begin with 1, and 0 is used for dead letters.
CONNECTION = 0xFFFFFFFF
PULL_BYTES = 256 << 10
OFFSET_HEADER = b"x-offset"
# What was routed before the binding may come to the stream this much later. The stream is looked at
# so often in this time, or less often where a look takes long.
FOLLOW_S, FOLLOW_LOOKS = 5.0, 50
FOLLOW_EACH_S = FOLLOW_S / FOLLOW_LOOKS
# Pause between two looks at a stream whose messages are not on stable storage yet.
LOOK_S = 0.005
# A batch of copies that its shard lost is sent at most this many times.
TRIES_MAX = 10
INTERNAL_ERROR = 541


def wants_history(vhost: Vhost | None, source: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a bind of a queue to this exchange brings kept messages."""
    exchange = vhost.exchanges.get(source) if vhost is not None else None
    if vhost is None or exchange is None or keeping.queue_name(source) not in vhost.queues:
        return False
    return keeping.wants_history(inner_type(exchange.type, exchange.arguments), arguments)


def bind(vhost: Vhost, request: Bind, ask: AskController) -> AskController | Steps[base.Frame]:
    """Return the steps that bind a queue, with the kept messages that the binding chooses.

    `ask` makes the binding of `request`; its answer comes when every front door has the binding.
    The steps raise Refusal when the messages cannot be stored.
    """
    return ask if _exists(vhost, request) else _bind(vhost, request, ask)


def _bind(vhost: Vhost, request: Bind, ask: AskController) -> Steps[base.Frame]:
    exchange = vhost.exchanges[request.source]
    type = inner_type(exchange.type, exchange.arguments)
    copying = _Copying(vhost, request, counts_offsets=type != keeping.RECENT_HISTORY)
    yield Watch(copying.stream, copying.target)
    try:
        age_ms = exchange.arguments.get(keeping.AGE_MS)
        young_ms = 0 if age_ms is None else max((yield Now()) - age_ms, 0)
        looked = yield from copying.look(young_ms)
        kept = keeping.Kept(looked.first_offset, looked.young, looked.end_offset, looked.at_time)
        kept_max = keeping.messages_max(type, exchange.arguments)
        yield from copying.copy(*keeping.chosen(request.arguments, kept_max, kept))
        (answer,) = yield AskEach([ask.request])
        after = yield from copying.look()
        yield from copying.copy(looked.end_offset, after.end_offset)
    except BaseException:
        yield Unwatch(copying.stream, copying.target)
        raise
    yield Follow(_follow(copying, after.end_offset))
    return ask.then(answer)


def _follow(copying: _Copying, offset: int) -> Steps[None]:
    """Copy messages that were on their way by the old routes."""
    request = copying.request
    try:
        until = (yield Clock()) + FOLLOW_S
        for _ in range(FOLLOW_LOOKS):
            if (yield Clock()) >= until:
                return
            yield Sleep(FOLLOW_EACH_S)
            stop = (yield from copying.look()).end_offset
            if not _exists((yield SeeCatalog()).vhost(request.vhost), request):
                return  # unbound meanwhile
            yield from copying.copy(offset, stop)
            offset = stop
    except Exception as error:  # the binding stands; what is missing is logged
        log.warning(
            "queue '%s': what came while it was bound is not all copied: %s",
            request.destination,
            error,
        )
    finally:
        yield Unwatch(copying.stream, copying.target)


class _Copying:
    """The copying of one bind, from a stream to a queue."""

    def __init__(self, vhost: Vhost, request: Bind, *, counts_offsets: bool) -> None:
        """`counts_offsets` says that each copy has its offset in a header."""
        self.request = request
        self.stream = vhost.queues[keeping.queue_name(request.source)]
        self.target = vhost.queues[request.destination]
        self._counts_offsets = counts_offsets
        self._matcher = _matcher(vhost, request)

    def look(self, young_ms: int = 0) -> Steps[wire.StreamInspected]:
        """Look at the stream; from the first time on the shard watches what goes to the queue."""
        looked = yield AskShard(
            self.stream.shard,
            partial(
                wire.InspectStream,
                queue=self.stream.id,
                watch=self.target.id,
                timestamp=keeping.from_time_ms(self.request.arguments) or 0,
                young=young_ms,
            ),
        )
        assert isinstance(looked, wire.StreamInspected)
        return looked

    def copy(self, offset: int, stop: int) -> Steps[None]:
        """Copy the messages of [offset, stop) that the binding lets through."""
        while offset < stop:
            pulled = yield AskShard(
                self.stream.shard,
                partial(
                    wire.Pull,
                    queue=self.stream.id,
                    watch=self.target.id,
                    offset=offset,
                    stop=stop,
                    bytes_max=PULL_BYTES,
                ),
            )
            assert isinstance(pulled, wire.Pulled)
            if pulled.next_offset == offset and not pulled.count:
                yield Sleep(LOOK_S)
            for facts, blob, count in self._wanted(pulled):
                yield from self._store(facts, blob, count)
            offset = pulled.next_offset

    def _wanted(self, pulled: wire.Pulled) -> Iterator[tuple[frames.Facts, bytes, int]]:
        """Return the messages that the binding lets through.

        Neighbours that are stored alike are together: facts, messages back to back, their count.
        """
        parts: list[bytes] = []
        offsets: list[bytes] = []
        alike: frames.Facts | None = None
        for i, (names, props, body) in enumerate(contents.split(pulled.messages, pulled.count)):
            if not self._matches(names, props):
                continue
            facts = frames.facts(props)
            if alike is not None and _alike(facts) != _alike(alike):
                yield alike, self._blob(parts, offsets), len(parts)
                parts, offsets = [], []
            alike = facts
            parts.append(_stored(names, props, body))
            offsets.append(pulled.offsets[8 * i : 8 * i + 8])
        if alike is not None:
            yield alike, self._blob(parts, offsets), len(parts)

    def _blob(self, parts: list[bytes], offsets: list[bytes]) -> bytes:
        blob = b"".join(parts)
        if not self._counts_offsets:
            return blob
        return properties.with_offsets(blob, b"".join(offsets), OFFSET_HEADER)

    def _matches(self, names: bytes, props: bytes) -> bool:
        said = properties.read(props)
        headers, facts = said.headers or {}, hash_facts(said)
        more = [key for key in headers.get("CC", ()) if isinstance(key, str)]
        target = Target("queue", self.target.name)
        return any(
            target in self._matcher.match(Message(key, headers, facts))
            for key in (names[names[0] + 2 :].decode("utf-8", "replace"), *more)
        )

    def _store(self, facts: frames.Facts, blob: bytes, count: int) -> Steps[None]:
        """Store copies in the queue. Raises Refusal when its shard does not take them."""
        ttl_ms, mode, priority, flags = facts
        persistent = mode == PERSISTENT
        for _ in range(TRIES_MAX):
            vhost = (yield SeeCatalog()).vhost(self.request.vhost)
            there = vhost.queues.get(self.target.name) if vhost is not None else None
            target = self.target if there is None else taking(there)
            if is_shut(target):
                yield Sleep(FOLLOW_EACH_S)
                continue
            run = (
                target.shard,
                [target.id],
                blob,
                CONNECTION,
                0,
                0,
                (yield Now()),
                ttl_ms,
                priority,
                persistent,
                persistent and target.durable,
                count,
                False,
                codec.OWN_LETTERS if flags & frames.MAY_HAVE_LETTERS else 0,
            )
            if (yield Store(self.request.vhost, run)):
                return
            yield Sleep(FOLLOW_EACH_S)
        raise Refusal(INTERNAL_ERROR, f"messages for queue '{target.name}' cannot be stored")


def _exists(vhost: Vhost | None, request: Bind) -> bool:
    """Return whether the binding is there."""
    key, arguments = request.routing_key, request.arguments
    put = BindingPut(request.vhost, request.source, "queue", request.destination, key, arguments)
    return vhost is not None and vhost.has_binding(put)


def _matcher(vhost: Vhost, request: Bind) -> Matcher:
    """Return a matcher that routes as the exchange will by this binding.

    Other bindings are in it only where the exchange gives each message to one of several.
    """
    exchange = vhost.exchanges[request.source]
    matcher = TYPES[exchange.type](vhost.exchange_arguments(exchange))
    if isinstance(matcher, Spread):
        for one in vhost.bindings_from(request.source):
            matcher.add(one.routing_key, one.arguments, Target(one.kind, one.destination))
    matcher.add(request.routing_key, request.arguments, Target("queue", request.destination))
    return matcher


def _alike(facts: frames.Facts) -> tuple[int, ...]:
    return (*facts[:3], facts[3] & frames.MAY_HAVE_LETTERS)


def _stored(names: bytes, props: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + len(props).to_bytes(4, "little") + names + props + body
