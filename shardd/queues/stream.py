"""Keep a stream: a queue whose messages stay after they were read.

Consumers are offsets in a log, and each consumer reads the whole log. A published message can be
read when it is on stable storage. It goes with its segment, by age or size. Messages that a
consumer has not settled count against its prefetch. Ack and reject are the same here. A requeue
brings the message to the same consumer again.

A consumer with a name has a position in the log: the lowest offset that it has not settled, in
whatever order it settles the others. A message that it gives back stays unsettled, also after the
consumer was cancelled. The next flush of the log writes the position, and a sync follows within a
second. So a power cut may set the position back by about a second, never forward.

A `StreamQueue` is a kind of `Queue`: a shard publishes to it, serves it and settles as with any
other queue, though this file replaces nearly every method. `store` has the messages of the other
queues of the vhost. A message of a stream is there only if it went to other queues too, and the
stream settles it at once.
"""

from __future__ import annotations

import re
from array import array
from bisect import insort
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from shardmq.shardd.queues.consumers import NO_STOP, Consumer, Reader
from shardmq.shardd.queues.dispatch import Outlet
from shardmq.shardd.queues.limits import UNLIMITED, Limits
from shardmq.shardd.queues.queue import Queue
from shardmq.shardd.queues.state import total
from shardmq.shardd.queues.store import Arrival, Store
from shardmq.shardd.queues.unacked import Getter

SEGMENT_BYTES: Final = 500_000_000  # RabbitMQ's default
SEGMENT_BYTES_MIN: Final = 4096
SEGMENT_BYTES_MAX: Final = 3_000_000_000
# How often the queue looks for segments that have become too old.
RETAIN_EACH_MS: Final = 1000
AGE = re.compile(r"(\d+)([YMDhms])")
UNIT_S: Final = {"Y": 365 * 86400, "M": 30 * 86400, "D": 86400, "h": 3600, "m": 60, "s": 1}
# Names of consumers are AMQP short strings.
NAME_BYTES_MAX: Final = 255
# The most names with a position in one stream. Beyond it, names of consumers that read elsewhere
# are refused.
PLACED_MAX: Final = 1000


class Batch(Protocol):
    @property
    def blob(self) -> bytes: ...
    @property
    def entries(self) -> array[int]: ...
    @property
    def sizes(self) -> array[int]: ...
    @property
    def next_offset(self) -> int: ...


class AppendResult(Protocol):
    """The result of an append of a batch of records.

    `records` are the records that were appended, `count` the number of their messages. `repeated`
    is the number of messages that were there already. The other lists have ordinals in the batch:
    of refused messages, of messages that were there already (`known`), and of the known messages
    that had another content (`altered`).
    """

    @property
    def records(self) -> memoryview: ...
    @property
    def count(self) -> int: ...
    @property
    def repeated(self) -> int: ...
    @property
    def refused(self) -> list[int]: ...
    @property
    def known(self) -> list[int]: ...
    @property
    def altered(self) -> list[int]: ...


class Positions(Protocol):
    """The positions of the named consumers of a stream: the offset that each wants next."""

    @property
    def offsets(self) -> Mapping[bytes, int]: ...
    def get(self, name: bytes) -> int | None: ...
    def set(self, name: bytes, offset: int) -> None: ...
    def forget(self, name: bytes) -> None: ...


class Copies(Protocol):
    """The copies of a log: shardd/store/streams/copies.py explains them."""

    lacks_room: bool

    def copied_from(self, offset: int, bytes_max: int) -> Any: ...
    def goes_on(self, first: int, before: int | None) -> bool: ...
    def take(self, chunks: bytes, oldest: int, newest_before: int) -> None: ...
    def take_places(self, positions: Mapping[bytes, int], producers: bytes) -> None: ...


class ProducersTable(Protocol):
    def all_places(self) -> bytes:
        """Return how far each producer has come, for another stream."""


class Producers(Protocol):
    @property
    def table(self) -> ProducersTable: ...


