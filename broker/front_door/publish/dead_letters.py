"""Messages a shard hands back: record x-death, route again, let the old copy be settled last.

A shard gives dead letters of one queue and one reason as a batch. Each gets its death into the
headers and is published to the queue's dead-letter exchange by the rules of any publish. The batch
is answered when every shard that got some of it has it on stable storage. What was not stored is
said in the answer, and comes again. Messages that look alike (properties, exchange, key) are
decided about once, neighbours for the same queues leave as one run.
"""

from __future__ import annotations

import logging
import random
import struct
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from shardmq.broker.amqp import contents, deaths, properties
from shardmq.broker.front_door.links.catalog_link import CatalogLink
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.publish.due_messages import CONNECTION, DueMessages
from shardmq.broker.front_door.publish.message import exchange_and_key
from shardmq.broker.front_door.publish.stored_runs import NO_TTL, PERSISTENT, StoredRun, pack
from shardmq.broker.front_door.publish.targets import QueueShut, by_shard
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import QueuePut, taking
from shardmq.broker.routing import Message, delaying, goes_by_key, route_message
from shardmq.broker.routing.spreading import hash_facts
from shardmq.broker.shared.reading import is_stream
from shardmq.shardd.wire import codec
from shardmq.shardd.wire import messages as wire

log = logging.getLogger("shardmq.broker.front_door.publish.dead_letters")

DUE = "delayed"  # the reason of messages that did not die, but have waited long enough
# Bits of the properties' flags.
HEADERS = 1 << 13
EXPIRATION = 1 << 8
CHANNELS = 1 << 16
# Warnings remembered, so that each is said once.
WARNINGS_MAX = 1000

_Names = bytes  # u8 n, exchange[n], u8 m, routing key[m]
# What messages have in common that look alike: drawn at contents.letters.
_Facts = tuple[_Names, bytes, bytes | None, int, int]
_STORED = struct.Struct("<II")
_U16 = struct.Struct(">H")


class Target(NamedTuple):
    """Queues of one shard.

    `due_ms` is the time until which the message waits there, 0 if it does not.
    """

    shard: int
    queue_ids: list[int]
    durable: bool  # one of the queues is
    due_ms: int


class DeadLetterRoute(NamedTuple):
    """The queues a dead letter goes to, and how it lies there. `marks` are those of its record."""

    targets: list[Target]
    persistent: bool
    priority: int
    marks: int = 0


class DeadLetter(NamedTuple):
    """The new headers and the route of dead letters that look alike."""

    names: _Names
    headers: bytes  # with their length before them
    shown: bytes  # the headers without BCC, which only queues keep
    keys: list[str]
    deaths: list[tuple[str, str]]
    exchange: str
    by_key: bool  # the route is the same for all that look alike
    route: DeadLetterRoute  # without targets where each message is routed for itself


class Departure:
    """A batch on its way to stable storage. It is answered when all shards have answered."""

    in_sequence = False

    def __init__(
        self,
        batch: wire.DeadLetters,
        channel: int,
        first_seq: int,
        answer: Callable[[wire.DeadLettersPublished], None],
    ) -> None:
        """Begin. By `channel`, which is no client's, the batch knows what is refused of it."""
        self._batch = batch
        self._channel = channel
        self._first_seq = first_seq
        self._answer = answer
        self._left: set[int] = set()  # ordinals of messages that were not stored
        self.shards = 1  # batches to wait for, and the caller while it packs

    def refuse(self, connection: int, channel: int, first: int, last: int) -> None:
        if (connection, channel) != (CONNECTION, self._channel):
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
        if not self.shards:
            self._answer(wire.DeadLettersPublished(self._batch.number, _runs(sorted(self._left))))


