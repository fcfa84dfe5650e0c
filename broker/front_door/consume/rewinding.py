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
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from shardmq.broker.amqp import contents, frames, properties
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import BindingPut, QueuePut
from shardmq.broker.model.checks import Refusal
from shardmq.broker.routing import Message, keeping
from shardmq.broker.routing.delaying import inner_type
from shardmq.broker.routing.keeping import Kept, chosen
from shardmq.broker.routing.matching import Matcher, Target
from shardmq.broker.routing.spreading import HASH_PROPERTIES, Spread
from shardmq.broker.routing.types import TYPES
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire import packer

log = logging.getLogger("shardmq.broker.front_door.consume.rewinding")

# The number of no client: those begin with 1, and 0 is used for dead letters.
CONNECTION = 0xFFFFFFFF
PULL_BYTES = 256 << 10
OFFSET_HEADER = b"x-offset"
# What was routed before the binding may come to the stream this much later.
FOLLOW_S = 5.0
# Pause between two looks at a stream whose messages are not on stable storage yet.
LOOK_S = 0.005
FOLLOW_EACH_S = 0.1
# A batch of copies that its shard lost is sent at most this many times.
TRIES_MAX = 10
INTERNAL_ERROR = 541
PERSISTENT = 2

T = TypeVar("T")


class CatalogSource(Protocol):
    """Holds the copy of the catalog that is in force, which a snapshot replaces."""

    catalog: Catalog


class HistoryBinding(NamedTuple):
    """A bind of a queue to an exchange that keeps messages."""

    vhost: str
    source: str
    queue: str
    key: str
    arguments: dict[str, Any]

    def exists_in(self, vhost: Vhost | None) -> bool:
        """Return whether the binding is there."""
        put = BindingPut(self.vhost, self.source, "queue", self.queue, self.key, self.arguments)
        return vhost is not None and vhost.has_binding(put)


class _Stored:
    """A batch of copies. The future tells whether it is on stable storage."""

    in_sequence = False  # no producer waits for it

    def __init__(self) -> None:
        self.future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._refused = False

    def refuse(self, connection: int, channel: int, first: int, last: int) -> None:
        self._refused = self._refused or connection == CONNECTION

    def confirmed(self) -> None:
        self._end(not self._refused)

    def lost(self) -> None:
        self._end(False)

    def _end(self, stored: bool) -> None:
        if not self.future.done():
            self.future.set_result(stored)


