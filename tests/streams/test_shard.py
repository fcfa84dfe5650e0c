"""A stream is readable and confirmed after its sync.

Its files go when no sync has them.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest

from shardmq.shardd.queues.stream import PLACED_MAX
from shardmq.shardd.shard import Shard
from shardmq.shardd.store.errors import DiskFull
from shardmq.shardd.stores import NoRoom
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as m
from shardmq.shardd.wire.lane import joined
from tests.shard.test_shard import EPOCH, MESSAGE, read
from tests.support import producer_lives as lives
from tests.support.dict_store import DictHome

STREAM = m.QueueSpec(1, "/", "s", True, arguments={"x-queue-type": "stream"})
PLAIN = m.QueueSpec(2, "/", "q", True)
NOBODY_WAITS = False


class Bench:
    """A shard that is ready, with a stream, a queue, a controller and a front door."""

    def __init__(self, home: DictHome | None = None) -> None:
        self.home = DictHome() if home is None else home
        self.shard = Shard(0, EPOCH, 1, self.home, no_room=(NoRoom, DiskFull))
        self.batch = 0
        self.join(m.CONTROLLER, 3)
        self.tell(m.Assign([STREAM, PLAIN]), m.CONTROLLER, 3)
        self.join(0, 5)
        self.turn()

    def join(self, peer: int, incarnation: int) -> None:
        self.shard.receive(envelope.control(peer, incarnation, 0, 0, m.Join(f"peer-{peer}")), 1000)

    def tell(self, what: Any, peer: int = 0, incarnation: int = 5) -> None:
        self.shard.receive(envelope.control(peer, incarnation, EPOCH, 0, what), 1000)

    def publish(self, *queues: int, count: int = 1, wanted: bool = True) -> None:
        """Not persistent: to a stream that makes no difference."""
        self.batch += 1
        packer = codec.Packer(1)
        for _ in range(count):
            packer.add_stored(
                0, list(queues), MESSAGE, 9, 1, 0, 1000, 0xFFFFFFFF, 0xFF, False, False
            )
        data = packer.take(0, 0, 5, EPOCH, self.batch, wanted)
        assert data is not None
        self.shard.receive(data, 1000)

    def attach(self, consumer: int = 1, prefetch: int = 10, **read: Any) -> None:
        start = m.ReadFrom(**{"start": "first", **read})
        self.tell(
            m.AttachReader(50, 1, consumer, 9, 1, "tag", False, False, 0, prefetch, read=start)
        )

    def settle(self, kind: int, first: int, last: int) -> None:
        self.shard.receive(envelope.settles(0, 5, EPOCH, 0, [(1, kind, first, last)]), 1000)

    def sync(self) -> None:
        sync = self.shard.syncs.begin()
        assert sync is not None
        sync.run()
        self.shard.syncs.end()

    def turn(self, peer: int = 0) -> list[Any]:
        return [
            read(joined(o.message))
            for o in self.shard.turn_end(1000)
            if o.endpoint == f"peer-{peer}"
        ]


def test_a_message_of_a_stream_is_confirmed_and_read_after_its_sync() -> None:
    bench = Bench()
    bench.attach()
    assert bench.turn() == [m.AttachedAt(50, 0)]
    bench.publish(1, count=3)
    assert bench.turn() == []
    first = bench.shard.syncs.begin()
    assert first is not None
    bench.publish(1)
    assert bench.turn() == []
    first.run()
    bench.shard.syncs.end()
    assert bench.turn() == [("deliver", [(1, 1, False, 3)]), ("confirmed", 1, [])]
    bench.sync()
    assert bench.turn() == [("deliver", [(1, 4, False, 1)]), ("confirmed", 2, [])]


def test_readers_need_not_wait_for_somebody_who_waits_for_a_confirm() -> None:
    bench = Bench()
    bench.attach()
    bench.turn()
    bench.publish(1, wanted=NOBODY_WAITS)
    bench.sync()
    assert bench.turn() == [("deliver", [(1, 1, False, 1)])]


def test_a_message_for_both_is_in_the_stream_once_and_settled_in_the_store() -> None:
    bench = Bench()
    bench.publish(1, 2)
    bench.publish(2)
    bench.sync()
    store = bench.home.store("/")
    assert store.live == {1: set(), 2: store.live[2]}
    assert len(store.live[2]) == bench.shard.queues[2].backlog.ready_count == 2
    assert bench.shard.queues[1].backlog.ready_count == 1


def test_each_delivery_says_the_offsets_of_its_messages() -> None:
    bench = Bench()
    bench.publish(1, count=5)
    bench.sync()
    bench.attach(start="offset", value=2)
    sections = [
        section
        for outgoing in bench.shard.turn_end(1000)
        if envelope.read(joined(outgoing.message)).kind == m.DELIVER
        for section in codec.read_deliveries(joined(outgoing.message))
    ]
    assert [bytes(section[6]) for section in sections] == [
        struct.pack("<3Q", 2, 3, 4) + MESSAGE * 3
    ]


def test_a_reader_is_given_what_it_may_hold_and_what_it_gave_back() -> None:
    bench = Bench()
    bench.publish(1, count=5)
    bench.sync()
    bench.attach(prefetch=2)
    assert ("deliver", [(1, 1, False, 2)]) in bench.turn()
    bench.settle(m.ACK, 1, 1)
    assert bench.turn() == [("deliver", [(1, 3, False, 1)])]
    bench.settle(m.REQUEUE, 2, 2)
    assert bench.turn() == [("deliver", [(1, 4, True, 1)])]


def test_what_a_cancelled_reader_gives_back_is_where_its_name_goes_on() -> None:
    bench = Bench()
    bench.publish(1, count=12)
    bench.sync()
    bench.attach(prefetch=5, name="auditor")
    bench.turn()
    bench.settle(m.ACK, 1, 5)
    bench.turn()
    bench.settle(m.ACK, 7, 7)
    bench.tell(m.Detach(51, 1))
    for number in (6, 8, 9, 10):
        bench.tell(m.StoreOffset(60, 1, "auditor", 0), m.CONTROLLER, 3)
        assert [one.code for one in bench.turn(m.CONTROLLER)] == [406], "it holds some still"
        bench.settle(m.REQUEUE, number, number)
    assert bench.shard.streams.queues[1].log.stream.positions.get(b"auditor") == 5
    bench.turn()
    bench.attach(name="auditor")
    assert bench.turn() == [m.AttachedAt(50, 5), ("deliver", [(1, 1, False, 7)])]


def test_readers_that_are_parts_of_one_consumer_share_its_prefetch() -> None:
    bench = Bench()
    other = m.QueueSpec(3, "/", "other", True, arguments={"x-queue-type": "stream"})
    bench.tell(m.CreateQueues(40, [other]), m.CONTROLLER, 3)
    bench.publish(1, count=5)
    bench.publish(3, count=5)
    bench.sync()
    start = m.ReadFrom("first")
    for consumer, queue in ((1, 1), (2, 3)):
        bench.tell(
            m.AttachStreamPart(
                50,
                queue,
                consumer,
                9,
                1,
                "tag",
                False,
                False,
                0,
                3,
                limited=True,
                read=start,
                group=7,
            )
        )
    assert m.CreditReport(7, 0, True) in bench.turn()
    bench.shard.receive(envelope.settles(0, 5, EPOCH, 0, [(7, m.ALLOT, 3, m.KEEP)]), 1000)
    told = bench.turn()
    (sections,) = [what[1] for what in told if isinstance(what, tuple) and what[0] == "deliver"]
    ((first, *delivered),) = sections
    assert delivered == [1, False, 3]
    assert not any(isinstance(what, m.CreditReport) for what in told), "one has asked for both"
    told = [(first, m.ACK, 1, 2), (7, m.ALLOT, 5, m.KEEP)]
    bench.shard.receive(envelope.settles(0, 5, EPOCH, 0, told), 1010)
    assert bench.turn() == [("deliver", [(3 - first, 1, False, 2)])], "the other had waited"


def test_a_stream_deleted_during_a_sync_goes_with_its_end() -> None:
    bench = Bench()
    bench.attach()
    bench.publish(1)
    sync = bench.shard.syncs.begin()
    assert sync is not None
    bench.tell(m.DeleteQueue(60, 1), m.CONTROLLER, 3)
    assert m.Cancelled(1) in bench.turn()
    assert any(name.startswith("stream.1/") for name in bench.home.files.names)
    sync.run()
    bench.shard.syncs.end()
    assert not any(name.startswith("stream.1/") for name in bench.home.files.names)
    assert bench.turn() == [("confirmed", 1, [])]


def test_a_stream_purged_during_a_sync_is_empty_with_its_end() -> None:
    bench = Bench()
    bench.publish(1, count=2)
    bench.sync()
    bench.publish(1)
    sync = bench.shard.syncs.begin()
    assert sync is not None
    bench.tell(m.Purge(61, 1))
    bench.tell(m.Purge(62, 1))
    assert bench.turn() == [("confirmed", 1, [])], "the messages are there until the sync ends"
    sync.run()
    bench.shard.syncs.end()
    assert bench.turn() == [m.Done(61, 2), m.Done(62, 0), ("confirmed", 2, [])]
    assert bench.shard.queues[1].backlog.ready_count == 0
    bench.publish(1)
    bench.sync()
    bench.attach()
    assert bench.turn()[0] == m.AttachedAt(50, 3)


@pytest.mark.parametrize("in_sync", [False, True], ids=["at once", "during a sync"])
def test_a_purge_of_a_stream_that_finds_the_disk_full_is_refused_and_nothing_goes(
    in_sync: bool,
) -> None:
    bench = Bench()
    bench.publish(1, count=2)
    bench.sync()
    bench.turn()
    sync = None
    if in_sync:
        bench.publish(1, wanted=NOBODY_WAITS)
        sync = bench.shard.syncs.begin()
        assert sync is not None
    bench.home.files.no_inodes = True
    bench.tell(m.Purge(61, 1))
    if sync is not None:
        assert bench.turn() == []
        sync.run()
        bench.shard.syncs.end()
    [refused] = bench.turn()
    assert isinstance(refused, m.Refused)
    assert (refused.request, refused.code) == (61, m.NO_ROOM)
    there = 3 if in_sync else 2
    assert bench.shard.queues[1].backlog.ready_count == there
    bench.attach()
    assert bench.turn() == [m.AttachedAt(50, 0), ("deliver", [(1, 1, False, there)])]
    bench.home.files.no_inodes = False
    bench.tell(m.Purge(62, 1))
    assert m.Done(62, there) in bench.turn()
    assert bench.shard.queues[1].backlog.ready_count == 0


def test_a_stream_deleted_while_a_purge_waits_for_a_sync_answers_the_purge() -> None:
    bench = Bench()
    bench.publish(1)
    sync = bench.shard.syncs.begin()
    assert sync is not None
    bench.tell(m.Purge(61, 1))
    bench.tell(m.DeleteQueue(60, 1), m.CONTROLLER, 3)
    sync.run()
    bench.shard.syncs.end()
    assert m.Done(61, 0) in bench.turn()


@pytest.mark.parametrize("queues", [[1], [2], [1, 2]], ids=["stream", "queue", "both"])
def test_who_repeats_is_told_what_was_known_and_what_was_another_message(queues: list[int]) -> None:
    """With the batch's confirm, by confirm numbers; the first time nothing is told."""
    bench = Bench()

    def said(first: int, size: int) -> list[Any]:
        """Publish 3 messages from `first` on with the confirm numbers 11 to 13.

        Return the confirmed ones.
        """
        bench.batch += 1
        packer = codec.Packer(1)
        stored = b"".join(lives.message(b"p", first + i, size) for i in range(3))
        packer.add_stored(
            0, queues, stored, 9, 1, 11, 1000, 0xFFFFFFFF, 0xFF, True, True, 3, in_sequence=True
        )
        data = packer.take(0, 0, 5, EPOCH, bench.batch, True)
        assert data is not None
        bench.shard.receive(data, 1000)
        # None: what is repeated is on stable storage
        if (sync := bench.shard.syncs.begin()) is not None:
            sync.run()
            bench.shard.syncs.end()
        sent = [joined(message) for _, message in bench.shard.turn_end(1000)]
        confirmed = [one for one in sent if envelope.read(one).kind == m.CONFIRMED]
        return [told for one in confirmed for told in envelope.read_confirmed(one)[1]]

    assert said(0, 5) == []
    assert said(0, 5) == [(9, 1 | m.KNOWN, 11, 13)]
    assert said(2, 5) == [(9, 1 | m.KNOWN, 11, 11)]
    assert said(0, 6) == [(9, 1 | m.ALTERED, 11, 13)]
    assert said(4, 6) == [(9, 1 | m.ALTERED, 11, 11)]


