"""A stream gives each reader every message that lasts, in order, as often as it asks."""

from __future__ import annotations

import random
from array import array
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.queues import Reader, StreamQueue, Window, retention_of
from shardmq.shardd.queues.stream import SEGMENT_BYTES_MIN, age_ms
from shardmq.shardd.store.streams import StreamCache, StreamLog
from shardmq.shardd.store.streams.queue_log import QueueLog
from tests.reference.record import Record, encode_message, split_messages
from tests.support.dict_store import DictStore
from tests.support.faulty_files import FaultyFiles

QUEUE = 7
WINDOW = 6000


class Told:
    """An Outlet that takes deliveries apart.

    It keeps (offset, message, redelivered) by reader, and each offset's number.
    """

    def __init__(self) -> None:
        self.got: dict[int, list[tuple[int, bytes, bool]]] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        self.passes: list[tuple[int, int]] = []

    def deliver(
        self,
        consumer: Any,
        first_number: int,
        redelivered: bool,
        count: int,
        blob: bytes | memoryview,
    ) -> None:
        offsets = array("Q", blob[: 8 * count])
        messages = split_messages(blob[8 * count :])
        assert len(messages) == count
        for i, (offset, message) in enumerate(zip(offsets, messages, strict=True)):
            self.got.setdefault(consumer.number, []).append((offset, message, redelivered))
            self.numbers[consumer.number, first_number + i] = offset

    def deliver_again(self, *_: Any) -> None:
        raise AssertionError("a stream does not count returns")

    def report(self, *_: Any) -> None:
        raise AssertionError("nobody here has an allotment")

    def passed(self, consumer: Any, offset: int) -> None:
        self.passes.append((consumer.number, offset))


