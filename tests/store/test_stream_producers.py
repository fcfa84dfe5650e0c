"""Test that a stream has each message of a producer once, whatever is repeated.

A model that knows who sent what lives beside the log through retention, clean stops, kills and
power cuts. A producer sends in order. After an end it repeats messages from some message on, at the
latest the first one without a confirm. Then no message that would be dropped as a repetition may be
missing, and no message may be stored twice.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field

import pytest

from shardmq.shardd.store.errors import DiskFull
from shardmq.shardd.store.format import producers_file
from shardmq.shardd.store.streams import StreamLog
from shardmq.shardd.store.streams import producers as stream_producers
from shardmq.shardd.store.streams.queue_log import QueueLog
from shardmq.shardd.store.streams.reading import StreamCache
from shardmq.shardd.store.streams.segments import UnderSync
from shardmq.shardd.store.sync import SyncJob
from tests.reference.record import Record, split_messages
from tests.support.faulty_files import FaultyFiles, PowerCut
from tests.support.producer_lives import IN_SEQUENCE, NAMES, PERSISTENT, message, place_of

QUEUE = 7
SEGMENT_BYTES = 4096
LIVES = 50


@dataclass
class Producer:
    name: bytes
    sent: list[tuple[int, bytes]] = field(default_factory=list)  # sequence, message
    at: int = 0  # what goes next
    confirmed: int = 0  # so many


class Life:
    def __init__(self, seed: int, *, sync: bool = True) -> None:
        self.random = random.Random(seed)
        self.files = FaultyFiles(seed, self.random.choice([512, 4096]))
        self.with_sync = sync
        self.producers = [Producer(name) for name in NAMES]
        self.highest: dict[bytes, int] = {}  # in the stream, or let go of
        self.seen: dict[int, tuple[bytes, int]] = {}  # by offset, what retention may have let go of
        self.gone: dict[bytes, int] = {}  # let go of
        self.may_go = 0  # retention may have let go of what comes before
        # what comes before counts as not stored: a power cut took the beginning
        self.unknown_below = 0
        self.job: SyncJob[UnderSync] | None = None
        self.promises: list[int] = []
        self.repeated = 0
        self.start()

    def start(self) -> None:
        cache = StreamCache(self.files, handles_max=2)
        self.log = StreamLog(
            "s", files=self.files, segment_bytes=SEGMENT_BYTES, cache=cache, sync=self.with_sync
        )
        self.log.recover()

    def play(self, steps: int) -> None:
        acts = (
            [self.publish] * 6 + [self.sync_step] * 4 + [self.retain] * 2 + [self.publish_plainly]
        )
        for _ in range(steps):
            self.random.choice(acts)()

    # -- acts --------------------------------------------------------------------------------------

    def publish(self) -> None:
        producer = self.random.choice(self.producers)
        if self.random.random() < 0.2:  # it has lost its memory
            producer.at = self.random.randint(0, producer.at)
        records, at = [], producer.at
        for _ in range(self.random.choice([1, 1, 3])):
            some = []
            for _ in range(self.random.choice([1, 2, 5])):
                if at == len(producer.sent):
                    number = (
                        producer.sent[-1][0] + self.random.choice([1, 1, 7]) if producer.sent else 0
                    )
                    size = self.random.choice([0, 10, 100, 700, self.random.choice([2000, 6000])])
                    producer.sent.append((number, message(producer.name, number, size)))
                some.append(producer.sent[at][1])
                at += 1
            queues = self.random.choice([(QUEUE,), (QUEUE, 9), (3, QUEUE)])
            records.append(Record(queues, tuple(some), 1000 + at, flags=PERSISTENT | IN_SEQUENCE))
            if self.random.random() < 0.3:
                records.append(
                    Record(
                        (9,), (message(b"of others", 5, 10),), 1000, flags=PERSISTENT | IN_SEQUENCE
                    )
                )
        numbers = [
            place_of(one)[1]
            for record in records
            if QUEUE in record.queues
            for one in record.messages
        ]
        expected = [number for number in numbers if number > self.highest.get(producer.name, -1)]
        first = self.log.next_offset
        taken = QueueLog(self.log).append_records(
            memoryview(b"".join(one.encode() for one in records)),
            QUEUE,
            alone=False,
            in_sequence=True,
        )
        assert (taken.count, taken.repeated, taken.refused) == (
            len(expected),
            len(numbers) - len(expected),
            [],
        )
        assert self.log.next_offset == first + len(expected)
        producer.at = at
        self.repeated += taken.repeated
        if expected:
            self.highest[producer.name] = expected[-1]

    def publish_plainly(self) -> None:
        """As dead letters come: with a place that says nothing here."""
        record = Record((QUEUE,), (message(NAMES[0], 1 << 50, 10),), 1000, flags=PERSISTENT)
        QueueLog(self.log).append_records(memoryview(record.encode()), QUEUE, alone=True)

    def sync_step(self) -> None:
        if self.job is None:
            self.promises = [producer.at for producer in self.producers]
            self.job = self.log.begin_sync()
            if self.job is None:
                self.confirm()
            return
        self.job.run()
        job, self.job = self.job, None
        self.log.finish_sync(job)
        self.confirm()

    def confirm(self) -> None:
        for producer, count in zip(self.producers, self.promises, strict=True):
            producer.confirmed = max(producer.confirmed, count)

    def retain(self) -> None:
        self.seen |= self.stored()
        self.may_go = self.log.committed_offset
        self.log.retain(2000, max_bytes=self.random.choice([0, 3 * SEGMENT_BYTES]))
        self.note_gone()

    def note_gone(self) -> None:
        for offset in [offset for offset in self.seen if offset < self.log.first_offset]:
            name, number = self.seen.pop(offset)
            if offset >= self.unknown_below:
                self.gone[name] = max(self.gone.get(name, -1), number)

    def stored(self) -> dict[int, tuple[bytes, int]]:
        """Return what readers see, without the messages that have no sequence."""
        found: dict[int, tuple[bytes, int]] = {}
        offset = self.log.first_offset
        while offset < self.log.committed_offset:
            some = self.log.read(offset, 1 << 20)
            places = [place_of(one) for one in split_messages(some.blob)]
            found.update(
                (offset + i, place) for i, place in enumerate(places) if place[1] < 1 << 50
            )
            offset = some.next_offset
        return found

    # -- ends --------------------------------------------------------------------------------------

    def stop_cleanly(self) -> None:
        if self.job is not None:
            self.sync_step()
        self.log.close()
        self.end(power_cut=False)
        assert self.log.producers.uncovered_bytes == 0, "nothing is looked at after a clean stop"

    def end(self, *, power_cut: bool) -> None:
        """Another process finds what is on the disk."""
        self.files = self.files.restarted(power_cut=power_cut)
        self.job = None
        self.start()
        self.note_gone()
        self.check()
        for producer in self.producers:
            producer.at = self.random.randint(0, producer.confirmed)

    def check(self) -> None:
        if self.log.first_offset > max(self.may_go, self.unknown_below):
            assert not any(producer.confirmed for producer in self.producers), "nothing was synced"
            self.unknown_below = self.log.next_offset
        stored = self.stored()
        places = [place for offset, place in stored.items() if offset >= self.unknown_below]
        assert len(set(places)) == len(places), "stored twice"
        self.highest = dict(self.gone)
        for name, number in places:
            assert number > self.highest.get(name, -1) or number <= self.gone.get(name, -1), (
                "in order"
            )
            self.highest[name] = max(number, self.highest.get(name, -1))
        for producer in self.producers:
            table = self.log.producers.table
            assert table.highest(0, producer.name) == self.highest.get(producer.name), (
                "else lost, or stored twice"
            )
            confirmed = [number for number, _ in producer.sent[: producer.confirmed]]
            there = {number for name, number in places if name == producer.name}
            assert all(
                one in there or one <= self.gone.get(producer.name, -1) for one in confirmed
            ), "confirmed, and lost"


@pytest.fixture(autouse=True)
def covered_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_producers, "COVER_BYTES", 3000)


def lives(seed: int, end: str, *, sync: bool = True) -> int:
    life = Life(seed, sync=sync)
    for _ in range(4):
        if end == "power cut":
            life.files.cut_after = life.random.choice([3, 10, 30, 100])
        with contextlib.suppress(PowerCut):
            life.play(40)
        if end == "clean stop":
            life.stop_cleanly()
        else:
            life.end(power_cut=end == "power cut")
    return life.repeated


@pytest.mark.row("D11")
@pytest.mark.parametrize("end", ["kill", "power cut", "clean stop"])
def test_a_message_of_a_producer_is_in_a_stream_once(end: str, pytestconfig: pytest.Config) -> None:
    repeated, seed = 0, pytestconfig.option.seed
    for number in range(seed, seed + LIVES):
        print(f"--seed {number}")
        repeated += lives(number, end)
    assert repeated > LIVES, "something was repeated"


def test_without_syncs_a_kill_costs_nothing_either() -> None:
    for seed in range(30):
        lives(seed, "clean stop", sync=False)


def test_a_full_disk_takes_nothing_and_what_follows_waits_for_it() -> None:
    life = Life(1)
    record = Record(
        (QUEUE,), tuple(message(b"p", n, 10) for n in range(2)), 1000, flags=IN_SEQUENCE
    ).encode()
    after = Record((QUEUE,), (message(b"p", 2, 10),), 1000, flags=IN_SEQUENCE).encode()
    QueueLog(life.log).append_records(memoryview(record), QUEUE, alone=True, in_sequence=True)
    large = Record((QUEUE,), (message(b"p", 5, 100_000),), 1000, flags=IN_SEQUENCE).encode()
    life.files.fail["allocate"] = (0, 28)
    with pytest.raises(DiskFull):
        QueueLog(life.log).append_records(memoryview(large), QUEUE, alone=True, in_sequence=True)
    life.files.fail.clear()
    behind = Record((QUEUE,), (message(b"p", 6, 10),), 1000, flags=IN_SEQUENCE).encode()
    taken = QueueLog(life.log).append_records(
        memoryview(behind), QUEUE, alone=True, in_sequence=True
    )
    assert (taken.count, taken.refused) == (0, [0]), (
        "else number 5 would later look like a repetition"
    )
    for batch, count in [(after, 1), (large, 1), (behind, 1), (record, 0)]:
        taken = QueueLog(life.log).append_records(
            memoryview(batch), QUEUE, alone=True, in_sequence=True
        )
        assert (taken.count, taken.refused) == (count, [])


def test_a_stream_that_nobody_writes_to_in_sequence_has_no_file_of_it() -> None:
    life = Life(2)
    life.publish_plainly()
    life.stop_cleanly()
    assert producers_file.NAME not in life.files.list("s")