def test_a_full_disk_refuses_what_is_for_a_stream() -> None:
    bench = Bench()
    bench.home.files.bytes_max = 1
    bench.publish(1)
    assert bench.shard.registry.alarm == m.LOW_ON_DISK
    assert bench.turn()[-1] == ("confirmed", 1, [(9, 1, 0, 0)])


def test_what_was_confirmed_is_there_in_the_next_life() -> None:
    bench = Bench()
    bench.publish(1, count=3)
    bench.sync()
    bench.publish(1)
    after = DictHome(bench.home.files.restarted(power_cut=True))
    again = Bench(after)
    again.attach()
    told = again.turn()
    assert told[0] == m.AttachedAt(50, 0)
    assert told[1][1][0][3] >= 3


def test_who_is_no_reader_gets_no_message_of_a_stream() -> None:
    bench = Bench()
    bench.tell(m.Attach(51, 1, 2, 9, 1, "tag", False, False, 0, 0))
    assert bench.turn() == [m.Refused(51, 404, "gone")]
    bench.tell(m.AttachReader(52, 2, 2, 9, 1, "tag", False, False, 0, 0))
    assert bench.turn() == [m.Refused(52, 404, "gone")]


def pulled(bench: Bench, offset: int, stop: int, watch: int = 9) -> tuple[list[int], int]:
    """Offsets of what is pulled, and where to go on."""
    bench.tell(m.Pull(70, 1, watch, offset, stop, 1 << 20))
    (answer,) = [what for what in bench.turn() if isinstance(what, m.Pulled)]
    assert len(answer.messages) == answer.count * len(MESSAGE)
    return list(struct.unpack(f"<{answer.count}Q", answer.offsets)), answer.next_offset