class History:
    """Random publishes, syncs, readers and ends of the process, beside a list of all messages."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.files = FaultyFiles(seed)
        self.messages: list[bytes] = []
        self.committed = 0
        self.now = 1000
        self.job: Any = None
        self.job_end = 0
        self.last_number = 0
        self.told = Told()
        self.readers: dict[int, Reader] = {}
        self.cancelled: set[int] = set()  # readers that get nothing new, and hold something
        # by reader: the offset it gets next, but for what it gave back
        self.due: dict[int, int] = {}
        self.held: dict[int, dict[int, int]] = {}  # by reader: number, offset
        self.again: dict[int, set[int]] = {}
        self.positions: dict[bytes, int] = {}
        self.ends = [0]  # of the log, now and then
        # stop and mark, of readers that have some
        self.bounds: dict[int, tuple[int | None, int | None]] = {}
        self.limits = {
            "x-stream-max-segment-size-bytes": SEGMENT_BYTES_MIN,
            **self.random.choice(
                [{}, {}, {"x-max-length-bytes": 9000}, {"x-max-age": "1s"}, {"x-max-length": 50}]
            ),
        }
        self.open()

    def open(self) -> None:
        log = StreamLog(
            "s", files=self.files, segment_bytes=SEGMENT_BYTES_MIN, cache=StreamCache(self.files)
        )
        log.recover()
        self.store = DictStore()
        self.queue = StreamQueue(QUEUE, self.store, QueueLog(log), retention_of(self.limits))

    # -- acts --------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Publish records of several queues, as a PUBLISH has them."""
        records = b""
        for _ in range(self.random.randint(1, 3)):
            queues = self.random.choice([(QUEUE,), (QUEUE, 9), (9,), (3, QUEUE)])
            many = self.random.randint(1, 6)
            texts = [
                encode_message(b"%d." % self.random.randrange(10**6) * self.random.choice([1, 40]))
                for _ in range(many)
            ]
            records += Record(queues, tuple(texts), self.now).encode()
            if QUEUE in queues:
                self.messages += texts
        self.queue.append(memoryview(records), alone=False)
        self.ends.append(len(self.messages))

    def sync(self) -> None:
        if self.job is not None:
            return
        self.job_end = len(self.messages)
        self.job = self.queue.begin_sync()
        if self.job is None:
            self.committed = self.job_end
        elif self.random.random() < 0.7:
            self.end_sync()

    def end_sync(self) -> None:
        if self.job is not None:
            self.job.run()
            self.queue.finish_sync(self.job)
            self.job = None
            self.committed = self.job_end

    def attach(self) -> None:
        if len(self.readers) - len(self.cancelled) >= 4:
            return
        self.last_number += 1
        log = self.queue.log.stream
        name = self.random.choice(["", "", "audit", "copy"])
        start, value, offset = self.random.choice(
            [
                ("first", 0, log.first_offset),
                ("next", 0, self.committed),
                ("offset", len(self.messages) // 2, len(self.messages) // 2),
                ("back", 5, self.committed - 5),
                ("offset", 10**9, 10**9),
            ]
        )
        reader = Reader(
            self.queue,
            self,
            self.last_number,
            Window(WINDOW),
            prefetch=self.random.choice([1, 3, 20, 500]),
        )
        stored = log.positions.get(name.encode()) if name else None
        reader.begin(*self.queue.new_reader(start, value, name, [], False, self.now))
        expected = offset if stored is None else stored
        assert reader.offset == min(max(expected, log.first_offset), self.committed)
        self.queue.attach(reader)
        self.readers[reader.number] = reader
        self.due[reader.number] = reader.offset
        self.held[reader.number], self.again[reader.number] = {}, set()

    def bound(self) -> None:
        for number, reader in self.readers.items():
            end, offset = (
                self.random.choice(self.ends),
                self.random.randint(0, len(self.messages) + 5),
            )
            stop, mark = self.random.choice(
                [(None, None), (end, None), (None, offset), (end, end), (end, offset)]
            )
            reader.bound(stop, mark)
            self.bounds[number] = (stop, mark)

    def check_bounds(self, is_all: bool) -> None:
        """`is_all`: each reader was looked at."""
        for number, position in self.told.passes:
            stop, mark = self.bounds[number]
            assert mark is not None and mark <= position == self.readers[number].position, (
                "not settled"
            )
            self.bounds[number] = (stop, None)
        self.told.passes.clear()
        for number, reader in self.readers.items():
            mark = self.bounds.get(number, (None, None))[1]
            if number in self.cancelled:
                continue  # it is nobody's any more
            assert not is_all or mark is None or reader.position < mark, "settled, and not told"

    def deliver(self) -> None:
        before = self.queue.log.stream.first_offset
        more = self.queue.deliver(self.now, self.told, 4000)
        self.check_bounds(is_all=not more)
        for number, got in self.told.got.items():
            for offset, message, redelivered in got:
                assert offset < self.committed, "not on stable storage"
                assert message == self.messages[offset]
                if redelivered:
                    self.again[number].remove(offset)
                else:
                    stop = self.bounds.get(number, (None, None))[0]
                    assert stop is None or offset < stop, "beyond its bound"
                    due = max(self.due[number], before)
                    assert offset == due or due < self.queue.log.stream.first_offset <= offset
                    self.due[number] = offset + 1
        self.told.got.clear()
        for (number, delivery), offset in self.told.numbers.items():
            self.held[number][delivery] = offset
        self.told.numbers.clear()
        for number, reader in self.readers.items():
            # what was given back and is gone does not come again
            first = self.queue.log.stream.first_offset
            self.again[number] = {
                offset for offset in self.again[number] if offset >= first or offset in reader.again
            }
            assert len(self.held[number]) <= reader.prefetch
            assert reader.unacked.count == len(self.held[number])

    def settle(self) -> None:
        gone: list[int] = []
        for number, reader in self.readers.items():
            held = sorted(self.held[number])
            if not held or self.random.random() < 0.4:
                continue
            first = self.random.choice(held[:3])
            last = self.random.choice([first, held[-1], first + 2])
            again = self.random.random() < 0.2
            entries, size = reader.unacked.settle(first, last)
            self.queue.settled(reader, not again, entries, size, again)
            for delivery in [one for one in held if first <= one <= last]:
                offset = self.held[number].pop(delivery)
                if again:
                    self.again[number].add(offset)
            reader.window.free(WINDOW)
            self.check_position(reader)
            if number in self.cancelled and not self.held[number]:
                self.queue.dispatch.let_holder_go(reader)  # what it gave back it does not get
                self.cancelled.discard(number)
                gone.append(number)
        for number in gone:
            del self.readers[number]

    def check_position(self, reader: Reader, is_told: bool = True) -> None:
        """Check that the position of a reader is the first offset that it has not settled.

        `is_told`: the log has been told of it, so the log keeps that position under the name of the
        reader.
        """
        waiting = [*self.held[reader.number].values(), *self.again[reader.number], reader.offset]
        assert reader.position == min(waiting)
        if reader.name and is_told:
            assert self.queue.log.stream.positions.get(reader.name) == reader.position

    def cancel(self) -> None:
        """Cancel a reader.

        It gets no more messages, but may still settle or give back those it holds.
        """
        if self.readers:
            number = self.random.choice(list(self.readers))
            reader = self.readers[number]
            self.queue.detach(reader, self.now)
            self.check_position(reader, is_told=False)
            if self.held[number]:
                self.cancelled.add(number)
            else:
                self.queue.dispatch.let_holder_go(reader)
                del self.readers[number]

    def leave(self) -> None:
        if self.readers:
            number = self.random.choice(list(self.readers))
            reader = self.readers.pop(number)
            self.cancelled.discard(number)
            position = min([*self.held[number].values(), *self.again[number], reader.offset])
            self.queue.release(reader, self.now)
            if reader.name:
                assert self.queue.log.stream.positions.get(reader.name) == position

    def end(self) -> None:
        """Of the process: in order, or in the middle of something."""
        clean = self.random.random() < 0.3
        known = dict(self.queue.log.stream.positions.offsets)
        if clean:
            self.end_sync()
            self.queue.log.stream.close()
            self.committed = len(self.messages)
        else:
            self.job = None
        self.files = self.files.restarted(power_cut=not clean and self.random.random() < 0.5)
        self.readers.clear()
        self.cancelled.clear()
        self.open()
        assert self.queue.log.stream.committed_offset >= self.committed, (
            "what was committed is lost"
        )
        assert not clean or dict(self.queue.log.stream.positions.offsets) == known
        self.committed = self.queue.log.stream.committed_offset
        del self.messages[self.committed :]
        self.ends = [end for end in self.ends if end <= self.committed] + [self.committed]

    def play(self, steps: int) -> None:
        acts = (
            [self.publish] * 4 + [self.sync] * 3 + [self.end_sync, self.attach] + [self.deliver] * 6
        )
        acts += [self.settle] * 4 + [self.leave, self.bound, self.cancel]
        for _ in range(steps):
            self.random.choice(acts)() if self.random.random() > 0.02 else self.end()
            self.now += self.random.choice([0, 1, 400])
            log, backlog = self.queue.log.stream, self.queue.backlog
            in_order = log.first_offset <= backlog.ready_count + log.first_offset == self.committed
            assert in_order or self.job is not None
            assert backlog.unacked_count == sum(
                reader.unacked.count for reader in self.readers.values()
            )
        self.drain()

    def drain(self) -> None:
        """Whoever settles all it gets comes to the end, if nothing bounds it."""
        self.readers = {
            number: each for number, each in self.readers.items() if number not in self.cancelled
        }
        for reader in self.readers.values():
            reader.bound(None, None)
        self.end_sync()
        self.sync()
        self.end_sync()
        for _ in range(10_000):
            if all(reader.position == self.committed for reader in self.readers.values()):
                return
            self.queue.deliver(self.now, self.told, 4000)
            self.told.got.clear()
            for reader in self.readers.values():
                entries, size = reader.unacked.take_all()
                self.queue.settled(reader, True, entries, size, False)
                reader.window.free(WINDOW)
        raise AssertionError("a reader stands still")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32))
