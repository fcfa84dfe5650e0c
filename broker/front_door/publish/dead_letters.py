"""Messages a shard hands back: record x-death, route again, let the old one be settled last.

A shard gives dead letters of one queue and one reason as a batch. Each gets its death into the headers and is
published to the queue's dead-letter exchange by the rules of any publish; the batch is answered when every shard that
got some of it has it on stable storage. What was not stored is said, and comes again. Messages that look alike
(properties, exchange, key) are decided about once, neighbours for the same queues leave as one run.
"""

from __future__ import annotations

import logging
import random
import struct
import time
from collections import deque
from typing import NamedTuple, Protocol

from shardmq.broker.amqp import contents, deaths, properties
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.publish.releasing import Releasing
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.routing import Message, delaying, goes_by_key, keeping, route_message
from shardmq.broker.routing.spreading import HASH_PROPERTIES
from shardmq.broker.shared.reading import is_stream
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire import packer

DUE = "delayed"  # the reason of what did not die, but has waited long enough (releasing.py)

log = logging.getLogger("shardmq.broker.front_door.publish.dead_letters")

# No client's: theirs begin with 1.
CONNECTION = 0
NO_TTL = 0xFFFFFFFF
PERSISTENT = 2
# Bits of the properties' flags.
HEADERS = 1 << 13
EXPIRATION = 1 << 8
CHANNELS = 1 << 16
# Queue ids in one record: their count is a u16.
QUEUES_MAX = 65535
# Warnings remembered, so that each is said once.
TOLD_MAX = 1000

_Names = bytes  # u8 n, exchange[n], u8 m, routing key[m]
_Look = tuple[_Names, bytes, bytes | None, int, int]  # drawn at contents.letters
_Target = tuple[int, tuple[int, ...], bool, int]
_STORED = struct.Struct("<II")
_U16 = struct.Struct(">H")


class CatalogSource(Protocol):
    """Holds the copy of the catalog that is in force; another object after a snapshot."""

    catalog: Catalog


class Copy(NamedTuple):
    """What all messages that look alike become."""

    names: _Names
    headers: bytes  # with their length before them
    shown: bytes  # the same without BCC, which lies in queues only
    keys: list[str]
    deaths: list[tuple[str, str]]
    exchange: str
    by_key: bool  # where it goes is decided once for all that look alike
    to: To  # without targets where each message is routed for itself


class To(NamedTuple):
    """Where they go: (shard, queue ids, whether one of them is durable, when it is due if it is to wait there)."""

    targets: tuple[_Target, ...]
    persistent: bool
    priority: int
    marks: int = 0


class Answer:
    """A batch on its way to stable storage; Departed is said once all shards concerned have answered."""

    in_sequence = False

    def __init__(
        self, links: ShardLinks, shard: int, batch: wire.DeadLetters, first_seq: int, channel: int
    ) -> None:
        """`channel`: in place of one; by it the batch knows what is refused of it."""
        self.channel = channel
        self._links = links
        self._shard = shard
        self._epoch = links.links[shard].epoch
        self._batch = batch
        self._first_seq = first_seq
        self._left: set[int] = set()
        self.shards = 1  # and the caller, while it packs

    def refuse(self, connection: int, channel: int, first: int, last: int) -> None:
        if (connection, channel) != (CONNECTION, self.channel):
            return
        if not first:  # without numbers: no room for any of them
            self._left.update(range(self._batch.count))
            return
        ordinals = range(
            max(first - self._first_seq, 0), min(last - self._first_seq + 1, self._batch.count)
        )
        self._left.update(ordinals)

    def lost(self) -> None:
        self._left.update(range(self._batch.count))
        self.confirmed()

    def confirmed(self) -> None:
        self.shards -= 1
        if not self.shards and self._links.links[self._shard].epoch == self._epoch:
            self._links.tell(
                self._shard, wire.Departed(self._batch.number, _runs(sorted(self._left)))
            )