def test_what_went_to_a_watched_queue_too_is_left_out_wherever_the_queue_lives() -> None:
    bench = Bench()
    bench.publish(1, 9, count=2)
    bench.tell(m.InspectStream(71, 1, 9, 0, 0))
    bench.publish(1)
    bench.publish(1, 9, count=2)
    bench.publish(2, 9, 1)
    bench.publish(1, count=2)
    bench.publish(1, 9)
    assert bench.turn()[0] == m.StreamInspected(71, 0, 2, 0, 0)
    assert pulled(bench, 0, 9) == ([], 0), "not on stable storage"
    bench.sync()
    found, offset = [], 0
    while offset < 9:
        some, offset = pulled(bench, offset, 9)
        found += some
    assert found == [0, 1, 2, 6, 7]
    assert pulled(bench, 3, 5) == ([], 5)
    bench.tell(m.Unwatch(1, 9))
    assert pulled(bench, 0, 9) == (list(range(9)), 9)
    assert pulled(bench, 0, 9, watch=8)[0] == list(range(9))


def test_how_far_a_name_has_come_elsewhere_is_kept_and_outlives_the_shard() -> None:
    bench = Bench()
    bench.publish(1, count=5)
    bench.sync()
    bench.turn()
    for place in [
        m.StoreOffset(60, 1, "spark", 3),
        m.StoreOffset(61, 1, "other", 5),
        m.StoreOffset(62, 1, "other", None),
    ]:
        bench.tell(place, m.CONTROLLER, 3)
    assert bench.turn(m.CONTROLLER) == [m.Done(60), m.Done(61), m.Done(62)]
    bench.shard.syncs.want()
    assert bench.shard.syncs.begin() is None, "nothing but positions, which nobody waits for"
    again = Bench(bench.home)
    assert again.shard.streams.stats([1])[0].positions == {"spark": 3}
    again.attach(name="spark")
    assert again.turn()[0] == m.AttachedAt(50, 3)


