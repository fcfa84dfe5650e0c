"""Random lives of a store whose messages have producers and sequences.

A plain record of all sent messages stands beside it.

A producer sends in order. After a crash it repeats messages in order, from some message on, at the
latest the first one without a confirm. Then no message that would be dropped as a repetition may be
missing (no loss). Whatever was confirmed would be dropped (no second copy), also when it was
consumed and its segment is long gone.

Transactions wait for acks as `SyncSettled` does. What was settled before a transaction began to
wait does not come back after the end of its wait, unless its producer repeats it.
"""

from __future__ import annotations

import contextlib
import errno
import random
from array import array
from dataclasses import dataclass, field

from shardmq.shardd.store.errors import DiskFull, StoreFailed
from shardmq.shardd.store.segments import ReclaimJob, SegmentStore
from shardmq.shardd.store.segments.ack_waits import AckWait
from shardmq.shardd.store.sync import SyncJob
from tests.reference.record import Record, encode_message, split_messages
from tests.support.faulty_files import FaultyFiles, PowerCut

DIRECTORY = "store"
SEGMENT_BYTES = 4096
PERSISTENT, IN_SEQUENCE = 1, 2
QUEUES = (1, 2, 3)
NAMES = (b"a", b"bb", b"a producer with a long name")

# Within so many steps of syncs and merges a commit is answered.
ROUNDS_MAX = 12

Place = tuple[int, bytes, int]  # queue id, producer, sequence


def headers(producer: bytes, sequence: int) -> bytes:
    """Return a property list with the headers of a producer and nothing else."""
    table = b"\x0dx-producer-idS" + len(producer).to_bytes(4, "big") + producer
    table += b"\x0ax-sequencel" + sequence.to_bytes(8, "big")
    return b"\x20\x00" + len(table).to_bytes(4, "big") + table


def message(producer: bytes, sequence: int, size: int) -> bytes:
    return encode_message(
        b"%s %d|" % (producer, sequence) + bytes(size), props=headers(producer, sequence)
    )


def place_of(stored: bytes) -> tuple[bytes, int]:
    """Return (producer, sequence) from the body."""
    body = stored[-int.from_bytes(stored[:4], "little") :]
    name, _, number = body.split(b"|")[0].rpartition(b" ")
    return name, int(number)


@dataclass
class Producer:
    name: bytes
    # sequence, queues, message
    sent: list[tuple[int, tuple[int, ...], bytes]] = field(default_factory=list)
    at: int = 0  # of `sent`, what goes next
    confirmed: int = 0  # so many of `sent`


@dataclass
class Commit:
    """A transaction that waits for acks; of a queue, and the messages settled there before."""

    settled: set[Place]
    wait: AckWait
    after: int  # so many syncs of messages begin before that of the acks