class DeadLettering:
    """The dead letters and due messages of all shards that chose this front door for them."""

    def __init__(self, source: CatalogLink, links: ShardLinks) -> None:
        self._source = source
        self._links = links
        self._last_seq = self._last_channel = 0
        # Shard, its epoch, batch. The shards bound their number.
        self._batches: deque[tuple[int, int, wire.DeadLetters]] = deque()
        self._warned: set[tuple[str, ...]] = set()
        self.published: dict[str, int] = {}  # by reason
        self.released = 0  # messages that were due at the exchange that delayed them
        self.dropped = 0  # no exchange, no queue, or round in a cycle
        self.unroutable = 0  # released messages without a queue

    # -- what is done ----------------------------------------------------------------------------

    def receive(self, shard: int, batch: wire.DeadLetters) -> None:
        """Take a batch that comes from a shard; publish_next() publishes it."""
        self._batches.append((shard, self._links.links[shard].epoch, batch))

    def publish_next(self) -> bool:
        """Publish one batch; clients are served before the next. Return whether there are more."""
        if self._batches:
            shard, epoch, batch = self._batches.popleft()
            if epoch == self._links.links[shard].epoch:
                self._publish(batch, partial(self._answer, shard, epoch))
        return bool(self._batches)

    def _publish(
        self, batch: wire.DeadLetters, answer: Callable[[wire.DeadLettersPublished], None]
    ) -> None:
        first_seq = self._last_seq + 1
        self._last_seq += batch.count
        channel = self._last_channel = (self._last_channel + 1) % CHANNELS
        departure = Departure(batch, channel, first_seq, answer)
        try:
            runs = self._decide(batch, channel, first_seq, time.time())
            touched = pack(self._links, batch.vhost, runs) if runs else 0
        except QueueShut:  # the shard hands the batch over again
            answer(wire.DeadLettersPublished(batch.number, [(0, batch.count - 1)]))
            return
        except Exception:  # one batch must not keep the others; the shard keeps it, and asks again
            log.exception(
                "dead letters of queue '%s' in vhost '%s' cannot be published",
                batch.queue,
                batch.vhost,
            )
            answer(wire.DeadLettersPublished(batch.number, [(0, batch.count - 1)]))
            return
        departure.shards += touched.bit_count()
        self._links.wait_for(touched, departure)
        departure.confirmed()

    def _answer(self, shard: int, epoch: int, departed: wire.DeadLettersPublished) -> None:
        """Answer the process of a shard that handed a batch over, if that process is there."""
        if self._links.links[shard].epoch == epoch:
            self._links.tell(shard, departed)

    # -- what is decided -------------------------------------------------------------------------

    def _decide(
        self, batch: wire.DeadLetters, channel: int, first_seq: int, now_s: float
    ) -> list[StoredRun]:
        """Return what is to be published of a batch, and count it."""
        vhost = self._source.catalog.vhost(batch.vhost)
        if vhost is None:
            self.dropped += batch.count
        elif batch.reason != DUE:
            letters = DeadLetters(vhost, batch, channel, first_seq if batch.insist else 0, now_s)
            runs = letters.runs()
            self.dropped += letters.dropped
            if letters.published:
                before = self.published.get(batch.reason, 0)
                self.published[batch.reason] = before + letters.published
            for exchange in letters.missing_exchanges:
                self._warn_of_exchange(batch.vhost, letters.queue, exchange)
            for queue in letters.cycles:
                self._warn_of_cycle(batch.vhost, letters.queue, queue)
            return runs
        elif batch.exchange is not None and batch.exchange in vhost.exchanges:
            due = DueMessages(vhost, batch, batch.exchange, channel, now_s)
            runs = due.runs()
            self.unroutable += due.dropped
            self.released += batch.count
            return runs
        else:
            self.dropped += batch.count
            if batch.exchange is not None:
                self._warn_of_exchange(batch.vhost, batch.queue, batch.exchange)
        return []

    def _is_news(self, *what: str) -> bool:
        if what in self._warned:
            return False
        if len(self._warned) >= WARNINGS_MAX:
            self._warned.clear()
        self._warned.add(what)
        return True

    def _warn_of_exchange(self, vhost: str, queue: str | int, exchange: str) -> None:
        if self._is_news("exchange", vhost, exchange):
            log.warning(
                "dead letters of queue '%s' in vhost '%s' are dropped: there is no exchange '%s'",
                queue, vhost, exchange,
            )  # fmt: skip

    def _warn_of_cycle(self, vhost: str, source: str, queue: str) -> None:
        if self._is_news("cycle", vhost, queue):
            log.warning(
                "messages dead-lettered from queue '%s' in vhost '%s'"
                " would go round to '%s' for ever: dropped",
                source, vhost, queue,
            )  # fmt: skip