class DeadLettering:
    """Of all shards, as far as they chose this front door."""

    def __init__(self, source: CatalogSource, links: ShardLinks) -> None:
        self._source = source
        self._links = links
        self._last_seq = self._last_channel = 0
        self._batches: deque[tuple[int, int, wire.DeadLetters]] = (
            deque()
        )  # shard, its epoch; bounded by the shards
        self._told_of: set[tuple[str, ...]] = set()
        self.published: dict[str, int] = {}  # by reason
        self.released = 0  # were due at the exchange that delayed them
        self.dropped = 0  # no exchange, no queue, or round in a cycle
        self.unroutable = 0  # of those released, what had no queue to go to

    def receive(self, shard: int, batch: wire.DeadLetters) -> None:
        self._batches.append((shard, self._links.links[shard].epoch, batch))

    def publish_next(self) -> bool:
        """One batch, so that clients have their turn between two; whether there are more."""
        if self._batches:
            shard, epoch, batch = self._batches.popleft()
            if epoch == self._links.links[shard].epoch:
                self._try(shard, batch)
        return bool(self._batches)

    def _try(self, shard: int, batch: wire.DeadLetters) -> None:
        try:
            self._publish(shard, batch)
        except Exception:  # one batch must not keep the others; the shard keeps it, and asks again
            log.exception(
                "dead letters of queue '%s' in vhost '%s' cannot be published",
                batch.queue,
                batch.vhost,
            )
            self._links.tell(shard, wire.Departed(batch.number, [(0, batch.count - 1)]))

    def _publish(self, shard: int, batch: wire.DeadLetters) -> None:
        first_seq = self._last_seq + 1
        self._last_seq += batch.count
        self._last_channel = (self._last_channel + 1) % CHANNELS
        answer = Answer(self._links, shard, batch, first_seq, self._last_channel)
        vhost = self._source.catalog.vhost(batch.vhost)
        if vhost is None:
            self.dropped += batch.count
        else:
            now_s = time.time()
            self._links.use_vhost(batch.vhost)
            if batch.reason != DUE:
                first_seq = first_seq if batch.insist else 0
                _Publishing(self._links, vhost, batch, answer.channel, first_seq, now_s, self).run()
            elif batch.exchange is not None and batch.exchange in vhost.exchanges:
                self._release(vhost, batch, batch.exchange, answer.channel, now_s)
            else:
                self.dropped += batch.count
                self.no_exchange(batch.vhost, batch.queue, batch.exchange)
            touched = self._links.packer.take_touched()
            answer.shards += touched.bit_count()
            self._links.wait_for(touched, answer)
        answer.confirmed()

    def _release(
        self, vhost: Vhost, batch: wire.DeadLetters, exchange: str, channel: int, now_s: float
    ) -> None:
        releasing = Releasing(self._links, vhost, batch, exchange, channel, now_s)
        releasing.run()
        self.unroutable += releasing.dropped
        self.released += batch.count

    def _is_news(self, *what: str) -> bool:
        if what in self._told_of:
            return False
        if len(self._told_of) >= TOLD_MAX:
            self._told_of.clear()
        self._told_of.add(what)
        return True

    def no_exchange(self, vhost: str, queue: str | int, exchange: str | None) -> None:
        """None: it has no dead-letter exchange, which is no news."""
        if exchange is not None and self._is_news("exchange", vhost, exchange):
            log.warning(
                "dead letters of queue '%s' in vhost '%s' are dropped: there is no exchange '%s'",
                queue, vhost, exchange,
            )  # fmt: skip

    def cycle(self, vhost: str, source: str, queue: str) -> None:
        if self._is_news("cycle", vhost, queue):
            log.warning(
                "messages dead-lettered from queue '%s' in vhost '%s' would go round to '%s' for ever: dropped",
                source, vhost, queue,
            )  # fmt: skip


