"""The shard says that what a commit has settled is on stable storage when it is.

It is said soon, whatever others do meanwhile, and nothing else is synced for it.
"""

from __future__ import annotations

import errno
import select
import threading
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from shardmq.cluster.operations import OperationLog
from shardmq.cluster.replicated_files import Confirmations, ReplicatedFiles, SyncNews
from shardmq.shardd import server
from shardmq.shardd.peers import Outgoing
from shardmq.shardd.server import Server
from shardmq.shardd.store.errors import DiskFull
from shardmq.shardd.store.format.segment_file import file_name
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.store.segments.ack_waits import AckWait
from shardmq.shardd.store.segments.pending_acks import ACKS_FILES_SYNCED_AT_ONCE
from shardmq.shardd.store.segments.segments import Segments
from shardmq.shardd.sync_threads import SyncThreads
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as m
from tests.reference.record import Record, encode_message
from tests.support.faulty_files import FaultyFiles
from tests.support.producer_lives import IN_SEQUENCE, message
from tests.support.shard_lives import DOORS, Known, Life
from tests.support.syncing import sync

EVER = 1 << 60
MINE, OTHERS = 1, 2
OF_ANOTHER_VHOST, NOT_DURABLE, STREAM = 3, 4, 5
# With this seed the first messages are small and lie in one segment.
SMALL = 5


# -- of a store alone ------------------------------------------------------------------------------


def one(number: int, queue: int = MINE, size: int = 1200) -> bytes:
    return Record((queue,), (encode_message(b"x" * size, b"", b"%d" % number),)).encode()


class Store:
    """A store of two queues, with some messages of each in each of its segments."""

    def __init__(
        self, messages: int, queues: tuple[int, ...] = (MINE, OTHERS), size: int = 1200
    ) -> None:
        self.files = FaultyFiles()
        self.store = SegmentStore("d", files=self.files, segment_bytes=4096)
        self.store.recover(queues)
        self.entries: dict[int, list[array[int]]] = {queue: [] for queue in queues}
        for number in range(messages):
            for queue in queues:
                arrivals = self.store.append(one(number, queue, size))
                self.entries[queue] += [arrival.entries for arrival in arrivals]
        sync(self.store)
        self.finish()

    def finish(self) -> None:
        while (job := self.store.begin_settled_sync()) is not None:
            job.run()
            self.store.finish_settled_sync(job)

    def sync_for(self, wait: AckWait) -> None:
        """Sync the acks that are waited for, as far as that can be done now."""
        while not wait.is_over:
            job = self.store.begin_settled_sync([wait], everything=False)
            if job is None:
                return
            job.run()
            self.store.finish_settled_sync(job)

    def settle(self, queue: int, number: int) -> str:
        """Settle a message; return the path of the acks file that says so."""
        entries = self.entries[queue][number]
        self.store.settle(queue, entries, True)
        return f"d/{file_name('acks', entries[0] >> 32)}"

    def after_a_power_cut(self) -> dict[int, int]:
        return self.after(power_cut=True)

    def after(self, *, power_cut: bool) -> dict[int, int]:
        """Return how many messages the next process finds in each queue."""
        files = self.files.restarted(power_cut=power_cut)
        store = SegmentStore("d", files=files, segment_bytes=4096)
        found = store.recover(list(self.entries))
        return {queue: len(found[queue].entries) for queue in found}


def test_only_the_acks_of_the_queues_that_were_named_are_synced() -> None:
    made = Store(40)
    mine = made.settle(MINE, 0)
    others = {made.settle(OTHERS, number) for number in (0, 20, 21, 30)}
    wait = made.store.wait_for_acks([MINE])
    job = made.store.begin_settled_sync([wait], everything=False)
    assert job is not None and job.paths == [mine] and len(others) > 2
    assert not wait.is_over
    job.run()
    made.store.finish_settled_sync(job)
    assert wait.is_over and not wait.is_refused
    assert made.after_a_power_cut()[MINE] == 39


def test_acks_that_were_written_already_are_synced_for_their_queues_alone() -> None:
    made = Store(40)
    mine, others = made.settle(MINE, 0), made.settle(OTHERS, 20)
    assert mine != others
    made.store.flush()
    wait = made.store.wait_for_acks([MINE])
    job = made.store.begin_settled_sync([wait], everything=False)
    assert job is not None and job.paths == [mine]