class Lives:
    def __init__(
        self, seed: int, *, store_class: type[SegmentStore] = SegmentStore, sync: bool = True
    ) -> None:
        self.random = random.Random(seed)
        self.files = FaultyFiles(seed, self.random.choice([512, 4096]))
        self.store_class, self.with_sync = store_class, sync
        self.producers = [Producer(name) for name in NAMES]
        self.live: dict[int, dict[Place, int]] = {queue_id: {} for queue_id in QUEUES}
        self.settled: set[Place] = set()
        self.highest: dict[tuple[int, bytes], int] = {}
        self.job: SyncJob | None = None
        self.promises: list[int] = []
        self.reclaim: ReclaimJob | None = None
        self.begun = 0  # syncs of messages
        self.commits: list[Commit] = []
        self.settled_job: SyncJob | None = None
        self.settled_for_good: set[Place] = set()
        self.repeated = 0
        self.power_failed = False
        self.start()

    def start(self) -> None:
        self.store = self.store_class(
            DIRECTORY, files=self.files, segment_bytes=SEGMENT_BYTES, sync=self.with_sync
        )
        self.arrivals = self.store.recover(QUEUES)

    def play(self, steps: int) -> None:
        acts = (
            [self.publish] * 6
            + [self.settle] * 5
            + [self.sync_step] * 4
            + [self.reclaim_step] * 3
            + [self.flush]
        )
        if self.with_sync:  # without syncs commits are answered at once, and nothing is promised
            acts += [self.commit] * 2 + [self.settled_sync_step] * 3
        for _ in range(steps):
            self.random.choice(acts)()

    # -- acts --------------------------------------------------------------------------------------

    def records_of(self, producer: Producer) -> tuple[list[Record], int]:
        """Return records of the producer's next messages, old or new, and its new place."""
        records: list[Record] = []
        at = producer.at
        for _ in range(self.random.choice([1, 1, 3])):
            queues = tuple(self.random.sample(QUEUES, self.random.choice([1, 1, 2])))
            count = self.random.choice([1, 2, 5])
            some: list[bytes] = []
            if at < len(producer.sent):
                queues = producer.sent[at][1]
            while len(some) < count and (
                at == len(producer.sent) or producer.sent[at][1] == queues
            ):
                if at == len(producer.sent):
                    number = (
                        producer.sent[-1][0] + self.random.choice([1, 1, 7]) if producer.sent else 0
                    )
                    size = self.random.choice([0, 10, 100, 700, self.random.choice([2000, 6000])])
                    producer.sent.append((number, queues, message(producer.name, number, size)))
                some.append(producer.sent[at][2])
                at += 1
            records.append(Record(queues, tuple(some), 1000 + at, flags=PERSISTENT | IN_SEQUENCE))
        return records, at

    def publish(self) -> None:
        producer = self.random.choice(self.producers)
        if self.random.random() < 0.2:  # it has lost its memory
            producer.at = self.random.randint(0, producer.at)
        before = producer.at
        records, after = self.records_of(producer)
        sent = [stored for record in records for stored in record.messages]
        expected = self.expected(records)
        for places in expected.values():  # the power may fail when they are stored
            self.settled_for_good.difference_update(places)
        screened = self.store.screen(b"".join(record.encode() for record in records), {})
        try:
            arrivals = self.store.append(screened.records, indexes=True, in_sequence=True)
        except DiskFull:
            self.store.unscreen()
            producer.at = before
            return
        except BaseException:  # a part of what was repeated may be stored
            self.settled_for_good.difference_update(*expected.values())
            raise
        producer.at = after
        self.repeated += sum(screened.repeated.values())
        assert not screened.refused
        for arrival in arrivals:
            assert arrival.indexes is not None
            origins = [
                screened.origins[i] if screened.origins is not None else i for i in arrival.indexes
            ]
            places = [(arrival.queue_id, *place_of(sent[origin])) for origin in origins]
            assert places == expected.pop(arrival.queue_id)
            for place, entry in zip(places, arrival.entries, strict=True):
                twice = self.live[arrival.queue_id].pop(place, None)
                if twice is not None:
                    assert self.power_failed, "stored twice"
                    self.store.settle(arrival.queue_id, array("Q", [twice]), True)
                self.live[arrival.queue_id][place] = entry
                self.highest[place[:2]] = place[2]
                self.settled.discard(place)
                self.settled_for_good.discard(place)
                for commit in self.commits:
                    commit.settled.discard(place)
        assert not expected, "not stored"

    def expected(self, records: list[Record]) -> dict[int, list[Place]]:
        """Return the messages that are new to each queue."""
        found: dict[int, list[Place]] = {}
        for record in records:
            for stored in record.messages:
                name, number = place_of(stored)
                for queue_id in record.queues:
                    if number > self.highest.get((queue_id, name), -1):
                        found.setdefault(queue_id, []).append((queue_id, name, number))
        return found

    def settle(self) -> None:
        queue_id = self.random.choice(QUEUES)
        places = list(self.live[queue_id])
        count = self.random.choice([1, len(places) // 2, len(places)])
        entries = array("Q", [self.live[queue_id].pop(place) for place in places[:count]])
        self.settled.update(places[:count])
        self.store.settle(queue_id, entries, True)

    def flush(self) -> None:
        with contextlib.suppress(DiskFull):
            self.store.flush()

    def sync_step(self) -> None:
        if self.job is None:
            promises = [producer.at for producer in self.producers]
            self.begun += 1
            try:
                self.job = self.store.begin_sync()
            except DiskFull:  # commits that waited for this sync are refused
                self.commits = [each for each in self.commits if each.after != self.begun]
                return
            self.promises = promises
            if self.job is None:
                self.confirm()
            return
        self.job.run()
        job, self.job = self.job, None
        with contextlib.suppress(DiskFull):
            self.store.finish_sync(job)
            self.confirm()

    def confirm(self) -> None:
        for producer, count in zip(self.producers, self.promises, strict=True):
            producer.confirmed = max(producer.confirmed, count)

    def commit(self) -> None:
        queue_id = self.random.choice(QUEUES)
        settled = {place for place in self.settled if place[0] == queue_id}
        after = self.begun + self.store.has_unwritten_acks()
        self.commits.append(Commit(settled, self.store.wait_for_acks([queue_id]), after))

    def settled_sync_step(self) -> None:
        """Begin or end a sync of acks: for those who wait, or as each second, of all acks."""
        if self.settled_job is not None:
            self.settled_job.run()
            job, self.settled_job = self.settled_job, None
            self.store.finish_settled_sync(job)
        elif self.job is None:
            waits = [commit.wait for commit in self.commits if commit.after <= self.begun]
            everything = self.random.random() < 0.3
            if waits or everything:
                self.settled_job = self.store.begin_settled_sync(waits, everything)
        for commit in self.commits:
            if commit.wait.is_over and not commit.wait.is_refused:
                self.settled_for_good |= commit.settled
        self.commits = [
            commit
            for commit in self.commits
            if not commit.wait.is_over and not commit.wait.is_refused
        ]

    def answer_commits(self) -> None:
        """Go on as a loop does that begins no sync of messages unless a commit waits for it."""
        for _ in range(ROUNDS_MAX):
            if self.job is not None or any(commit.after > self.begun for commit in self.commits):
                self.sync_step()
            self.settled_sync_step()
            if self.reclaim is not None:
                self.reclaim_step()
            if not self.commits:
                return
        raise AssertionError("a commit is not answered")

    def reclaim_step(self) -> None:
        if self.reclaim is None:
            self.reclaim = self.store.begin_reclaim()
        elif not self.reclaim.done:
            self.reclaim.run()
        else:
            job, self.reclaim = self.reclaim, None
            self.store.finish_reclaim(job)

    # -- ends --------------------------------------------------------------------------------------

    def stop_cleanly(self) -> None:
        if self.job is not None:
            self.sync_step()
        while self.reclaim is not None:
            self.reclaim_step()
        self.store.close(
            {queue_id: array("Q", live.values()) for queue_id, live in self.live.items()}
        )
        before = dict(self.highest)
        self.end(power_cut=self.random.random() < 0.5, lossless=True)
        assert self.highest == before

    def end(self, *, power_cut: bool, lossless: bool) -> None:
        """End the process without a clean stop, and start another one.

        With `lossless` all written bytes are there.
        """
        self.files = self.files.restarted(power_cut=power_cut)
        self.power_failed = self.power_failed or not lossless
        self.job = self.reclaim = self.settled_job = None
        self.commits = []
        self.start()
        self.live = {queue_id: {} for queue_id in QUEUES}
        for queue_id, arrival in self.arrivals.items():
            blob, _ = self.store.read(arrival.entries, 1 << 40)
            places = [(queue_id, *place_of(stored)) for stored in split_messages(blob)]
            for place, entry in zip(places, arrival.entries, strict=True):
                twice = self.live[queue_id].pop(place, None)
                if twice is not None:
                    assert self.power_failed, "stored twice"
                    self.store.settle(queue_id, array("Q", [twice]), True)
                self.live[queue_id][place] = entry
        self.check(lossless)
        self.settled.difference_update(*self.live.values())  # their acks did not last
        for producer in self.producers:
            producer.at = self.random.randint(0, producer.confirmed)

    def check(self, lossless: bool) -> None:
        self.highest = {}
        for producer in self.producers:
            for queue_id in QUEUES:
                high = self.store._producers.table.highest(queue_id, producer.name)
                if high is not None:
                    self.highest[queue_id, producer.name] = high
                here = [sent[0] for sent in producer.sent if queue_id in sent[1]]
                for number in here:
                    place = (queue_id, producer.name, number)
                    there = place in self.live[queue_id]
                    assert not there or place not in self.settled_for_good, (
                        f"{place} comes back although a commit was answered"
                    )
                    if number <= (-1 if high is None else high):
                        assert there or place in self.settled, (
                            f"{place} is lost: its repetition would be dropped"
                        )
                    assert not lossless or not there or number <= (high or 0), (
                        f"{place} would be stored twice"
                    )
                for number, queues, _ in producer.sent[: producer.confirmed]:
                    if queue_id in queues:
                        assert high is not None and number <= high, (
                            f"{(queue_id, producer.name, number)} is forgotten"
                        )

    def finish(self) -> None:
        """Repeat everything that is unconfirmed.

        Then everything that was ever sent is there, or was consumed.
        """
        for producer in self.producers:
            producer.at = producer.confirmed
            while producer.at < len(producer.sent):
                here, self.producers = self.producers, [producer]
                self.publish()
                self.producers = here
            for number, queues, _ in producer.sent:
                for queue_id in queues:
                    place = (queue_id, producer.name, number)
                    assert place in self.live[queue_id] or place in self.settled


def kills(seed: int, store_class: type[SegmentStore] = SegmentStore, *, sync: bool = True) -> int:
    lives = Lives(seed, store_class=store_class, sync=sync)
    for _ in range(3):
        lives.play(60)
        lives.end(power_cut=False, lossless=True)
    lives.finish()
    return lives.repeated


def without_syncs(seed: int) -> int:
    return kills(seed, sync=False)


def power_cuts(seed: int, store_class: type[SegmentStore] = SegmentStore) -> int:
    """In the middle of a call; some recoveries too."""
    lives = Lives(seed, store_class=store_class)
    for _ in range(3):
        lives.files.cut_after = lives.random.choice([3, 10, 30, 100, 300])
        with contextlib.suppress(PowerCut):
            lives.play(60)
        if lives.random.random() < 0.2:
            lives.files = lives.files.restarted(power_cut=True)
            lives.files.cut_after = lives.random.choice([0, 1, 2, 4, 8])
            with contextlib.suppress(PowerCut):
                lives.start()
        lives.end(power_cut=True, lossless=False)
    lives.finish()
    return lives.repeated


def ends_after_commits(seed: int) -> int:
    """Others settle and publish while a commit waits; when it is answered, the process ends."""
    lives = Lives(seed)
    for _ in range(3):
        lives.play(40)
        lives.flush()
        lives.settle()
        lives.commit()
        for _ in range(lives.random.choice([0, 10])):
            lives.random.choice([lives.settle, lives.settle, lives.publish])()
        lives.answer_commits()
        power_cut = lives.random.random() < 0.5
        lives.end(power_cut=power_cut, lossless=not (power_cut or lives.power_failed))
    lives.finish()
    return lives.repeated


def full_disks(seed: int) -> int:
    lives = Lives(seed)
    for _ in range(3):
        call = lives.random.choice(["write", "allocate", "open"])
        lives.files.fail[call] = (lives.random.choice([0, 1, 3, 10, 30]), errno.ENOSPC)
        with contextlib.suppress(StoreFailed, OSError):
            lives.play(40)
            lives.files.fail.clear()
            lives.play(20)
        lives.files.fail.clear()
        lives.end(power_cut=False, lossless=True)
    lives.finish()
    return lives.repeated


def clean_stops(seed: int) -> int:
    lives = Lives(seed)
    for _ in range(3):
        lives.play(60)
        lives.stop_cleanly()
    lives.finish()
    return lives.repeated