def test_every_reader_sees_every_message_that_lasts_in_order(seed: int) -> None:
    History(seed).play(120)


def test_neighbours_take_turns_and_a_slow_reader_keeps_nobody() -> None:
    history = History(1)
    history.queue.append(
        memoryview(Record((QUEUE,), tuple(encode_message(b"%d" % i) for i in range(100))).encode()),
        True,
    )
    history.messages = [encode_message(b"%d" % i) for i in range(100)]
    history.sync()
    history.end_sync()
    for number, prefetch in ((1, 1), (2, 100)):
        reader = Reader(history.queue, history, number, Window(WINDOW), prefetch=prefetch)
        reader.begin(*history.queue.new_reader("first", 0, "", [], False, 0))
        history.queue.attach(reader)
    while history.queue.deliver(0, history.told, 4000):
        pass
    assert [len(got) for _, got in sorted(history.told.got.items())] == [1, 100]


def test_ages_are_numbers_with_a_unit() -> None:
    assert [age_ms(text) for text in ("1s", "2m", "1h", "7D", "1Y")] == [
        1000, 120_000, 3_600_000, 604_800_000, 31_536_000_000,
    ]  # fmt: skip
    assert [age_ms(text) for text in ("", "1", "h", "1w", "-1s", 5, None)] == [None] * 7