class _Publishing:
    """One batch, being packed."""

    def __init__(
        self,
        links: ShardLinks,
        vhost: Vhost,
        batch: wire.DeadLetters,
        channel: int,
        first_seq: int,
        now_s: float,
        owner: DeadLettering,
    ) -> None:
        self._packer = links.packer
        self._vhost = vhost
        self._batch = batch
        self._channel = channel
        self._first_seq = first_seq
        self._now_s = now_s
        self._owner = owner
        self._copies: dict[_Look, Copy] = {}
        self._queue = batch.queue if isinstance(batch.queue, str) else _name_of(vhost, batch.queue)

    def run(self) -> None:
        """Neighbours that go to the same queues leave together."""
        parts: list[bytes] = []
        of: To | None = None
        first = ordinal = 0
        for look, flags, before, middle, after, body in contents.letters(
            self._batch.messages, self._batch.count
        ):
            copy = self._copies.get(look)
            if copy is None:
                copy = self._copies[look] = self._copy(*look)
            word = _U16.pack(flags & ~EXPIRATION | HEADERS)
            to = (
                copy.to
                if copy.by_key
                else self._to_alone(copy, b"".join((word, before, copy.shown, middle, after)))
            )
            props = (word, before, copy.headers if to.marks else copy.shown, middle, after)
            if to != of:
                self._pack(of, parts, first, ordinal - first)
                parts, of, first = [], to, ordinal
            parts += (_STORED.pack(len(body), sum(map(len, props))), copy.names, *props, body)
            ordinal += 1
        self._pack(of, parts, first, ordinal - first)

    def _pack(self, to: To | None, parts: list[bytes], first: int, count: int) -> None:
        if to is None:
            return
        if not to.targets:
            self._owner.dropped += count
            return
        self._owner.published[self._batch.reason] = (
            self._owner.published.get(self._batch.reason, 0) + count
        )
        data = b"".join(parts)
        # Where there are several queues the others would get it each time one of them is full: no insisting there.
        insists = self._first_seq and len(to.targets) == len(to.targets[0][1]) == 1
        for shard, ids, durable, due in to.targets:
            self._packer.add_stored(
                shard,
                list(ids),
                data,
                CONNECTION,
                self._channel,
                self._first_seq + first if insists else 0,
                due or int(self._now_s * 1000),
                0 if due else NO_TTL,
                delaying.NO_PRIORITY if due else to.priority,
                to.persistent,
                durable,  # whatever the message is: the old one is settled for it
                count,
                marks=to.marks,
            )

    def _copy(
        self, names: _Names, inside: bytes, expiration: bytes | None, mode: int, priority: int
    ) -> Copy:
        exchange, key = _split_names(names)
        batch, wish = self._batch, deaths.wish_of(inside)
        given = batch.routing_key if wish.routing_key is None else wish.routing_key
        to_exchange = batch.exchange if wish.exchange is None else wish.exchange
        said = None if expiration is None else expiration.decode("utf-8", "replace")
        death = deaths.Death(self._queue, batch.reason, int(self._now_s), exchange, key)
        recorded = deaths.record(inside, said, death, without_cc=given is not None)
        keys = [given] if given is not None else [key, *recorded.more_keys]
        key_bytes = _short(given.encode()) if given is not None else names[1 + names[0] :]
        is_there = to_exchange is not None and to_exchange in self._vhost.exchanges
        copy = Copy(
            _short((to_exchange or "").encode()) + key_bytes,
            recorded.headers,
            recorded.shown,
            keys,
            recorded.deaths,
            to_exchange or "",
            not is_there or goes_by_key(self._vhost.table, to_exchange or ""),
            To(
                (),
                mode == PERSISTENT,
                priority,
                packer.HAS_BCC if recorded.headers != recorded.shown else 0,
            ),
        )
        if not is_there:
            self._owner.no_exchange(batch.vhost, self._queue, to_exchange)
        elif copy.by_key:
            targets = self._to(copy, Message(keys[0], more_keys=tuple(keys[1:])))
            return copy._replace(to=targets)
        return copy

    def _to_alone(self, copy: Copy, props: bytes) -> To:
        """Where an exchange on the way looks at headers or properties, or asks chance."""
        said = properties.read(props)
        facts = {
            name: value for name in HASH_PROPERTIES if (value := getattr(said, name)) is not None
        }
        key, *more = copy.keys
        headers = said.headers or {}
        delay_ms = delaying.delay_of(headers) if delaying.HEADER in headers else 0
        if not delaying.is_possible(delay_ms, int(self._now_s * 1000)):
            delay_ms = 0  # nobody is there to be told
        message = Message(key, headers, facts, random.getrandbits(64), tuple(more), delay_ms)
        return self._to(copy, message)

    def _to(self, copy: Copy, message: Message) -> To:
        by_shard: dict[int, tuple[tuple[int, ...], bool]] = {}
        found: list[QueuePut] = []
        waits: list[_Target] = []
        routed = route_message(self._vhost.table, copy.exchange, message)
        for name in (*routed.queues, *routed.kept):
            if self._batch.reason != deaths.REJECTED and deaths.is_cycle(name, copy.deaths):
                self._owner.cycle(self._batch.vhost, self._queue, name)
                continue
            queue = self._vhost.queues.get(name)
            if queue is None:  # a stream of which nothing is known yet
                continue
            if delaying.is_delay_queue(name):
                waits.append(
                    (
                        queue.shard,
                        (queue.id,),
                        queue.durable,
                        int(self._now_s * 1000) + message.delay_ms,
                    )
                )
                continue
            found.append(queue)
        for shard, queue in keeping.named(found):
            ids, durable = by_shard.get(shard, ((), False))
            by_shard[shard] = ((*ids, queue.id), durable or queue.durable)
        targets = (
            *waits,
            *(
                (shard, ids[at : at + QUEUES_MAX], durable, 0)
                for shard, (ids, durable) in by_shard.items()
                for at in range(0, len(ids), QUEUES_MAX)
            ),
        )
        to_stream = any(is_stream(queue.arguments) for queue in found)
        return copy.to._replace(targets=targets, marks=0 if to_stream else copy.to.marks)


def _name_of(vhost: Vhost, queue_id: int) -> str:
    """ "" when it is gone."""
    return next((name for name, queue in vhost.queues.items() if queue.id == queue_id), "")


def _split_names(names: _Names) -> tuple[str, str]:
    n = names[0]
    return names[1 : n + 1].decode("utf-8", "replace"), names[n + 2 :].decode("utf-8", "replace")


def _short(data: bytes) -> bytes:
    return bytes([len(data)]) + data


def _runs(ordinals: list[int]) -> list[tuple[int, int]]:
    """First and last of each run of neighbours."""
    found: list[tuple[int, int]] = []
    for ordinal in ordinals:
        if found and found[-1][1] + 1 == ordinal:
            found[-1] = (found[-1][0], ordinal)
        else:
            found.append((ordinal, ordinal))
    return found