class Stream(Protocol):
    """The log of a stream. shardd.store implements it."""

    next_offset: int
    committed_offset: int
    segment_bytes: int

    @property
    def positions(self) -> Positions: ...
    @property
    def producers(self) -> Producers: ...
    @property
    def first_offset(self) -> int: ...
    @property
    def last_chunk_offset(self) -> int: ...
    @property
    def disk_bytes(self) -> int: ...
    @property
    def gaps(self) -> list[tuple[int, int]]: ...
    def forget_producers(self, heard_before: int) -> int: ...
    def find(self, timestamp: int) -> int: ...
    def retain(
        self,
        now: int,
        *,
        max_bytes: int | None = None,
        max_age_ms: int | None = None,
        max_messages: int | None = None,
    ) -> int: ...
    def truncate(self) -> bool: ...
    @property
    def copies(self) -> Copies: ...

    directory: str

    def flush(self) -> None:
        """Write all that is only in memory to the files."""

    def growing(self) -> Mapping[str, int]:
        """Return the name of the segment that is written to again, with its size."""

    def begin_sync(self) -> Any: ...
    def finish_sync(self, job: Any) -> None: ...
    def begin_settled_sync(self) -> Any: ...
    def finish_settled_sync(self, job: Any) -> None: ...
    def close(self) -> None: ...
    def delete_all(self) -> None: ...
    def stats(self) -> dict[str, int]: ...


class Log(Protocol):
    """The queue's access to a stream: it appends records and reads batches.

    shardd.store implements it.
    """

    @property
    def stream(self) -> Stream: ...
    def append_records(
        self, records: memoryview, queue_id: int, alone: bool, in_sequence: bool = False
    ) -> AppendResult: ...
    def named_in(self, records: memoryview, queue_id: int, other: int) -> list[tuple[int, int]]: ...
    def filters(self, values: Sequence[str], unfiltered: bool) -> array[int] | None: ...
    def batch(
        self,
        offset: int,
        bytes_max: int,
        count_max: int,
        wanted: array[int] | None = None,
        below: int = NO_STOP,
    ) -> Batch: ...


class Retention(NamedTuple):
    """The arguments of a stream that bound it. None means not bounded."""

    max_bytes: int | None = None
    max_age_ms: int | None = None
    max_messages: int | None = None
    segment_bytes: int = SEGMENT_BYTES

    @property
    def bounded(self) -> bool:
        return self[:3] != (None, None, None)


def _note(ranges: list[tuple[int, int]], first: int, behind: int) -> None:
    """Add the range [first, behind) to ranges. Neighbouring ranges become one."""
    if ranges and ranges[-1][1] == first:
        ranges[-1] = (ranges[-1][0], behind)
    else:
        ranges.append((first, behind))


