"""A store in a dict, for tests of queues and shards.

It counts everything that must not be settled twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

from shardmq.shardd.queues.entry import HAS_BCC, LASTING_KIND, OWN_LETTERS, TRANSIENT_KIND
from shardmq.shardd.store.format.sequences import Screened, Sequences
from shardmq.shardd.store.streams import StreamCache, StreamLog
from shardmq.shardd.store.streams.queue_log import QueueLog
from tests.reference.wire import records_of
from tests.support.faulty_files import FaultyFiles

# A look at no more messages is whole, as one at little data is.
LOOK_WHOLE_MAX = 16


@dataclass
class DictArrival:
    queue_id: int
    entries: array[int]
    body_bytes: int
    facts: array[int] | None = None
    indexes: array[int] | None = None
    times: array[int] | None = None
    marks: int = 0
    kinds: int = 0


class DictJob:
    def __init__(self) -> None:
        self.ran = False

    def run(self) -> None:
        self.ran = True


class DictStore:
    def __init__(self) -> None:
        self.messages: dict[int, bytes] = {}
        self.sequences = Sequences()
        self.live: dict[int, set[int]] = {}
        self.dirty = False
        self.last = 1 << 32
        self.full = False
        self.closes: list[dict[int, array[int]] | None] = []
        self.closed: dict[int, array[int]] | None = None
        self.returns: dict[tuple[int, int], int] = {}
        self.recovered: dict[int, DictArrival] = {}
        self.notes: list[tuple[int, int]] = []

    def put(self, queue_ids: Collection[int], message: bytes) -> int:
        self.last += 16
        self.messages[self.last] = message
        for queue_id in queue_ids:
            self.live.setdefault(queue_id, set()).add(self.last)
        return self.last

    def recover(
        self, queue_ids: Collection[int], timed: Collection[int] = (), progress: object = None
    ) -> dict[int, DictArrival]:
        return {
            queue_id: self.recovered[queue_id]
            for queue_id in queue_ids
            if queue_id in self.recovered
        }

    def append(
        self,
        records: bytes | bytearray | memoryview,
        indexes: bool = False,
        in_sequence: bool = False,
    ) -> list[DictArrival]:
        if self.full:
            from shardmq.shardd.stores import NoRoom

            raise NoRoom
        found: dict[int, DictArrival] = {}
        ordinal = 0
        for stamp, ttl, priority, flags, ids, messages, _ in records_of(bytes(records)):
            fact = (0 if ttl == 0xFFFFFFFF else stamp + ttl) | (
                0 if priority == 0xFF else priority
            ) << 56
            for message in messages:
                entry = self.put(ids, message)
                for queue_id in ids:
                    arrival = found.setdefault(
                        queue_id, DictArrival(queue_id, array("Q"), 0, array("Q"), array("I"))
                    )
                    assert arrival.facts is not None and arrival.indexes is not None
                    arrival.entries.append(entry)
                    arrival.marks |= flags & (HAS_BCC | OWN_LETTERS)
                    arrival.kinds |= LASTING_KIND if flags & 1 else TRANSIENT_KIND
                    arrival.body_bytes += int.from_bytes(message[:4], "little")
                    arrival.facts.append(fact)
                    arrival.indexes.append(ordinal)
                ordinal += 1
        for arrival in found.values():
            if not any(arrival.facts or ()):
                arrival.facts = None
        self.dirty = True
        return list(found.values())

    def screen(
        self, records: memoryview, rooms: Mapping[int, tuple[int, int | None, int, int | None]]
    ) -> Screened:
        return self.sequences.screen(records, rooms)

    def unscreen(self) -> None:
        self.sequences.undo()

    def forget_producers(self, heard_before: int) -> int:
        return self.sequences.sweep(heard_before)

    def read(self, entries: array[int], bytes_max: int) -> tuple[bytes, array[int]]:
        blobs: list[bytes] = []
        for entry in entries:
            message = self.messages[entry & ~15]
            if blobs and sum(map(len, blobs)) + len(message) > bytes_max:
                break
            blobs.append(message)
        return b"".join(blobs), array("I", [int.from_bytes(blob[:4], "little") for blob in blobs])

    def look(
        self, entries: array[int], bytes_max: int, whole: bool = True
    ) -> tuple[bytes, array[int]]:
        """Read the entries; if the answer need not be whole, it may have fewer of them.

        It ends at a place that the caller cannot know.
        """
        together = (
            len(entries)
            if whole or len(entries) <= LOOK_WHOLE_MAX
            else 1 + entries[0] // 16 % len(entries)
        )
        return self.read(entries[:together], bytes_max)

    def peek(self, entry: int, bytes_max: int) -> bytes:
        return self.messages[entry & ~15][:bytes_max]

    def came_at(self, entry: int) -> int | None:
        return next((at for end, at in self.notes if entry < end), None)

    def note_time(self, now: int) -> None:
        self.notes.append((self.last + 16, now))

    def settle(self, queue_id: int, entries: array[int], durable: bool) -> None:
        for entry in entries:
            self.live[queue_id].remove(entry & ~15)

    def count_returns(self, queue_id: int, entries: array[int]) -> list[int]:
        for entry in entries:
            assert entry & ~15 in self.live[queue_id]
            self.returns[queue_id, entry & ~15] = self.times_returned(queue_id, entry) + 1
        return [self.times_returned(queue_id, entry) for entry in entries]

    def times_returned(self, queue_id: int, entry: int) -> int:
        return self.returns.get((queue_id, entry & ~15), 0)

    def drop_queue(self, queue_id: int, entries: array[int]) -> None:
        self.settle(queue_id, entries, False)
        assert not self.live.pop(queue_id, None)

    def begin_sync(self) -> DictJob | None:
        if self.full and self.dirty:
            from shardmq.shardd.stores import NoRoom

            raise NoRoom
        dirty, self.dirty = self.dirty, False
        return DictJob() if dirty else None

    def finish_sync(self, job: DictJob) -> None:
        assert job.ran

    settled_held_back = False

    def has_unwritten_acks(self) -> bool:
        return False

    def wait_for_acks(self, queue_ids: Collection[int]) -> SimpleNamespace:
        return SimpleNamespace(is_over=True, is_refused=False)

    def begin_settled_sync(self, waits: object = (), everything: bool = True) -> None:
        return None

    def finish_settled_sync(self, job: object) -> None:
        raise AssertionError("none was begun")

    written_bytes = 0

    def begin_reclaim(self) -> None:
        return None

    def finish_reclaim(self, job: object) -> int:
        raise AssertionError("none was begun")

    def close(self, live: dict[int, array[int]] | None = None) -> None:
        self.closes.append(live)
        self.closed = live

    def delete_all(self) -> None:
        self.messages.clear()

    def stats(self) -> dict[str, int]:
        live = sum(map(len, self.live.values()))
        return {"live_messages": live, "appended_messages": len(self.messages)}


class NoStreams:
    """For homes of stores alone."""

    def open_stream(self, vhost: str, queue_id: int, segment_bytes: int) -> QueueLog:
        raise AssertionError("nobody declared one")

    def keep_only_streams(self, vhost: str, queue_ids: Collection[int]) -> None:
        assert not queue_ids


class DictHome:
    """The stores of all vhosts; `found`: vhosts that have files, open or not."""

    def __init__(self, files: FaultyFiles | None = None) -> None:
        self.found: dict[str, DictStore] = {}
        self.files = FaultyFiles() if files is None else files  # of the streams
        self._cache = StreamCache(self.files)

    def store(self, vhost: str) -> DictStore:
        return self.found.setdefault(vhost, DictStore())

    def open(self, vhost: str) -> DictStore:
        return self.store(vhost)

    def remove(self, vhost: str) -> None:
        self.found.pop(vhost, None)

    def keep_only(self, vhosts: Collection[str]) -> None:
        self.found = {vhost: store for vhost, store in self.found.items() if vhost in vhosts}

    def open_stream(self, vhost: str, queue_id: int, segment_bytes: int) -> QueueLog:
        log = StreamLog(
            f"stream.{queue_id}", files=self.files, segment_bytes=segment_bytes, cache=self._cache
        )
        log.recover()
        return QueueLog(log)

    def keep_only_streams(self, vhost: str, queue_ids: Collection[int]) -> None:
        pass

    def recovered(self, vhost: str, store: object) -> None:
        pass

    def progress(self, vhost: str, bytes_done: int, bytes_total: int, messages: int) -> None:
        pass