@pytest.mark.parametrize("written", [False, True], ids=["settled", "written"])
def test_a_look_gathers_nothing_of_queues_that_nobody_asks_about(*, written: bool) -> None:
    """A segment may have acks of thousands of queues."""
    made = Store(3, size=100)
    for queue in (MINE, OTHERS):
        made.settle(queue, 0)
    if written:
        made.store.flush()
    found = made.store._settled.by_queue(frozenset([MINE, NOT_DURABLE]))
    assert list(found) == [MINE] and len(found[MINE]) == 1


def test_acks_that_come_later_do_not_prolong_a_wait() -> None:
    segments = ACKS_FILES_SYNCED_AT_ONCE + 20
    made = Store(3 * segments + 30, (MINE,))
    for number in range(0, 3 * segments, 3):
        made.settle(MINE, number)
    wait, rounds, later = made.store.wait_for_acks([MINE]), 0, 1
    while not wait.is_over:
        job = made.store.begin_settled_sync([wait], everything=False)
        assert job is not None and len(job.paths) <= ACKS_FILES_SYNCED_AT_ONCE
        for number in range(later, later + 3 * ACKS_FILES_SYNCED_AT_ONCE // 2, 3):
            made.settle(MINE, number)  # the same client, and others, go on all the time
        later = 2
        job.run()
        made.store.finish_settled_sync(job)
        rounds += 1
        assert rounds <= 2
    assert made.after_a_power_cut()[MINE] <= 3 * segments + 30 - segments


def test_a_disk_without_room_refuses_a_wait_and_no_other() -> None:
    made = Store(40)
    made.settle(MINE, 0)
    made.finish()
    made.settle(MINE, 1)
    made.store.flush()
    made.settle(OTHERS, 30)
    made.files.bytes_max = 0
    mine, others = made.store.wait_for_acks([MINE]), made.store.wait_for_acks([OTHERS])
    job = made.store.begin_settled_sync([mine, others], everything=False)
    assert job is not None
    job.run()
    made.store.finish_settled_sync(job)
    assert others.is_refused and not mine.is_refused
    assert mine.is_over


def test_a_segment_that_goes_while_its_acks_are_synced_has_its_new_name_synced_too() -> None:
    made = Store(10, (MINE,))  # three are in the first segment
    made.settle(MINE, 0)
    made.finish()  # the acks file has a lasting name
    made.settle(MINE, 1)
    wait = made.store.wait_for_acks([MINE])
    job = made.store.begin_settled_sync([wait], everything=False)
    assert job is not None and not job.with_directory
    made.settle(MINE, 2)
    made.store.compact()  # removes the files
    assert job.paths[0] not in made.files.names
    job.run()
    made.store.finish_settled_sync(job)
    assert not wait.is_over
    job = made.store.begin_settled_sync([wait], everything=False)
    assert job is not None and job.with_directory and not job.paths
    job.run()
    made.store.finish_settled_sync(job)
    assert wait.is_over
    assert made.after_a_power_cut()[MINE] == 7


@pytest.mark.parametrize("sealed", ["before", "while it waits"])
def test_a_segment_with_sequences_that_others_settle_keeps_a_commit_waiting(sealed: str) -> None:
    """The segment stays until the file of producers covers it, and its acks stay with it."""
    made = Store(0)
    store = made.store
    mine, others = in_sequence(store, MINE, 1), in_sequence(store, OTHERS, 2)
    sync(store)  # the segment is open, and not covered
    if sealed == "before":
        seal(store)
    store.settle(MINE, mine, True)
    assert not store.has_unwritten_acks()
    wait = store.wait_for_acks([MINE])
    store.settle(OTHERS, others, True)  # nothing of the segment is needed now
    if sealed == "while it waits":
        seal(store)
    made.sync_for(wait)
    assert wait.is_over
    assert not any(made.after_a_power_cut().get(MINE) for _ in range(20))
    sync(store)
    assert store.stats()["segments"] == 1, "what is covered and not needed goes"


def in_sequence(store: SegmentStore, queue: int, number: int, size: int = 100) -> array[int]:
    """Append a message of a producer to the queue; return its entry."""
    record = Record((queue,), (message(b"p", number, size),), number, flags=1 | IN_SEQUENCE)
    screened = store.screen(record.encode(), {})
    return store.append(screened.records, in_sequence=True)[0].entries


def seal(store: SegmentStore) -> None:
    """Begin another segment, with a message that nobody needs."""
    store.settle(OTHERS, store.append(one(0, OTHERS, 3800))[0].entries, False)


def test_acks_last_when_the_followers_in_sync_have_synced_them_too() -> None:
    """The sync returns when the number of its last operation is confirmed, and not before."""
    files, log, confirmations = FaultyFiles(), OperationLog(), Confirmations()
    done: list[int] = []
    news = SyncNews(lambda *_: None, lambda: None, done.append)
    copied = ReplicatedFiles(files, "d", log, confirmations, news)
    store = SegmentStore("d", files=copied, segment_bytes=4096)

    def begin() -> None:
        store.recover([MINE])
        entries.extend(store.append(one(1) + one(2))[0].entries)
        sync(store)

    entries: list[int] = []
    beginning = threading.Thread(target=begin)
    beginning.start()
    while beginning.is_alive():
        confirmations.confirm(log.last.number)
        beginning.join(0.001)  # from then on the follower lags
    store.settle(MINE, array("Q", entries[:1]), True)
    wait = store.wait_for_acks([MINE])
    job = store.begin_settled_sync([wait], everything=False)
    assert job is not None
    running = threading.Thread(target=job.run)
    before = len(done)
    running.start()
    while len(done) == before:
        running.join(0.001)
    assert running.is_alive() and not job.done, "the own disk alone is not enough"
    confirmations.confirm(EVER)
    running.join()
    store.finish_settled_sync(job)
    assert wait.is_over


# -- of a shard ------------------------------------------------------------------------------------


class Asking:
    """A shard over files in memory, whose syncs and merges run when the test says so."""

    def __init__(self, queue: int = MINE, seed: int = 1) -> None:
        self.files = FaultyFiles(seed)
        self.life = Life(self.files, 1, Known(), seed)
        self.life.targets = [(queue,)]
        self.life.start()
        self.life.attach()
        self.queue = queue
        self.door = DOORS[queue % len(DOORS)]

    def publish(self, messages: int) -> None:
        while len(self.life.held[self.queue]) < messages:
            self.life.publish()
            self.life.turn()

    def ack(self) -> int:
        """Acknowledge the oldest message that is held; return the message."""
        delivery, message = next(iter(self.life.held[self.queue].items()))
        del self.life.held[self.queue][delivery]
        settle = (self.queue, m.ACK, delivery, delivery)
        self.life.receive(envelope.settles(self.door, 1, 1, 0, [settle]))
        return message

    def ask(self, *queues: int) -> None:
        self.life.last_asked += 1
        self.life.asked[self.life.last_asked] = {}
        self.life.tell(self.door, m.SyncSettled(self.life.last_asked, list(queues)))

    @property
    def unanswered(self) -> int:
        self.life.hear_all(self.life.shard.answers())
        return len(self.life.asked)

    @property
    def syncs(self) -> int:
        return sum(call in ("sync", "sync_directory") for call in self.files.calls)

    def after_a_power_cut(self) -> set[int]:
        after = Life(self.files.restarted(power_cut=True), 2, Known())
        after.start()
        return {message for message, _ in after.contents(self.queue)}

    def settle_down(self) -> None:
        """Let a second pass, so that everything is on stable storage."""
        self.life.second()
        self.life.second()


def test_queues_that_are_not_durable_and_streams_are_answered_for_at_once() -> None:
    made = Asking()
    made.settle_down()
    made.publish(2)
    made.ack()
    before = made.syncs
    made.ask(NOT_DURABLE, STREAM, 99)
    assert not made.unanswered
    assert made.life.shard.syncs.begin_settled() is None and made.syncs == before


def test_an_ask_is_answered_when_its_sync_has_ended_and_the_next_asks_share_the_next_sync() -> None:
    made = Asking(seed=SMALL)
    made.publish(5)
    made.life.sync()
    made.settle_down()
    gone = {made.ack()}
    made.ask(MINE)
    made.life.begin_settled_sync()
    assert made.unanswered == 1 and made.life.settled_sync_under_way is not None
    for _ in range(3):
        gone.add(made.ack())
        made.ask(MINE)
        made.life.begin_settled_sync()
    made.life.end_settled_sync()
    made.life.sync()
    assert made.unanswered == 3
    made.life.begin_sync()
    made.life.end_sync()
    before = made.syncs
    made.life.begin_settled_sync()
    made.life.end_settled_sync()
    assert not made.unanswered and made.syncs - before <= 2
    assert not made.after_a_power_cut() & gone


def write_later() -> AbstractContextManager[object]:
    return mock.patch.object(Segments, "has_unwritten_acks", lambda segments: False)


@pytest.mark.parametrize(
    ("broken", "comes_back"), [(nullcontext, False), (write_later, True)], ids=["whole", "broken"]
)
def test_what_was_never_written_does_not_come_back_with_what_is_written_later(
    broken: Callable[[], AbstractContextManager[object]], comes_back: bool
) -> None:
    back: list[set[int]] = []
    with broken():
        for seed in range(30):
            made = Asking(seed=seed)
            made.settle_down()
            made.publish(3)
            gone = {made.ack()}
            made.ask(MINE)
            for _ in range(2):
                made.life.begin_settled_sync()
                made.life.end_settled_sync()
                if made.unanswered:
                    made.life.sync()
            assert not made.unanswered
            made.life.publish()
            made.life.sync()
            back.append(made.after_a_power_cut() & gone)
    assert any(back) == comes_back


@pytest.mark.parametrize("written", [True, False], ids=["written", "not written"])
def test_a_full_disk_says_no_and_does_not_make_anybody_wait(written: bool) -> None:
    made = Asking(seed=SMALL)
    made.publish(4)
    if written:
        made.life.sync()
        made.settle_down()
    made.life.fault = "full"
    made.ack()
    made.ask(MINE)
    if written:
        made.files.bytes_max = 0
    else:  # room for the messages was set aside, but their file gets no name
        made.files.fail["rename"] = (0, errno.ENOSPC)
    made.life.begin_sync()
    made.life.end_sync()
    made.life.begin_settled_sync()
    made.life.end_settled_sync()
    assert not made.unanswered and not made.life.known.syncs_answered


def test_a_store_without_room_refuses_no_ask_about_another_store() -> None:
    made = Asking(seed=SMALL)
    made.publish(2)
    made.life.targets, made.queue = [(OF_ANOTHER_VHOST,)], OF_ANOTHER_VHOST
    made.publish(2)
    made.life.fault = "full"
    for queue in (MINE, OF_ANOTHER_VHOST):
        made.queue = queue
        made.ack()
        made.ask(queue)
    made.files.fail["rename"] = (1, errno.ENOSPC)  # the second store gives its file no name
    made.life.begin_sync()
    made.life.end_sync()
    assert made.unanswered == 1 and not made.life.known.syncs_answered
    assert list(made.life.asked) == [1], "the first one, about the store that had room"
    made.files.fail.clear()
    made.life.begin_settled_sync()
    made.life.end_settled_sync()
    assert not made.unanswered and made.life.known.syncs_answered == 1


def test_a_disk_without_room_for_sequences_refuses_no_ask() -> None:
    made = Asking(seed=SMALL)
    made.publish(4)
    made.life.sync()
    made.settle_down()
    made.life.publish()
    made.life.begin_sync()
    made.ack()
    made.ask(MINE)
    finish = SegmentStore.finish_sync

    def without_room(store: SegmentStore, job: Any) -> None:
        finish(store, job)
        raise DiskFull("on purpose")

    with mock.patch.object(SegmentStore, "finish_sync", without_room):
        made.life.end_sync()
    assert made.unanswered == 1
    made.life.begin_settled_sync()
    made.life.end_settled_sync()
    assert not made.unanswered and made.life.known.syncs_answered == 1


def test_an_ask_waits_for_the_merge_that_has_its_acks_and_no_merge_begins_before_its_sync() -> None:
    store = Store(40)
    for number in range(40):
        if number % 20 != 5:
            store.settle(OTHERS, number)
            if number % 20 != 6:
                store.settle(MINE, number)
    store.finish()
    merge = store.store.begin_reclaim()
    assert merge is not None and merge.sources
    store.settle(MINE, 6)
    wait = store.store.wait_for_acks([MINE])
    assert store.store.begin_settled_sync([wait], everything=False) is None
    assert not wait.is_over and not wait.is_refused
    merge.run()
    store.store.finish_reclaim(merge)
    for _ in range(2):
        if (job := store.store.begin_settled_sync([wait], everything=False)) is not None:
            job.run()
            store.store.finish_settled_sync(job)
    assert wait.is_over
    assert store.after_a_power_cut()[MINE] == 3


def test_acks_that_a_merge_holds_do_not_last_with_those_written_before_it() -> None:
    store = Store(120, (MINE,), size=150)
    found: dict[int, list[int]] = {}
    for number, entries in enumerate(store.entries[MINE]):
        found.setdefault(entries[0] >> 32, []).append(number)
    sparse = dict(list(found.items())[:-2])
    for numbers in sparse.values():
        for number in numbers[3:]:
            store.settle(MINE, number)
    store.finish()
    left = store.after_a_power_cut()[MINE]
    for numbers in sparse.values():
        store.settle(MINE, numbers[0])
    store.store.flush()  # written, and not synced
    merge = store.store.begin_reclaim()
    assert merge is not None
    source = next(each.segment.number for each in merge.sources if each.segment.number in sparse)
    store.settle(MINE, sparse[source][1])
    wait = store.store.wait_for_acks([MINE])
    store.sync_for(wait)
    assert not wait.is_over and not wait.is_refused
    merge.run()
    store.store.finish_reclaim(merge)
    store.sync_for(wait)
    assert wait.is_over
    assert store.after_a_power_cut()[MINE] == left - len(sparse) - 1


@pytest.mark.parametrize("power_cut", [True, False], ids=["power cut", "kill"])
@pytest.mark.parametrize("syncing", [True, False], ids=["in a sync", "before it"])
def test_what_a_merge_has_moved_does_not_come_back_when_all_of_it_was_settled(
    *, syncing: bool, power_cut: bool
) -> None:
    made = Store(120, (MINE,), size=150)
    store, entries = made.store, made.entries[MINE]
    left = [5, 30, 55]  # of 120 in five segments
    for number in sorted(set(range(120)) - set(left)):
        made.settle(MINE, number)
    made.finish()
    merge = store.begin_reclaim()
    assert merge is not None and len(merge.sources) > 1
    merge.run()
    store.finish_reclaim(merge)
    job = store.begin_sync() if syncing else None  # after it the sources may go
    for number in left:
        made.settle(MINE, number)
    wait = store.wait_for_acks([MINE])
    made.sync_for(wait)
    assert wait.is_over and entries[left[0]][0] >> 32 not in store._by_number
    assert not any(made.after(power_cut=power_cut).get(MINE) for _ in range(20))
    if job is not None:
        job.run()
        store.finish_sync(job)
    assert store.stats()["live_messages"] == 0


def test_what_a_merged_segment_has_synced_does_not_come_back_while_the_names_change() -> None:
    """A power cut leaves some first part of the changes; the acks are those of the merged one."""
    made = Store(120, (MINE,), size=150)
    store, left = made.store, [5, 30, 55]  # of 120 in five segments
    for number in sorted(set(range(120)) - set(left)):
        made.settle(MINE, number)
    made.finish()
    assert store.compact() > 0
    for number in left[:2]:
        made.settle(MINE, number)
    wait = store.wait_for_acks([MINE])
    made.sync_for(wait)
    assert wait.is_over
    made.settle(MINE, left[2])  # and nothing of the merged segment is needed
    found = [made.after_a_power_cut().get(MINE, 0) for _ in range(40)]
    assert max(found) == 1, "the last one, while the merged segment has its name"


def test_merges_go_on_beside_asks_without_end() -> None:
    """At least one merge may begin for each sync that is asked for."""
    made = Asking()
    made.publish(4)
    made.life.sync()
    syncs, upkeep = made.life.shard.syncs, made.life.shard.upkeep
    with mock.patch.object(upkeep, "begin", return_value="step") as begun:
        for number in range(1, 6):
            made.publish(2)
            made.ack()
            made.ask(MINE)
            with mock.patch.object(upkeep, "end", return_value=None):
                syncs.end_reclaim(made.life.now)  # a merge ends while the ask waits
            assert syncs.merges_are_held and syncs.begin_reclaim(made.life.now) is None
            made.life.begin_sync()
            made.life.end_sync()
            made.life.begin_settled_sync()
            assert not syncs.merges_are_held
            assert syncs.begin_reclaim(made.life.now) == "step" and begun.call_count == number
            made.life.end_settled_sync()


def test_asks_do_not_hold_each_other_up() -> None:
    """Each ask is answered by the sync that begins next, however many come meanwhile."""
    made = Asking()
    made.publish(4)
    made.life.sync()
    waited: dict[int, int] = {}
    for now in range(40):
        made.publish(2)
        made.ack()
        made.ask(MINE)
        waited[made.life.last_asked] = now
        made.life.begin_sync()
        made.life.end_sync()
        made.life.end_settled_sync()
        made.life.begin_settled_sync()
        assert made.unanswered <= 2
        assert all(now - waited[number] <= 2 for number in made.life.asked)


def test_a_shard_that_stops_answers_all_who_wait_for_acks() -> None:
    made = Asking()
    made.publish(4)
    made.life.sync()
    made.settle_down()
    threads = SyncThreads(made.life.shard.syncs)
    made.ack()
    made.ask(MINE)
    threads.begin_settled_sync()  # in its thread
    made.ack()
    made.ask(MINE)
    threads.sync_here()  # what has not been written yet
    threads.answer_about_acks(made.life.now)
    assert not made.unanswered
    assert made.life.known.syncs_answered == 2


def test_the_vhost_that_goes_needs_no_acks() -> None:
    made = Asking()
    made.publish(4)
    made.life.sync()
    made.ack()
    made.ask(MINE)
    made.life.tell(m.CONTROLLER, m.DropVhost(1, "/"))
    made.life.begin_sync()
    made.life.end_sync()
    made.life.begin_settled_sync()
    made.life.end_settled_sync()
    assert not made.unanswered


# -- of the loop -----------------------------------------------------------------------------------


def loop_of(made: Asking, threads: Any, alone: bool) -> tuple[Any, list[Outgoing]]:
    """Return what `Server.turn` looks at, and the list of what it sends."""
    sent: list[Outgoing] = []
    loop: Any = SimpleNamespace(
        shard=made.life.shard,
        links=SimpleNamespace(send=sent.extend, receive=lambda now: 1, hear=lambda fd, now: False),
        _threads=threads,
        _alone=alone,
        _next_tick=made.life.now + 500,
        _is_ready=True,
        _others={},
    )
    loop._look_at = partial(Server._look_at, loop)
    return loop, sent


def test_an_answer_at_the_very_end_of_a_pass_leaves_with_the_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, begun = Asking(), []
    made.life.turn()

    def begin() -> None:
        begun.append(1)
        if len(begun) == 2:  # nothing is left to be synced
            made.ask(NOT_DURABLE)

    threads = SimpleNamespace(
        begin_settled_sync=begin, begin_sync=lambda: None, begin_reclaim=lambda now: None
    )
    loop, sent = loop_of(made, threads, alone=False)
    monkeypatch.setattr(server, "_now", lambda: made.life.now)
    Server.turn(loop, [])
    made.life.hear_all(sent)
    assert not made.life.asked


@pytest.mark.parametrize("alone", [True, False], ids=["syncs here", "syncs in its thread"])
@pytest.mark.parametrize("written", [True, False], ids=["written", "not written"])
@pytest.mark.parametrize("settled", ["some", "some, and synced", "all"])
def test_the_loop_sends_the_answer_without_waiting_for_another_message(
    monkeypatch: pytest.MonkeyPatch, *, alone: bool, written: bool, settled: str
) -> None:
    made = Asking(seed=SMALL)
    made.settle_down()
    made.publish(4)
    if written:
        made.life.sync()
    made.ack()
    while settled == "all" and made.life.held[MINE]:
        made.ack()
        made.life.turn()  # more is handed out
    if settled == "some, and synced":
        made.settle_down()
    made.ask(MINE)
    now = made.life.now
    monkeypatch.setattr(server, "_now", lambda: now)
    threads = SyncThreads(made.life.shard.syncs)
    threads.messages.usual_s = 0.0
    loop, sent = loop_of(made, threads, alone)
    events: list[tuple[int, int]] = []
    for _ in range(4):
        Server.turn(loop, events)
        made.life.hear_all(sent)
        sent.clear()
        if not made.life.asked:
            break
        with select.epoll() as waiting:
            for fd in threads.fds:
                waiting.register(fd, select.EPOLLIN)
            events = waiting.poll(10)
        assert events, "the loop would sleep on"
    assert not made.life.asked and made.life.known.syncs_answered == 1