class DeadLetters:
    """The decisions about a batch of dead letters."""

    def __init__(
        self,
        vhost: Vhost,
        batch: wire.DeadLetters,
        channel: int,
        first_seq: int,
        now_s: float,
    ) -> None:
        """Begin. The messages have confirm numbers from `first_seq` on, none if that is 0."""
        self._vhost = vhost
        self._batch = batch
        self._channel = channel
        self._first_seq = first_seq
        self._now_s = now_s
        self._known: dict[_Facts, DeadLetter] = {}
        self._runs: list[StoredRun] = []
        self.queue = batch.queue if isinstance(batch.queue, str) else _name_of(vhost, batch.queue)
        self.published = self.dropped = 0
        self.missing_exchanges: set[str] = set()
        self.cycles: set[str] = set()  # queues to which some would go round for ever

    def runs(self) -> list[StoredRun]:
        """Return what is to be published. Neighbours that go to the same queues are one run."""
        parts: list[bytes] = []
        common: DeadLetterRoute | None = None
        first = ordinal = 0
        for facts, flags, before, middle, after, body in contents.letters(
            self._batch.messages, self._batch.count
        ):
            letter = self._known.get(facts)
            if letter is None:
                letter = self._known[facts] = self._letter(*facts)
            word = _U16.pack(flags & ~EXPIRATION | HEADERS)
            route = letter.route
            if not letter.by_key:
                route = self._route_alone(
                    letter, b"".join((word, before, letter.shown, middle, after))
                )
            headers = letter.headers if route.marks else letter.shown
            props = (word, before, headers, middle, after)
            if route != common:
                self._add(common, parts, first, ordinal - first)
                parts, common, first = [], route, ordinal
            parts += (_STORED.pack(len(body), sum(map(len, props))), letter.names, *props, body)
            ordinal += 1
        self._add(common, parts, first, ordinal - first)
        return self._runs

    def _add(
        self, route: DeadLetterRoute | None, parts: list[bytes], first: int, count: int
    ) -> None:
        if route is None:
            return
        if not route.targets:
            self.dropped += count
            return
        self.published += count
        data = b"".join(parts)
        # A queue that is full has a numbered message come again, to all its queues: so there must
        # be one queue only.
        insists = self._first_seq and len(route.targets) == len(route.targets[0].queue_ids) == 1
        for shard, queue_ids, durable, due_ms in route.targets:
            run = (
                shard,
                queue_ids,
                data,
                CONNECTION,
                self._channel,
                self._first_seq + first if insists else 0,
                due_ms or int(self._now_s * 1000),
                0 if due_ms else NO_TTL,
                delaying.NO_PRIORITY if due_ms else route.priority,
                route.persistent,
                durable,  # for transient messages too: the old copy is settled for this one
                count,
                False,
                route.marks,
            )
            self._runs.append(run)

    def _letter(
        self, names: _Names, inside: bytes, expiration: bytes | None, mode: int, priority: int
    ) -> DeadLetter:
        exchange, key = exchange_and_key(names)
        batch, requested = self._batch, deaths.requested_route(inside)
        given = batch.routing_key if requested.routing_key is None else requested.routing_key
        to_exchange = batch.exchange if requested.exchange is None else requested.exchange
        said = None if expiration is None else expiration.decode("utf-8", "replace")
        death = deaths.Death(self.queue, batch.reason, int(self._now_s), exchange, key)
        recorded = deaths.record(inside, said, death, without_cc=given is not None)
        keys = [given] if given is not None else [key, *recorded.more_keys]
        key_bytes = _short(given.encode()) if given is not None else names[1 + names[0] :]
        is_there = to_exchange is not None and to_exchange in self._vhost.exchanges
        marks = codec.HAS_BCC if recorded.headers != recorded.shown else 0
        letter = DeadLetter(
            _short((to_exchange or "").encode()) + key_bytes,
            recorded.headers,
            recorded.shown,
            keys,
            recorded.deaths,
            to_exchange or "",
            not is_there or goes_by_key(self._vhost.table, to_exchange or ""),
            DeadLetterRoute([], mode == PERSISTENT, priority, marks),
        )
        if not is_there:
            if to_exchange is not None:  # else the queue has no dead-letter exchange
                self.missing_exchanges.add(to_exchange)
        elif letter.by_key:
            route = self._route(letter, Message(keys[0], more_keys=tuple(keys[1:])))
            return letter._replace(route=route)
        return letter

    def _route_alone(self, letter: DeadLetter, props: bytes) -> DeadLetterRoute:
        """Route one message where an exchange looks at headers or properties, or asks chance."""
        said = properties.read(props)
        key, *more = letter.keys
        headers = said.headers or {}
        delay_ms = delaying.delay_of(headers) if delaying.HEADER in headers else 0
        if not delaying.is_possible(delay_ms, int(self._now_s * 1000)):
            delay_ms = 0  # there is no publisher who could be told
        message = Message(
            key, headers, hash_facts(said), random.getrandbits(64), tuple(more), delay_ms
        )
        return self._route(letter, message)

    def _route(self, letter: DeadLetter, message: Message) -> DeadLetterRoute:
        found: list[QueuePut] = []
        targets: list[Target] = []
        routed = route_message(self._vhost.table, letter.exchange, message)
        for name in (*routed.queues, *routed.kept):
            if self._batch.reason != deaths.REJECTED and deaths.is_cycle(name, letter.deaths):
                self.cycles.add(name)
                continue
            queue = self._vhost.queues.get(name)
            if queue is None:  # a stream of which nothing is known yet
                continue
            if delaying.is_delay_queue(name):
                due_ms = int(self._now_s * 1000) + message.delay_ms
                targets.append(Target(queue.shard, [queue.id], queue.durable, due_ms))
                continue
            found.append(taking(queue))
        targets += [Target(*group, 0) for group in by_shard(found)]
        to_stream = any(is_stream(queue.arguments) for queue in found)
        return letter.route._replace(targets=targets, marks=0 if to_stream else letter.route.marks)


def _name_of(vhost: Vhost, queue_id: int) -> str:
    """Return the name of a queue, "" when it is gone."""
    return next((name for name, queue in vhost.queues.items() if queue.id == queue_id), "")


def _short(data: bytes) -> bytes:
    return bytes([len(data)]) + data


def _runs(ordinals: list[int]) -> list[tuple[int, int]]:
    """Return first and last of each run of neighbours."""
    found: list[tuple[int, int]] = []
    for ordinal in ordinals:
        if found and found[-1][1] + 1 == ordinal:
            found[-1] = (found[-1][0], ordinal)
        else:
            found.append((ordinal, ordinal))
    return found