def wants_history(vhost: Vhost | None, source: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a bind of a queue to this exchange brings kept messages."""
    exchange = vhost.exchanges.get(source) if vhost is not None else None
    if exchange is None or _stream_of(vhost, source) is None:
        return False
    return keeping.wants_history(inner_type(exchange.type, exchange.arguments), arguments)


def _stream_of(vhost: Vhost | None, source: str) -> QueuePut | None:
    return vhost.queues.get(keeping.queue_name(source)) if vhost is not None else None


class Rewinding:
    """All bindings of this front door that bring kept messages."""

    def __init__(self, source: CatalogSource, links: ShardLinks) -> None:
        self._source = source
        self._links = links
        # How many binds watch what goes from a stream to a queue, by their ids.
        self._watched: Counter[tuple[int, int]] = Counter()
        self._following: set[asyncio.Task[None]] = set()
        self._closed = False

    def close(self) -> None:
        """Stop: the process ends, and the shards will watch nothing more for it."""
        self._closed = True
        for task in self._following:
            task.cancel()

    async def bind(
        self, vhost: Vhost, binding: HistoryBinding, bind: Callable[[], Awaitable[T]]
    ) -> T:
        """Bind a queue, with the kept messages that the binding chooses.

        `bind` makes the binding and ends when every front door has it. Raises Refusal when the
        messages cannot be stored.
        """
        if binding.exists_in(vhost):
            return await bind()
        stream, target = _stream_of(vhost, binding.source), vhost.queues[binding.queue]
        exchange = vhost.exchanges[binding.source]
        assert stream is not None
        type = inner_type(exchange.type, exchange.arguments)
        copying = _Copying(self._links, binding, stream, target, _matcher(vhost, binding), type)
        self._watched[copying.ends] += 1
        try:
            looked = await copying.look(exchange.arguments)
            kept = Kept(looked.first_offset, looked.young, looked.end_offset, looked.at_time)
            await copying.copy(
                *chosen(binding.arguments, keeping.messages_max(type, exchange.arguments), kept)
            )
            done = await bind()
            after = await copying.look({})
            await copying.copy(looked.end_offset, after.end_offset)
        except BaseException:
            self._end(copying)
            raise
        task = asyncio.create_task(self._follow(copying, after.end_offset))
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        return done

    def _end(self, copying: _Copying) -> None:
        self._watched[copying.ends] -= 1
        if not self._watched[copying.ends]:
            del self._watched[copying.ends]
            if not self._closed:
                copying.unwatch()

    async def _follow(self, copying: _Copying, offset: int) -> None:
        """Copy messages that were on their way by the old routes."""
        try:
            end = time.monotonic() + FOLLOW_S
            while time.monotonic() < end:
                await asyncio.sleep(FOLLOW_EACH_S)
                stop = (await copying.look({})).end_offset
                if not copying.binding.exists_in(self._source.catalog.vhost(copying.binding.vhost)):
                    return  # unbound meanwhile
                await copying.copy(offset, stop)
                offset = stop
        except Exception as error:  # the binding stands; what is missing is logged
            log.warning(
                "queue '%s': what came while it was bound is not all copied: %s",
                copying.binding.queue,
                error,
            )
        finally:
            self._end(copying)


class _Copying:
    """The copying of one bind, from a stream to a queue."""

    def __init__(
        self,
        links: ShardLinks,
        binding: HistoryBinding,
        stream: QueuePut,
        target: QueuePut,
        matcher: Matcher,
        exchange_type: str,
    ) -> None:
        self.binding = binding
        self._links = links
        self._stream = stream
        self._target = target
        self._matcher = matcher
        self._numbers = exchange_type != keeping.RECENT_HISTORY

    async def look(self, exchange: Mapping[str, Any]) -> wire.StreamInspected:
        """Look at the stream; from the first time on the shard watches what goes to the queue."""
        age = exchange.get(keeping.AGE_MS)
        young = max(int(time.time() * 1000) - age, 0) if age is not None else 0
        at_time = keeping.from_time_ms(self.binding.arguments) or 0

        def make(request: int) -> wire.InspectStream:
            return wire.InspectStream(request, self._stream.id, self._target.id, at_time, young)

        looked = await self._links.ask(self._stream.shard, make)
        assert isinstance(looked, wire.StreamInspected)
        return looked

    @property
    def ends(self) -> tuple[int, int]:
        return self._stream.id, self._target.id

    def unwatch(self) -> None:
        self._links.tell(self._stream.shard, wire.Unwatch(self._stream.id, self._target.id))

    async def copy(self, offset: int, stop: int) -> None:
        """Copy the messages of [offset, stop) that the binding lets through."""
        while offset < stop:
            pulled = await self._pull(offset, stop)
            if pulled.next_offset == offset and not pulled.count:
                await asyncio.sleep(LOOK_S)
            for facts, blob, count in self._wanted(pulled):
                await self._store(facts, blob, count)
            offset = pulled.next_offset

    async def _pull(self, offset: int, stop: int) -> wire.Pulled:
        def make(request: int) -> wire.Pull:
            return wire.Pull(request, self._stream.id, self._target.id, offset, stop, PULL_BYTES)

        pulled = await self._links.ask(self._stream.shard, make)
        assert isinstance(pulled, wire.Pulled)
        return pulled

    def _wanted(self, pulled: wire.Pulled) -> Iterator[tuple[frames.Facts, bytes, int]]:
        """Return the messages that the binding lets through.

        Neighbours that are stored alike are together: facts, messages back to back, their count.
        """
        parts: list[bytes] = []
        numbers: list[bytes] = []
        alike: frames.Facts | None = None
        for i, (names, props, body) in enumerate(contents.split(pulled.messages, pulled.count)):
            if not self._matches(names, props):
                continue
            facts = frames.facts(props)
            if alike is not None and _alike(facts) != _alike(alike):
                yield alike, self._numbered(parts, numbers), len(parts)
                parts, numbers = [], []
            alike = facts
            parts.append(_stored(names, props, body))
            numbers.append(pulled.offsets[8 * i : 8 * i + 8])
        if alike is not None and parts:
            yield alike, self._numbered(parts, numbers), len(parts)

    def _numbered(self, parts: list[bytes], numbers: list[bytes]) -> bytes:
        blob = b"".join(parts)
        return (
            properties.with_offsets(blob, b"".join(numbers), OFFSET_HEADER)
            if self._numbers
            else blob
        )

    def _matches(self, names: bytes, props: bytes) -> bool:
        key = names[names[0] + 2 :].decode("utf-8", "replace")
        said = properties.read(props)
        headers = said.headers or {}
        facts = {
            name: value for name in HASH_PROPERTIES if (value := getattr(said, name)) is not None
        }
        keys = [
            key,
            *(more for name in ("CC",) for more in headers.get(name, ()) if isinstance(more, str)),
        ]
        target = Target("queue", self._target.name)
        return any(target in self._matcher.match(Message(each, headers, facts)) for each in keys)

    async def _store(self, facts: frames.Facts, blob: bytes, count: int) -> None:
        """Store copies in the queue. Raises Refusal when its shard does not take them."""
        for _ in range(TRIES_MAX):
            waiting = _Stored()
            self._links.use_vhost(self.binding.vhost)
            ttl_ms, mode, priority, flags = facts
            marks = packer.OWN_LETTERS if flags & frames.MAY_HAVE_LETTERS else 0
            self._links.packer.add_stored(
                self._target.shard,
                [self._target.id],
                blob,
                CONNECTION,
                0,
                0,
                int(time.time() * 1000),
                ttl_ms,
                priority,
                mode == PERSISTENT,
                mode == PERSISTENT and self._target.durable,
                count,
                marks=marks,
            )
            self._links.wait_for(self._links.packer.take_touched(), waiting)
            self._links.flush()
            if await waiting.future:
                return
            await asyncio.sleep(FOLLOW_EACH_S)
        raise Refusal(INTERNAL_ERROR, f"messages for queue '{self.binding.queue}' cannot be stored")


def _matcher(vhost: Vhost, binding: HistoryBinding) -> Matcher:
    """Return a matcher that routes as the exchange will by this binding.

    Other bindings are in it only where the exchange gives each message to one of several.
    """
    exchange = vhost.exchanges[binding.source]
    matcher = TYPES[exchange.type](vhost.exchange_arguments(exchange))
    if isinstance(matcher, Spread):
        for one in vhost.bindings_from(binding.source):
            matcher.add(one.routing_key, one.arguments, Target(one.kind, one.destination))
    matcher.add(binding.key, binding.arguments, Target("queue", binding.queue))
    return matcher


def _alike(facts: frames.Facts) -> tuple[int, ...]:
    return (*facts[:3], facts[3] & frames.MAY_HAVE_LETTERS)


def _stored(names: bytes, props: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + len(props).to_bytes(4, "little") + names + props + body
