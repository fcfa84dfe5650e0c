"""Random lives of a SegmentStore beside a slow, obvious model, and checks of the files.

What a store owes: a message is *owed* to a queue once a sync that began after its append has ended,
until it is settled. After a clean stop exactly what was live is there, in order, flags and all.
After a crash of the process what was flushed and not settled is there. After a power cut what is
owed is there. Never: a foreign message, a second copy, another order. A full disk costs the appends
it refuses and nothing else.

What lives there are, and how they end, is in store_lives.py.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from array import array
from dataclasses import dataclass, field

from shardmq.shardd.store.errors import DiskFull
from shardmq.shardd.store.format.record import Arrival
from shardmq.shardd.store.segments import ReclaimJob, SegmentStore
from shardmq.shardd.store.sync import SyncJob
from tests.reference.record import NONE, Record, encode_message, split_messages
from tests.support.faulty_files import FaultyFiles, PowerCut

DIRECTORY = "store"
SEGMENT_BYTES = 4096
# Of the recoveries, those that are cut off by a power cut of their own.
RECOVERIES_CUT = 0.2


@dataclass
class Queue:
    durable: bool = True
    published: list[bytes] = field(default_factory=list)
    live: dict[bytes, int] = field(default_factory=dict)  # message: entry, in publish order
    facts: dict[bytes, int] = field(default_factory=dict)
    flushed: set[bytes] = field(default_factory=set)
    owed: set[bytes] = field(default_factory=set)
    settled: set[bytes] = field(default_factory=set)


class History:
    def __init__(
        self,
        seed: int,
        files: FaultyFiles | None = None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        store_class: type[SegmentStore] = SegmentStore,
        sync: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.files = FaultyFiles(seed, self.random.choice([512, 4096])) if files is None else files
        self.segment_bytes = segment_bytes
        self.store_class, self.with_sync = store_class, sync
        self.refused = 0  # appends, for want of room
        self.queues = {queue_id: Queue() for queue_id in self.random.sample(range(1, 1000), 4)}
        # Gone with each stop, as if it had never been.
        self.queues[1000] = Queue(durable=False)
        self.fresh_ids = itertools.count(1001)
        self.counter = 0
        self.merged = 0  # segments that went away by merging
        self.recovery_cut = False
        self.job: SyncJob | None = None
        self.job_promises: list[tuple[Queue, list[bytes]]] = []
        self.reclaim: ReclaimJob | None = None
        self.settled_job: SyncJob[list[int]] | None = None
        # message files that somebody has removed while the store was down
        self.taken: set[str] = set()
        self.steps: list[str] = []
        self.store = self.new_store()
        self.store.recover(self.durable())

    def new_store(self) -> SegmentStore:
        return self.store_class(
            DIRECTORY, files=self.files, segment_bytes=self.segment_bytes, sync=self.with_sync
        )

    def durable(self) -> list[int]:
        return [queue_id for queue_id, queue in self.queues.items() if queue.durable]

    def play(self, steps: int) -> None:
        acts = (
            [self.append] * 6
            + [self.read] * 2
            + [self.settle] * 4
            + [
                self.flush,
                self.drop_queue,
                self.sync,
                self.sync,
                self.sync_step,
                self.compact,
                self.reclaim_step,
                self.reclaim_step,
                self.settled_step,
                self.settled_step,
            ]
        )
        for _ in range(steps):
            act = self.random.choice(acts)
            self.steps.append(act.__name__)
            act()

    # -- acts --------------------------------------------------------------------------------------

    def record(self) -> Record:
        pick = self.random
        bodies = [
            pick.choice([0, 1, 16, 16, 100, 700, pick.choice([2000, 9000])])
            for _ in range(pick.choice([1, 1, 2, 5]))
        ]
        messages = []
        for body in bodies:
            self.counter += 1
            messages.append(
                encode_message(
                    bytes(pick.randrange(256) for _ in range(min(body, 8))) * (body // 8),
                    b"x",
                    b"%d" % self.counter,
                )
            )
        queues = tuple(pick.sample(list(self.queues), pick.choice([1, 1, 2, 4])))
        ttl = pick.choice([NONE, NONE, 0, 1000])
        return Record(queues, tuple(messages), self.counter * 7, ttl, pick.choice([255, 255, 0, 9]))

    def append(self) -> None:
        records = [self.record() for _ in range(self.random.choice([1, 1, 3, 8]))]
        expected: dict[int, list[tuple[bytes, int, int]]] = {}
        ordinal = 0
        for record in records:
            for message in record.messages:
                for queue_id in record.queues:
                    expected.setdefault(queue_id, []).append((message, record.fact(), ordinal))
                    self.queues[queue_id].published.append(message)
                    self.queues[queue_id].facts[message] = record.recovered_fact()
                ordinal += 1
        try:
            arrivals = self.store.append(
                b"".join(record.encode() for record in records), indexes=True
            )
        except DiskFull:
            self.refused += 1
            for queue_id, refused in expected.items():  # all of it, or nothing
                del self.queues[queue_id].published[-len(refused) :]
            return
        assert {arrival.queue_id for arrival in arrivals} == set(expected) and len(arrivals) == len(
            expected
        )
        for arrival in arrivals:
            self.take_in(arrival, expected[arrival.queue_id])

    def take_in(self, arrival: Arrival, expected: list[tuple[bytes, int, int]]) -> None:
        queue = self.queues[arrival.queue_id]
        messages = [message for message, _, _ in expected]
        facts = [fact for _, fact, _ in expected]
        assert len(arrival.entries) == len(messages)
        assert list(arrival.indexes or []) == [ordinal for _, _, ordinal in expected]
        assert (list(arrival.facts) if arrival.facts else [0] * len(facts)) == facts
        assert arrival.body_bytes == sum(
            int.from_bytes(message[:4], "little") for message in messages
        )
        last = max(queue.live.values(), default=0) & ~15
        for message, entry in zip(messages, arrival.entries, strict=True):
            assert entry & 15 == 0 and entry > last, "entries are in publish order"
            last = entry
            queue.live[message] = entry

    def read(self) -> None:
        queue = self.random.choice(list(self.queues.values()))
        wanted = list(queue.live.items())
        start = self.random.randint(0, len(wanted))
        wanted = wanted[start : start + self.random.choice([1, 5, 50])]
        self.check_read(wanted, self.random.choice([0, 100, 5000, 1 << 20]))

    def check_read(self, wanted: list[tuple[bytes, int]], bytes_max: int) -> None:
        blob, sizes = self.store.read(array("Q", [entry for _, entry in wanted]), bytes_max)
        got = split_messages(blob)
        assert got == [message for message, _ in wanted[: len(got)]]
        assert list(sizes) == [int.from_bytes(message[:4], "little") for message in got]
        assert got or not wanted
        assert len(blob) <= bytes_max or len(got) == 1
        if len(got) < len(wanted):
            assert len(blob) + len(wanted[len(got)][0]) > bytes_max, "as many as fit"

    def settle(self) -> None:
        queue_id, queue = self.random.choice(list(self.queues.items()))
        messages = list(queue.live)
        count = self.random.choice([1, len(messages) // 2, len(messages)])
        chosen = (
            messages[:count]
            if self.random.random() < 0.7
            else self.random.sample(messages, min(count, len(messages)))
        )
        entries = array("Q", [queue.live.pop(message) for message in chosen])
        queue.settled.update(chosen)  # before the call: the power may fail in the middle of it
        self.store.settle(queue_id, entries, queue.durable)

    def drop_queue(self) -> None:
        """Seldom. Its id is never used again; another queue comes."""
        if self.random.random() < 0.7:
            return
        queue_id = self.random.choice(self.durable())
        queue = self.queues.pop(queue_id)
        self.store.drop_queue(queue_id, array("Q", queue.live.values()))
        queue.live.clear()
        self.queues[next(self.fresh_ids)] = Queue()

    def flush(self) -> None:
        try:
            self.store.flush()
        except DiskFull:
            return
        for queue in self.queues.values():
            queue.flushed.update(queue.live)

    def sync(self) -> None:
        if self.job is None:
            self.sync_step()
        self.sync_step()

    def sync_step(self) -> None:
        """Begin one, or end the one that was begun some steps ago."""
        if self.job is None:
            promises = [(queue, list(queue.live)) for queue in self.queues.values()]
            try:
                self.job = self.store.begin_sync()
            except DiskFull:
                return
            for queue, messages in promises:
                queue.flushed.update(messages)
                if self.job is None:
                    queue.owed.update(messages)
            self.job_promises = promises
            return
        with contextlib.suppress(Exception):  # as the thread that runs it
            self.job.run()
        self.store.finish_sync(self.job)
        self.sync_ended()

    def sync_ended(self) -> None:
        self.job = None
        for queue, messages in self.job_promises:
            queue.owed.update(messages)

    def compact(self) -> None:
        """Run a whole reclaim, or the rest of the one that was begun."""
        if self.reclaim is None:
            self.reclaim_step()
        while self.reclaim is not None:
            self.reclaim_step()

    def reclaim_step(self) -> None:
        """Begin, run or end one: in the broker another thread runs it, at any time between."""
        if self.reclaim is None:
            self.reclaim = self.store.begin_reclaim()
        elif not self.reclaim.done:
            self.reclaim.run()
        else:
            job, self.reclaim = self.reclaim, None
            before = self.store.stats()
            fewer = self.store.finish_reclaim(job)
            after = self.store.stats()
            assert after["live_messages"] == before["live_messages"]
            # Those of which nothing was left by then go too.
            assert after["segments"] <= before["segments"] - fewer
            self.merged += fewer

    def settled_step(self) -> None:
        """Begin or end a sync of what is settled, and of the list of the files that there are."""
        if self.settled_job is None:
            with contextlib.suppress(DiskFull):
                self.settled_job = self.store.begin_settled_sync()
            return
        with contextlib.suppress(Exception):  # as the thread that runs it
            self.settled_job.run()
        job, self.settled_job = self.settled_job, None
        self.store.finish_settled_sync(job)

    # -- ends --------------------------------------------------------------------------------------

    def end_sync(self) -> None:
        if self.job is not None:
            self.sync_step()

    def stop_cleanly(self) -> None:
        self.end_sync()
        if self.random.random() < 0.7:  # else one is under way, and will never end
            self.compact()
        for queue in self.queues.values():
            for message in queue.live:
                if self.random.random() < 0.3:
                    queue.live[message] |= 1
        self.store.close(
            {
                queue_id: array("Q", self.queues[queue_id].live.values())
                for queue_id in self.durable()
            }
        )
        assert len(self.files.handles) == self.merged_files_open(), "every file is closed"
        damage = set(self.store.damage)
        before = self.flagged()
        self.start_again(power_cut=self.random.random() < 0.5)
        after = self.flagged()
        # the word of the clean stop may have gone with the first try
        if self.recovery_cut and after != before:
            before = {
                queue_id: [(message, 1) for message, _ in live] for queue_id, live in before.items()
            }
        assert after == before
        assert set(self.store.damage) <= damage, "a clean stop breaks nothing"

    def merged_files_open(self) -> int:
        return int(self.reclaim is not None and self.reclaim.merged is not None)

    def flagged(self) -> dict[int, list[tuple[bytes, int]]]:
        """Return the messages in order with their flags.

        Their places may change from one life to the next.
        """
        return {
            queue_id: [(message, entry & 15) for message, entry in queue.live.items()]
            for queue_id, queue in self.queues.items()
            if queue.durable
        }

    def crash(self, *, power_cut: bool) -> None:
        must = {
            queue_id: (queue.owed if power_cut else queue.flushed) - queue.settled
            if queue.durable
            else set()
            for queue_id, queue in self.queues.items()
        }
        self.start_again(power_cut=power_cut)
        for queue_id, queue in self.queues.items():
            missing = must[queue_id] - set(queue.live)
            assert not missing, f"queue {queue_id} lost {len(missing)} messages it was owed"
            assert all(entry & 15 == 1 for entry in queue.live.values())

    def start_again(self, *, power_cut: bool) -> None:
        self.files = self.files.restarted(power_cut=power_cut)
        self.job = self.reclaim = self.settled_job = None
        arrivals = self.recover()
        told = {one.file for one in self.store.damage if one.what == "missing"}
        assert told <= self.taken, f"{told - self.taken} told as missing, and nobody has taken it"
        self.taken = set()
        assert all(arrival.queue_id == queue_id for queue_id, arrival in arrivals.items())
        for queue_id, queue in self.queues.items():
            self.found(queue, arrivals.get(queue_id))
            queue.flushed = set(queue.live)

    def recover(self) -> dict[int, Arrival]:
        """Recover the store.

        Some recoveries are cut off: the next one finds what the first would have found.
        """
        self.recovery_cut = False
        if self.random.random() < RECOVERIES_CUT:
            self.files.cut_after = self.random.choice([0, 1, 2, 4, 8])
        try:
            self.store = self.new_store()
            return self.store.recover(self.durable(), timed=self.queues)
        except PowerCut:
            self.recovery_cut = True
            self.files = self.files.restarted(power_cut=True)
            self.store = self.new_store()
            return self.store.recover(self.durable(), timed=self.queues)
        finally:
            self.files.cut_after = None

    def found(self, queue: Queue, arrival: Arrival | None) -> None:
        queue.live = {}
        if arrival is None:
            return
        assert list(arrival.entries) == sorted(arrival.entries) and arrival.times is not None
        blob, sizes = self.store.read(arrival.entries, 1 << 40)
        messages = split_messages(blob)
        assert len(messages) == len(arrival.entries) and arrival.body_bytes == sum(sizes)
        places = {message: place for place, message in enumerate(queue.published)}
        assert all(message in places for message in messages), (
            "a message that was never published here"
        )
        order = [places[message] for message in messages]
        assert all(a < b for a, b in itertools.pairwise(order)), "order kept, nothing twice"
        facts = arrival.facts or [0] * len(messages)
        assert [queue.facts[message] for message in messages] == list(facts)
        queue.live = dict(zip(messages, arrival.entries, strict=True))