def test_a_position_that_cannot_be_is_refused() -> None:
    bench = Bench()
    bench.publish(1, count=2)
    bench.tell(m.StoreOffset(60, 1, "spark", 2), m.CONTROLLER, 3)
    assert [one.request for one in bench.turn(m.CONTROLLER)] == [60], "not on stable storage yet"
    bench.sync()
    bench.attach(name="reading")
    bench.turn()
    for place in [
        m.StoreOffset(61, 1, "spark", 3),
        m.StoreOffset(62, 1, "reading", 1),
        m.StoreOffset(63, 2, "spark", 0),
    ]:
        bench.tell(place, m.CONTROLLER, 3)
    refused = bench.turn(m.CONTROLLER)
    assert [(one.request, one.code) for one in refused] == [(61, 406), (62, 406), (63, 404)]
    queue = bench.shard.streams.queues[1]
    for number in range(PLACED_MAX - 1):  # one more is reading
        queue.place(b"%d" % number, 1)
    bench.tell(m.StoreOffset(64, 1, "7", 2), m.CONTROLLER, 3)
    bench.tell(m.StoreOffset(65, 1, "one more", 2), m.CONTROLLER, 3)
    done, refused = bench.turn(m.CONTROLLER)
    assert done == m.Done(64) and "1000 names" in refused.text