def is_stream(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("x-queue-type") == "stream"


def retention_of(arguments: Mapping[str, Any]) -> Retention:
    """Return the limits in the arguments of a stream.

    The controller has checked the values. A value that is not a number counts as not given.
    """
    segment_bytes = _number(arguments, "x-stream-max-segment-size-bytes") or SEGMENT_BYTES
    return Retention(
        max_bytes=_number(arguments, "x-max-length-bytes"),
        max_age_ms=age_ms(arguments.get("x-max-age")),
        max_messages=_number(arguments, "x-max-length"),
        segment_bytes=min(max(segment_bytes, SEGMENT_BYTES_MIN), SEGMENT_BYTES_MAX),
    )


def age_ms(text: object) -> int | None:
    found = AGE.fullmatch(text) if isinstance(text, str) else None
    return int(found[1]) * UNIT_S[found[2]] * 1000 if found else None


def _number(arguments: Mapping[str, Any], name: str) -> int | None:
    value = arguments.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return value


class StreamQueue(Queue):
    """A stream as a queue of a shard.

    `store` must outlive the queue. `log` is open and belongs to the queue alone.
    """

    __slots__ = ("_look_at", "_turn", "is_arriving", "log", "retention", "watched")

    keeps_in_store = False

    def __init__(
        self, queue_id: int, store: Store, log: Log, retention: Retention, now: int = 0
    ) -> None:
        # Without limits no rule applies: a stream does not expire, time out or drop any message.
        super().__init__(queue_id, store, UNLIMITED, durable=True, now=now)
        self.log = log
        self.retention = retention
        # Another shard has the stream, and gives its messages to this one.
        self.is_arriving = False
        self._look_at = 0  # the time at which retention is applied next, in ms
        self._turn = 0
        # By queue and watcher: ranges [first, behind the last) of offsets of messages that went to
        # that queue too.
        self.watched: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._recount()

    def _recount(self) -> None:
        self.backlog.ready_count = self.log.stream.committed_offset - self.log.stream.first_offset
        self.backlog.ready_bytes = self.log.stream.disk_bytes

    # -- in ----------------------------------------------------------------------------------------

    def append(self, records: memoryview, alone: bool, in_sequence: bool = False) -> AppendResult:
        """Append the records of a PUBLISH that name this stream.

        `alone` says that all records name it.
        """
        first = self.log.stream.next_offset
        taken = self.log.append_records(records, self.id, alone, in_sequence)
        self.counters.published += taken.count
        self.counters.repeated += taken.repeated
        for (other, _), ranges in self.watched.items():
            for start, count in self.log.named_in(taken.records, self.id, other):
                _note(ranges, first + start, first + start + count)
        return taken

    def pull(
        self, watch: int, who: int, offset: int, stop: int, bytes_max: int
    ) -> tuple[bytes, int, int]:
        """Return (offsets and messages, how many, next offset) of some messages of [offset, stop).

        Messages that went to the queue `watch` too are left out, as the watcher `who` asked.
        """
        offset = max(offset, self.log.stream.first_offset)
        for first, behind in self.watched.get((watch, who), ()):
            if offset < first:
                stop = min(stop, first)
                break
            offset = max(offset, min(behind, stop))
        if offset >= min(stop, self.log.stream.committed_offset):
            return b"", 0, offset
        batch = self.log.batch(offset, bytes_max, stop - offset)
        return batch.blob, len(batch.entries), batch.next_offset

    def newest(self) -> int:
        """Return the offset behind the last message, whether it is on stable storage or not."""
        return self.log.stream.next_offset

    def count_unsettled_until(self, last: int) -> int:
        """Return how many messages below the offset `last` are not on stable storage."""
        return max(0, last - self.log.stream.committed_offset)

    def publish(self, arrival: Arrival, now: int, reserved: bool = False) -> list[int] | None:
        """Settle messages that went to other queues of the vhost too.

        So the messages are in the store of the vhost, where the stream does not need them.
        """
        self.store.settle(self.id, arrival.entries, False)
        return None

    def begin_sync(self) -> Any:
        """Begin to sync the appended messages; return the job.

        The messages can be read after the job has run and `finish_sync` was called. If the job is
        None, they can be read at once.
        """
        job = self.log.stream.begin_sync()
        if job is None:
            self._recount()
        return job

    def finish_sync(self, job: Any) -> None:
        self.log.stream.finish_sync(job)
        self._look_at = 0
        self._recount()

    # -- out ---------------------------------------------------------------------------------------

    def new_reader(
        self, start: str, value: int, name: str, filters: Sequence[str], unfiltered: bool, now: int
    ) -> tuple[int, bytes, array[int] | None]:
        """Return (offset, name, wanted) for a reader that begins as drawn at wire.ReadFrom.

        `now` is in ms since the epoch.
        """
        log = self.log.stream
        key = name.encode()[:NAME_BYTES_MAX]
        stored = log.positions.get(key) if key else None
        if stored is not None and start != "at":
            offset = stored
        elif start == "first":
            offset = log.first_offset
        elif start == "last":
            offset = log.last_chunk_offset
        elif start in ("offset", "at"):
            offset = value
        elif start == "timestamp":
            offset = log.find(value)
        elif start == "ago":
            offset = log.find(now - value)
        elif start == "back":
            offset = log.committed_offset - value
        else:
            offset = log.committed_offset
        return (
            min(max(offset, log.first_offset), log.committed_offset),
            key,
            self.log.filters(filters, unfiltered),
        )

    def place(self, name: bytes, offset: int | None) -> None:
        """Set the position of a name whose consumers read the stream elsewhere.

        An `offset` of None forgets the name. Raise ValueError if the position may not be set.
        """
        if any(
            isinstance(holder, Reader) and holder.name == name for holder in self.dispatch.holders
        ):
            raise ValueError(
                "consumers are reading under this name, or hold messages they have read"
            )
        if offset is None:
            self.log.stream.positions.forget(name)
            return
        if offset > self.log.stream.committed_offset:
            raise ValueError(
                f"offset {offset} is beyond its end, {self.log.stream.committed_offset}"
            )
        if (
            self.log.stream.positions.get(name) is None
            and len(self.log.stream.positions.offsets) >= PLACED_MAX
        ):
            raise ValueError(f"{PLACED_MAX} names have a position in it already")
        self.log.stream.positions.set(name, offset)

    def change_positions(
        self, positions: Mapping[bytes, int], instead_of: Mapping[bytes, int]
    ) -> None:
        """Set these positions, and forget other names of `instead_of`, where that still holds."""
        stored = self.log.stream.positions
        for name in {**instead_of, **positions}:
            if stored.get(name) != instead_of.get(name):
                continue
            if name in positions:
                stored.set(name, positions[name])
            else:
                stored.forget(name)

    def deliver(self, now: int, outlet: Outlet, bytes_max: int) -> bool:
        """Give each reader in turn a piece; return whether there may be more to hand out now."""
        if now >= self._look_at:
            self._retain(now)
        consumers = self.consumers
        given = 0
        progress = False
        readers = consumers.all
        for _ in range(len(readers)):
            if given >= bytes_max:
                return True
            self._turn = (self._turn + 1) % len(readers)
            reader = readers[self._turn]
            assert isinstance(reader, Reader)
            if self.has_for(reader):
                before = reader.offset
                given += self._feed(reader, bytes_max - given, outlet)
                progress = progress or reader.offset > before
            if reader.mark is not None:
                self._tell_passed(reader, outlet)
        if progress or given > 0:
            return True
        if consumers.has_allotments:
            self.dispatch.end_pass(outlet)
        return False

    def has_for(self, consumer: Consumer) -> bool:
        assert isinstance(consumer, Reader)
        return bool(consumer.again) or consumer.offset < min(
            self.log.stream.committed_offset, consumer.stop
        )

    @staticmethod
    def _tell_passed(reader: Reader, outlet: Outlet) -> None:
        position = reader.position
        if reader.mark is not None and position >= reader.mark:
            reader.mark = None
            outlet.passed(reader, position)

    def _feed(self, reader: Reader, bytes_max: int, outlet: Outlet) -> int:
        """Give a reader as many messages as fit; return the bytes handed out."""
        count = reader.room()
        if count <= 0:
            return 0
        room = min(reader.window.room, bytes_max)
        if reader.again:
            return self._feed_again(reader, room, count, outlet)
        seen = reader.offset < reader.seen_below
        if seen:
            count = min(count, reader.seen_below - reader.offset)
        batch = self.log.batch(reader.offset, room, count, reader.filters, reader.stop)
        if batch.next_offset == reader.offset and reader.stop <= self.log.stream.committed_offset:
            reader.offset = reader.stop  # the log is damaged up to there
        else:
            reader.offset = batch.next_offset
        if not batch.entries:
            self._note(reader)
            # A search for wanted messages may be long, so other queues of the consumer look too.
            if reader.allotment is not None and reader.allotment.order is not None:
                reader.allotment.order.end(self, wants=True, waits=False)
            return 0
        return self._hand_out(reader, batch, seen, outlet)

    def _feed_again(self, reader: Reader, room: int, count: int, outlet: Outlet) -> int:
        """Give a reader messages again that it gave back, neighbours together; return their bytes.

        Messages that retention has taken meanwhile are passed over.
        """
        first = reader.again[0]
        many = 1
        while many < min(count, len(reader.again)) and reader.again[many] == first + many:
            many += 1
        if first < self.log.stream.first_offset:
            del reader.again[0]
            return 0
        batch = self.log.batch(first, room, many)
        if not batch.entries or batch.entries[0] != first + 1:
            del reader.again[0]  # the message is damaged, and is passed over
            return 0
        del reader.again[: len(batch.entries)]
        reader.came_again.update(entry - 1 for entry in batch.entries)
        return self._hand_out(reader, batch, True, outlet)

    def _hand_out(self, reader: Reader, batch: Batch, redelivered: bool, outlet: Outlet) -> int:
        count, size = len(batch.entries), total(batch.sizes)
        number = reader.unacked.add(batch.entries, batch.sizes)
        outlet.deliver(reader, number, redelivered, count, batch.blob)
        reader.window.room -= len(batch.blob)
        reader.window.served = self
        if reader.allotment is not None:
            reader.allotment.used += count
        self.counters.delivered += count
        self.counters.redelivered += count if redelivered else 0
        self.backlog.unacked_count += count
        self.backlog.unacked_bytes += size
        return len(batch.blob)

    def get(self, getter: Getter | None, now: int) -> tuple[bytes, int, bool, int] | None:
        """Return None: front doors refuse basic.get on a stream."""
        return None

    # -- back --------------------------------------------------------------------------------------

    def settled(
        self, reader: Consumer, kind_is_ack: bool, entries: array[int], size: int, again: bool
    ) -> None:
        """Note that a reader settled these entries. `again` says that it gets them again."""
        assert isinstance(reader, Reader)
        self.dispatch.taken_back(entries, size)
        self.counters.acked += len(entries) if kind_is_ack else 0
        if reader.came_again:
            reader.came_again.difference_update(entry - 1 for entry in entries)
        if again:
            for entry in entries:
                insort(reader.again, entry - 1)
        self._note(reader)

    def _note(self, reader: Reader) -> None:
        if reader.name:
            self.log.stream.positions.set(reader.name, reader.position)

    def release(self, consumer: Consumer, now: int) -> None:
        """Remove a reader that is gone for good.

        Its position stays at the lowest offset that it had not settled.
        """
        assert isinstance(consumer, Reader)
        self.detach(consumer, now)
        self._note(consumer)
        entries, size = consumer.unacked.take_all()
        self.dispatch.taken_back(entries, size)
        self.dispatch.holders.pop(consumer, None)

    # -- limits ------------------------------------------------------------------------------------

    def _retain(self, now: int) -> None:
        keep = self.retention
        self._look_at = now + RETAIN_EACH_MS
        if keep.bounded:
            self.log.stream.retain(
                now,
                max_bytes=keep.max_bytes,
                max_age_ms=keep.max_age_ms,
                max_messages=keep.max_messages,
            )
            self._recount()

    def next_due(self) -> int | None:
        """Return when the oldest segment may have become too old, in ms."""
        return self._look_at if self.retention.max_age_ms is not None else None

    def change(self, limits: Limits, now: int) -> None:
        """Note that the queue was declared again. A stream has a retention in place of limits."""
        self.last_used = now

    def change_retention(self, retention: Retention) -> None:
        self.retention = retention
        self.log.stream.segment_bytes = retention.segment_bytes
        self._look_at = 0

    # -- the whole stream --------------------------------------------------------------------------

    def purge(self) -> int:
        """Return how many messages there are, and count none of them from now on.

        `purge_now` removes the messages, and offsets go on. The caller must call it when no sync is
        under way.
        """
        count = self.backlog.ready_count
        self.backlog.ready_count = self.backlog.ready_bytes = 0
        return count

    def purge_now(self) -> bool:
        """Remove all messages; return False if the disk is too full, and they stay."""
        all_went = self.log.stream.truncate()
        self._recount()
        return all_went

    def live(self) -> array[int]:
        """Return no entries: a stream has no messages in the store."""
        return array("Q")

    def drop(self) -> int:
        """Delete the queue; return how many messages it had. The caller deletes the log."""
        count = self.backlog.ready_count
        for holder in self.dispatch.holders:
            if isinstance(holder, Consumer):
                self.dispatch.forget_order(holder)
                holder.unacked.take_all()
        self.closed = self.deleted = True
        self.backlog.ready_count = self.backlog.ready_bytes = self.backlog.unacked_count = (
            self.backlog.unacked_bytes
        ) = 0
        return count
