"""Nothing is confirmed before its sync; what a peer held comes back when it goes."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest

from shardmq.broker.controller.peers.shard_links import visit
from shardmq.shardd import stats
from shardmq.shardd.peers import PUBLISH_CREDIT_BYTES, BatchMissing
from shardmq.shardd.queues import Queue
from shardmq.shardd.shard import Shard
from shardmq.shardd.stores import NoRoom
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as m
from shardmq.shardd.wire.lane import joined
from tests.support.dict_store import DictHome, DictStore

EPOCH = 7
MESSAGE = struct.pack("<II", 4, 0) + b"\0\1qbody"


class Bench:
    """A shard that is ready, with a controller and a front door."""

    def __init__(self, **arguments: Any) -> None:
        self.home = DictHome()
        self.store = self.home.store("/")
        self.shard = Shard(0, EPOCH, 1, self.home)
        self.batch = 0
        self.join(m.CONTROLLER, 3)
        self.tell(m.Assign([m.QueueSpec(1, "/", "q", True, arguments=arguments)]), m.CONTROLLER, 3)
        self.join(0, 5)
        self.turn()

    def join(self, peer: int, incarnation: int) -> None:
        self.shard.receive(envelope.control(peer, incarnation, 0, 0, m.Join(f"peer-{peer}")), 1000)

    def tell(self, what: Any, peer: int = 0, incarnation: int = 5) -> None:
        self.shard.receive(envelope.control(peer, incarnation, EPOCH, 0, what), 1000)

    def allot(self, allowed: int, mode: int, consumer: int = 1) -> None:
        told = [(consumer, m.ALLOT, allowed, mode)]
        self.shard.receive(envelope.settles(0, 5, EPOCH, 0, told), 1000)

    def publish(self, count: int = 1, sync: bool = True, marks: int = 0) -> int:
        self.batch += 1
        packer = codec.Packer(1)
        for i in range(count):
            packer.add_stored(
                0, [1], MESSAGE, 9, 1, i + 1, 1000, 0xFFFFFFFF, 0xFF, True, sync, marks=marks
            )
        data = packer.take(0, 0, 5, EPOCH, self.batch)
        assert data is not None
        self.shard.receive(data, 1000)
        return len(data)

    def attach(self, consumer: int = 1, **more: Any) -> None:
        fields = {"no_ack": False, "exclusive": False, "priority": 0, "prefetch": 0} | more
        self.tell(m.Attach(50, 1, consumer, 9, 1, "tag", **fields))

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


def read(message: bytes) -> Any:
    kind = envelope.read(message).kind
    if kind == m.CONFIRMED:
        return ("confirmed", *envelope.read_confirmed(message))
    if kind == m.DELIVER:
        return ("deliver", [section[2:6] for section in codec.read_deliveries(message)])
    if kind == m.CREDIT:
        return ("credit", envelope.read_credit(message))
    return envelope.read_control(message)


def test_nothing_is_confirmed_before_a_sync_that_began_after_it() -> None:
    bench = Bench()
    bench.publish()
    first = bench.shard.syncs.begin()
    assert first is not None
    assert not bench.turn()
    bench.publish()
    bench.publish(sync=False)
    first.run()
    bench.shard.syncs.end()
    assert bench.turn() == [("confirmed", 1, [])]
    assert not bench.turn()
    bench.sync()
    assert bench.turn() == [("confirmed", 3, [])]


def test_a_message_leaves_before_its_confirm() -> None:
    bench = Bench()
    bench.attach()
    bench.turn()
    bench.publish(2, sync=False)
    assert bench.turn() == [("deliver", [(1, 1, False, 2)]), ("confirmed", 1, [])]


def test_publishes_are_credited_in_steps_and_every_byte_once() -> None:
    bench = Bench()
    taken = 0
    for _ in range(3):
        while taken < PUBLISH_CREDIT_BYTES:
            assert not bench.turn()
            taken += bench.publish(500)
        assert bench.turn() == [("credit", [(0, taken)])]
        taken = 0


def test_a_publish_to_many_queues_is_credited_with_its_references() -> None:
    bench = Bench()
    bench.batch += 1
    packer = codec.Packer(1)
    packer.add_stored(
        0, list(range(1, 60001)), MESSAGE * 2, 9, 1, 0, 1000, 0xFFFFFFFF, 0xFF, False, False, 2
    )
    weight = packer.weight(0)
    data = packer.take(0, 0, 5, EPOCH, bench.batch, False)
    assert data is not None
    bench.shard.receive(data, 1000)
    assert len(data) < PUBLISH_CREDIT_BYTES < weight
    assert bench.turn() == [("credit", [(0, len(data) + weight)])]


def test_what_a_front_door_held_is_requeued_when_it_goes() -> None:
    bench = Bench()
    bench.attach()
    bench.publish(3)
    assert bench.turn()[-1] == ("deliver", [(1, 1, False, 3)])
    bench.shard.receive(envelope.settles(0, 5, EPOCH, 0, [(1, m.ACK, 2, 2)]), 1000)
    bench.tell(m.FrontDoorGone(0, 5), m.CONTROLLER, 3)
    assert bench.shard.queues[1].backlog.ready_count == 2
    bench.join(0, 6)
    bench.tell(m.Get(8, 1, 4, 9, 1, False), 0, 6)
    got = bench.turn()[-1]
    assert (got.number, got.redelivered, got.remaining) == (1, True, 1)


def test_a_stale_message_changes_nothing() -> None:
    bench = Bench()
    bench.shard.receive(envelope.control(0, 5, EPOCH + 1, 0, m.Purge(1, 1)), 1000)
    bench.shard.receive(envelope.control(0, 4, EPOCH, 0, m.Purge(1, 1)), 1000)
    assert not bench.turn()


def test_an_exclusive_consumer_is_alone() -> None:
    bench = Bench()
    bench.attach(1, exclusive=True)
    bench.attach(2)
    assert bench.turn() == [m.Attached(50), m.Refused(50, 403, "exclusive use")]


def test_a_full_disk_refuses_by_confirm_number() -> None:
    bench = Bench()
    bench.store.full = True
    bench.publish(3)
    assert ("confirmed", 1, [(9, 1, 1, 3)]) in bench.turn()


def test_a_full_disk_tells_a_transaction_which_has_no_confirm_numbers() -> None:
    bench = Bench()
    bench.store.full = True
    packer = codec.Packer(1)
    for channel, seq in ((1, 0), (1, 0), (2, 7)):
        packer.add_stored(0, [1], MESSAGE, 9, channel, seq, 1000, 0xFFFFFFFF, 0xFF, True, True)
    data = packer.take(0, 0, 5, EPOCH, 1)
    assert data is not None
    bench.shard.receive(data, 1000)
    assert ("confirmed", 1, [(9, 1, 0, 0), (9, 2, 7, 7)]) in bench.turn()


def test_a_new_controller_hears_of_queues_whose_end_the_old_one_may_have_missed() -> None:
    bench = Bench()
    bench.tell(
        m.CreateQueues(1, [m.QueueSpec(2, "/", "auto", False, auto_delete=True)]), m.CONTROLLER, 3
    )
    bench.tell(
        m.Attach(50, 2, 7, 9, 1, "tag", no_ack=False, exclusive=False, priority=0, prefetch=0)
    )
    bench.tell(m.Release(51, [7]))
    assert m.AutoDeleted(2, "auto-delete") in bench.turn(m.CONTROLLER)
    bench.join(m.CONTROLLER, 4)
    assert bench.turn(m.CONTROLLER) == [m.Hello(1, ready=True), m.AutoDeleted(2, "auto-delete")]


def test_front_doors_that_are_asked_to_pause_have_what_they_sent_before_confirmed() -> None:
    bench = Bench()
    bench.join(1, 6)
    bench.turn(1)
    bench.publish()
    membership = bench.shard.membership
    membership.ask_to_pause()
    assert bench.turn(1) == [m.Hello(1, ready=False, leaving=True)]
    assert m.Hello(1, ready=False, leaving=True) not in bench.turn(m.CONTROLLER)
    bench.publish()
    bench.tell(m.Paused())
    assert not membership.are_paused
    bench.tell(m.Paused(), 1, 6)
    assert membership.are_paused
    bench.sync()
    assert ("confirmed", 2, []) in bench.turn()
    bench.join(2, 7)  # a front door that comes now
    assert not membership.are_paused


AUTO = m.QueueSpec(2, "/", "auto", False, auto_delete=True)


def test_who_lets_go_of_consumers_hears_which_queues_go_and_they_are_counted_no_more() -> None:
    bench = Bench()
    more = [m.QueueSpec(number, "/", f"auto{number}", False, auto_delete=True) for number in (3, 4)]
    bench.tell(m.CreateQueues(1, [AUTO, *more]), m.CONTROLLER, 3)
    for consumer, queue in ((6, 1), (7, 2), (8, 2), (9, 3), (10, 3), (11, 4)):
        bench.tell(
            m.Attach(
                50,
                queue,
                consumer,
                9,
                1,
                "tag",
                no_ack=False,
                exclusive=False,
                priority=0,
                prefetch=0,
            )
        )
    bench.turn()
    bench.tell(m.Release(51, [6, 7, 9, 10, 11]))
    assert bench.turn() == [m.Done(51, closed=[3, 4])]
    bench.tell(m.Release(52, [8]))
    bench.tell(m.Count(2, 1), m.CONTROLLER, 3)
    bench.tell(m.Count(3, 2), m.CONTROLLER, 3)  # who is refused has heard why
    assert bench.turn(m.CONTROLLER) == [
        m.AutoDeleted(2, "auto-delete"),
        m.Done(2, 0, 0),
        m.Refused(3, 404, "gone"),
    ]


def test_the_controller_hears_once_that_an_auto_delete_queue_has_had_a_consumer() -> None:
    bench = Bench()
    bench.tell(m.CreateQueues(1, [AUTO]), m.CONTROLLER, 3)
    for consumer in (7, 8):
        bench.tell(
            m.Attach(
                50, 2, consumer, 9, 1, "tag", no_ack=False, exclusive=False, priority=0, prefetch=0
            )
        )
    assert bench.turn(m.CONTROLLER).count(m.FirstConsumer(2)) == 1
    bench.join(m.CONTROLLER, 4)
    assert bench.turn(m.CONTROLLER) == [m.Hello(1, ready=True), m.FirstConsumer(2)]


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_controller_hears_of_consumers_that_a_former_process_of_the_shard_had(
    is_ready: bool,
) -> None:
    """The controller that knew it dies: before the shard is ready, or behind that."""
    shard = Shard(0, EPOCH, 1, DictHome())

    def say(what: Any, incarnation: int) -> None:
        epoch = 0 if isinstance(what, m.Join) else EPOCH
        shard.receive(envelope.control(m.CONTROLLER, incarnation, epoch, 0, what), 1000)

    say(m.Join("controller-3"), 3)
    say(m.Assign([AUTO], last=is_ready, used=[2]), 3)
    shard.turn_end(1000)
    say(m.Join("controller-4"), 4)
    if not is_ready:
        say(m.Assign([AUTO]), 4)
    told = [read(joined(out.message)) for out in shard.turn_end(1000)]
    assert m.FirstConsumer(2) in told


def test_an_auto_delete_queue_nobody_came_back_to_goes_when_the_controller_has_looked() -> None:
    """Its consumers were of another process.

    The controller comes and leaves as a consumer that takes nothing.
    """
    for somebody in (False, True):
        bench = Bench()
        bench.tell(m.CreateQueues(1, [AUTO]), m.CONTROLLER, 3)
        if somebody:
            bench.tell(
                m.Attach(
                    50, 2, 7, 9, 1, "tag", no_ack=False, exclusive=True, priority=0, prefetch=0
                )
            )
        bench.turn(m.CONTROLLER)
        bench.tell(visit(2, queue=2, consumer=1), m.CONTROLLER, 3)
        bench.tell(m.Release(3, [1]), m.CONTROLLER, 3)
        said = bench.turn(m.CONTROLLER)
        assert (m.AutoDeleted(2, "auto-delete") in said) is not somebody
        assert m.Attached(2) in said and (m.Done(3) if somebody else m.Done(3, closed=[2])) in said


class Session:
    """A session of a front door of another node."""

    numbers = itertools.count(6)

    def __init__(self, bench: Bench, process: int, door: int = 1) -> None:
        self.bench, self.door = bench, door
        self.incarnation = next(Session.numbers)
        self.endpoint = f"session:{self.incarnation}"
        self._say(0, m.Join(self.endpoint, process))
        self.epoch = bench.shard.peers[door].epoch
        bench.shard.turn_end(1000)

    def _say(self, epoch: int, what: Any) -> None:
        self.bench.shard.receive(
            envelope.control(self.door, self.incarnation, epoch, 0, what), 1000
        )

    def tell(self, what: Any) -> list[Any]:
        """Say something; return what is answered."""
        self._say(self.epoch, what)
        said = self.bench.shard.turn_end(1000)
        return [read(joined(each.message)) for each in said if each.endpoint == self.endpoint]

    def attach(self, consumer: int, **more: Any) -> list[Any]:
        fields = {"no_ack": False, "exclusive": False, "priority": 0, "prefetch": 0} | more
        return self.tell(m.Attach(50, 2, consumer, 9, 1, "tag", **fields))

    def end(self) -> None:
        self.bench.shard.membership.session_ended(self.endpoint, 1000)


def with_auto_delete_queue() -> Bench:
    bench = Bench()
    bench.tell(m.CreateQueues(1, [AUTO]), m.CONTROLLER, 3)
    bench.turn(m.CONTROLLER)
    return bench


GONE = m.AutoDeleted(2, "auto-delete")


@pytest.mark.parametrize("is_noticed", [True, False])
def test_an_auto_delete_queue_waits_for_a_front_door_that_was_cut_off(is_noticed: bool) -> None:
    """The answer to an attach may have been lost by the cut, so it is asked again."""
    bench = with_auto_delete_queue()
    first = Session(bench, process=5)
    first.attach(7)
    if is_noticed:
        first.end()
    again = Session(bench, process=5)
    first.end()
    assert GONE not in bench.turn(m.CONTROLLER)
    assert again.attach(7) == [m.Attached(50)]
    assert again.tell(m.Release(51, [7])) == [m.Done(51, closed=[2])]


def test_an_auto_delete_queue_goes_with_the_last_front_door_that_it_waits_for() -> None:
    bench = with_auto_delete_queue()
    doors = [Session(bench, process=5, door=door) for door in (1, 2, 3)]
    for door in doors:
        door.attach(7)
    doors[0].end()
    doors[1].end()
    doors[2].tell(m.Release(51, [7]))
    bench.tell(m.FrontDoorGone(1, 4), m.CONTROLLER, 3)  # an earlier process
    bench.tell(m.FrontDoorGone(1, 5), m.CONTROLLER, 3)
    assert GONE not in bench.turn(m.CONTROLLER)
    bench.tell(m.FrontDoorGone(2, 5), m.CONTROLLER, 3)
    assert GONE in bench.turn(m.CONTROLLER)
    assert not bench.shard.registry.expected


@pytest.mark.parametrize("is_cut", [True, False])
def test_an_auto_delete_queue_does_not_wait_for_a_front_door_that_is_gone(is_cut: bool) -> None:
    """The controller may have said so before the session ended, or looks behind all others."""
    bench = with_auto_delete_queue()
    session = Session(bench, process=5)
    session.attach(7)
    if is_cut:
        session.end()
        bench.tell(visit(2, queue=2, consumer=1), m.CONTROLLER, 3)
        bench.tell(m.Release(3, [1]), m.CONTROLLER, 3)
    else:
        bench.tell(m.FrontDoorGone(1, 5), m.CONTROLLER, 3)
        session.end()
    assert GONE in bench.turn(m.CONTROLLER)
    assert not bench.shard.registry.expected


def test_an_auto_delete_queue_that_is_deleted_is_waited_for_no_more() -> None:
    bench = with_auto_delete_queue()
    session = Session(bench, process=5)
    session.attach(7)
    session.end()
    bench.tell(m.DeleteQueue(9, 2), m.CONTROLLER, 3)
    bench.tell(m.FrontDoorGone(1, 5), m.CONTROLLER, 3)
    assert GONE not in bench.turn(m.CONTROLLER)
    assert not bench.shard.registry.expected


def test_the_late_words_of_a_dead_front_door_do_not_drive_out_its_successor() -> None:
    bench = Bench()
    bench.join(0, 6)
    bench.tell(
        m.Attach(50, 1, 1, 9, 1, "tag", no_ack=False, exclusive=False, priority=0, prefetch=0), 0, 6
    )
    bench.join(0, 5)
    bench.tell(m.FrontDoorGone(0, 5), m.CONTROLLER, 3)
    assert len(bench.shard.queues[1].consumers) == 1


def test_what_a_dead_front_door_said_before_its_end_counts_for_nothing_behind_the_news_of_it() -> (
    None
):
    bench = Bench()
    bench.tell(m.FrontDoorGone(0, 5), m.CONTROLLER, 3)
    bench.join(0, 5)
    bench.tell(
        m.Attach(50, 1, 1, 9, 1, "tag", no_ack=False, exclusive=False, priority=0, prefetch=0)
    )
    assert not len(bench.shard.queues[1].consumers)
    # It may still be there, and must not wait for answers: it hears so at once, and at each Join.
    last_words = bench.shard.membership.last_words
    said = [(each.endpoint, read(joined(each.message))) for each in last_words]
    assert said == [("peer-0", m.TakenForGone(5))] * 2
    bench.join(0, 6)
    assert bench.turn() == [m.Hello(1, ready=True)]


def test_a_window_stops_deliveries_until_credit() -> None:
    bench = Bench()
    bench.attach()
    bench.shard.peers[0].windows[9].room = 20
    bench.publish(3)
    assert ("deliver", [(1, 1, False, 1), (1, 2, False, 1)]) in bench.turn()
    bench.shard.receive(envelope.credit(0, 5, EPOCH, 0, [(9, 100)]), 1000)
    assert bench.turn() == [("deliver", [(1, 3, False, 1)])]


def test_a_limited_consumer_asks_uses_credit_and_gives_back() -> None:
    bench = Bench()
    bench.attach(limited=True)
    bench.publish(2)
    assert bench.turn()[-1] == m.CreditReport(1, 0, True)
    bench.allot(5, m.DRAIN)
    assert bench.turn() == [("deliver", [(1, 1, False, 2)]), m.CreditReport(1, 5, False)]


def test_a_deleted_queue_cancels_its_consumers_and_leaves_nothing() -> None:
    bench = Bench()
    bench.attach(prefetch=1)
    bench.publish(3)
    bench.turn()
    bench.tell(m.DeleteQueue(9, 1), m.CONTROLLER, 3)
    assert not bench.store.live
    assert bench.turn() == [m.Cancelled(1)]
    front_door = bench.shard.peers[0]
    assert not front_door.holders and not front_door.windows
    bench.publish()
    bench.sync()
    assert bench.turn()[0] == ("confirmed", 2, [])


def test_a_clean_stop_keeps_what_was_handed_out_as_redelivered() -> None:
    bench = Bench()
    bench.attach(prefetch=1)
    bench.publish(2)
    bench.turn()
    bench.shard.close()
    assert bench.store.closed is not None
    assert [entry & 1 for entry in bench.store.closed[1]] == [1, 0]


def test_a_join_is_answered_once_to_those_who_know_us() -> None:
    bench = Bench()
    bench.join(0, 5)
    assert bench.turn() == [m.Hello(1, True)]
    bench.tell(m.Join("peer-0"))
    assert not bench.turn()
    bench.join(0, 6)
    assert bench.turn() == [m.Hello(1, True)]


def test_a_join_before_the_queues_are_known_is_answered_to_the_controller_alone() -> None:
    shard = Shard(0, EPOCH, 1, DictHome())
    for epoch in (0, EPOCH):
        shard.receive(envelope.control(m.CONTROLLER, 3, epoch, 0, m.Join("c")), 1000)
        shard.receive(envelope.control(0, 5, epoch, 0, m.Join("d")), 1000)
        assert [(o.endpoint, read(joined(o.message))) for o in shard.turn_end(1000)] == [
            ("c", m.Hello(1, False))
        ]


def test_files_of_vhosts_without_queues_here_go() -> None:
    home = DictHome()
    for vhost in ("a", "b", "c"):
        home.store(vhost)
    shard = Shard(0, EPOCH, 1, home)
    shard.receive(envelope.control(m.CONTROLLER, 3, 0, 0, m.Join("c")), 1000)
    shard.receive(
        envelope.control(m.CONTROLLER, 3, EPOCH, 0, m.Assign([m.QueueSpec(1, "b", "q", True)])),
        1000,
    )
    assert home.found.keys() == {"b"}
    home.store("late")
    shard.receive(envelope.control(m.CONTROLLER, 3, EPOCH, 0, m.DropVhost(1, "late")), 1000)
    assert home.found.keys() == {"b"}


def test_a_vhost_dropped_and_made_again_during_a_sync_keeps_what_came_after() -> None:
    bench = Bench()
    bench.publish()
    sync = bench.shard.syncs.begin()
    assert sync is not None
    bench.tell(m.DropVhost(1, "/"), m.CONTROLLER, 3)
    bench.tell(m.CreateQueues(2, [m.QueueSpec(1, "/", "q", True)]), m.CONTROLLER, 3)
    bench.publish()
    sync.run()
    bench.shard.syncs.end()
    bench.attach()
    assert ("deliver", [(1, 1, False, 1)]) in bench.turn()


def test_counters_of_a_store_stay_when_its_vhost_is_dropped() -> None:
    bench = Bench()

    def numbers() -> tuple[float, float]:
        bench.turn(m.CONTROLLER)
        bench.tell(m.Stats(9), m.CONTROLLER, 3)
        (reply,) = (said for said in bench.turn(m.CONTROLLER) if isinstance(said, m.StatsReply))
        return reply.process["appended_messages"], reply.process.get("live_messages", 0)

    bench.publish(3)
    sync = bench.shard.syncs.begin()
    assert sync is not None
    assert numbers() == (3, 3)
    bench.tell(m.DropVhost(1, "/"), m.CONTROLLER, 3)
    assert numbers() == (3, 0), "the sync still uses the store"
    sync.run()
    bench.shard.syncs.end()
    assert numbers() == (3, 0)
    bench.tell(m.CreateQueues(2, [m.QueueSpec(1, "/", "q", True)]), m.CONTROLLER, 3)
    bench.publish()
    assert numbers() == (4, 1)


def test_a_consumer_waits_for_credit_while_its_channel_has_a_limit() -> None:
    bench = Bench()
    bench.attach(prefetch=1)
    bench.publish(5)
    assert bench.turn()[-1] == ("deliver", [(1, 1, False, 1)])
    bench.allot(0, m.STOP)  # the front door has not heard of the first message yet
    assert bench.turn() == [m.CreditReport(1, 1, False)]
    bench.allot(3, m.KEEP)
    assert bench.turn() == [], "the consumer's own prefetch is used up"
    bench.shard.receive(envelope.settles(0, 5, EPOCH, 0, [(1, m.ACK, 1, 1)]), 1000)
    assert bench.turn() == [("deliver", [(1, 2, False, 1)])]
    bench.shard.receive(envelope.settles(0, 5, EPOCH, 0, [(1, m.ACK, 2, 2)]), 1000)
    assert bench.turn() == [("deliver", [(1, 3, False, 1)])]
    bench.shard.receive(envelope.settles(0, 5, EPOCH, 0, [(1, m.ACK, 3, 3)]), 1000)
    assert bench.turn() == [m.CreditReport(1, 3, True)]
    bench.allot(m.UNLIMITED, m.KEEP)
    assert bench.turn() == [("deliver", [(1, 4, False, 1)])]
    bench.allot(4, m.STOP)
    bench.shard.receive(envelope.settles(0, 5, EPOCH, 0, [(1, m.ACK, 4, 4)]), 1000)
    assert bench.turn() == [m.CreditReport(1, 4, False), m.CreditReport(1, 4, True)]


def test_a_consumer_is_cancelled_behind_its_last_delivery() -> None:
    bench = Bench()
    bench.attach(1, limited=True)
    bench.turn()
    bench.publish(2)
    bench.allot(2, m.KEEP)
    bench.attach(2)  # finds the queue as if all had been handed out when it came
    bench.tell(m.DeleteQueue(9, 1), m.CONTROLLER, 3)
    assert bench.turn()[1:] == [
        ("deliver", [(1, 1, False, 2)]),
        m.Cancelled(1),
        m.Cancelled(2),
    ]


def test_a_full_disk_alarms_everybody_at_once() -> None:
    bench = Bench()
    bench.store.full = True
    bench.publish()
    assert m.Alarm("low on disk") in bench.turn()
    bench.shard.set_alarm("")
    assert bench.turn(m.CONTROLLER) == [m.Alarm("")]


def test_a_full_disk_at_a_sync_delays_confirms_and_loses_none() -> None:
    bench = Bench()
    bench.publish()
    bench.store.full = True
    assert bench.shard.syncs.begin() is None
    assert bench.turn()[0] == m.Alarm("low on disk")
    bench.store.full = False
    bench.sync()
    assert bench.turn() == [("confirmed", 1, [])]


def test_a_shard_that_breaks_tells_and_marks_nothing_clean() -> None:
    bench = Bench()
    bench.attach()
    bench.publish()
    bench.shard.set_alarm("shard failed")
    assert [type(read(joined(each.message))) for each in bench.shard.answers()][:1] == [m.Alarm]
    assert not bench.shard.abandon()
    assert bench.store.closes == [None]


def test_answers_hand_nothing_out() -> None:
    bench = Bench()
    bench.attach()
    bench.publish()
    bench.shard.answers()
    bench.shard.close()
    assert bench.store.closed is not None
    assert [entry & 1 for entry in bench.store.closed[1]] == [0]


def test_a_ttl_of_zero_reaches_a_ready_consumer_or_nobody() -> None:
    bench = Bench(**{"x-message-ttl": 0})
    bench.attach(prefetch=1)
    bench.publish(2)
    assert ("deliver", [(1, 1, False, 1)]) in bench.turn()
    assert bench.shard.queues[1].backlog.ready_count == 0
    assert sum(map(len, bench.store.live.values())) == 1


def test_what_was_taken_in_is_credited_in_steps() -> None:
    bench = Bench()
    taken = bench.publish(2500, sync=False)
    assert taken < PUBLISH_CREDIT_BYTES
    assert ("credit", [(0, taken)]) not in bench.turn()
    taken += bench.publish(9000, sync=False)
    assert taken > PUBLISH_CREDIT_BYTES
    assert ("credit", [(0, taken)]) in bench.turn()


def test_queues_named_in_parts_are_all_there_and_those_of_a_controller_that_died_are_not() -> None:
    home = DictHome()
    stays, store = home.store("gone"), home.store("/")
    shard = Shard(0, EPOCH, 1, home)

    def say(what: Any, incarnation: int, epoch: int = EPOCH) -> None:
        shard.receive(envelope.control(m.CONTROLLER, incarnation, epoch, 0, what), 1000)

    say(m.Join("c"), 3, 0)
    say(
        m.Assign([m.QueueSpec(1, "gone", "x", True), m.QueueSpec(2, "/", "y", True)], last=False), 3
    )
    say(m.Join("c"), 4, 0)
    say(m.Assign([m.QueueSpec(3, "/", "a", True), m.QueueSpec(4, "/", "b", False)], last=False), 4)
    assert not shard.ready
    say(m.Assign([m.QueueSpec(5, "/", "c", True, arguments={"x-message-ttl": 9})]), 4)
    assert shard.ready
    assert sorted(shard.queues.ids()) == [3, 4, 5]
    assert list(shard.stores) == ["/"]
    assert shard.queues.lasting(store).keys() == {3, 5}
    assert not shard.queues.lasting(stays)


def test_the_timers_of_queues_that_a_dead_controller_named_are_forgotten() -> None:
    home = DictHome()
    home.store("/")
    shard = Shard(0, EPOCH, 1, home)

    def say(what: Any, incarnation: int, epoch: int = EPOCH) -> None:
        shard.receive(envelope.control(m.CONTROLLER, incarnation, epoch, 0, what), 1000)

    say(m.Join("c"), 3, 0)
    say(m.Assign([m.QueueSpec(1, "/", "q", True, arguments={"x-expires": 50})], last=False), 3)
    shard.turn_end(1000)
    assert shard.next_due() == 1050
    say(m.Join("c"), 4, 0)
    shard.turn_end(1060)
    assert not shard.ready


# -- requests of one turn have the order in which they came


def is_delivery(what: Any) -> bool:
    return isinstance(what, tuple) and what[0] == "deliver"


def deliveries(said: list[Any]) -> list[tuple[int, int]]:
    """(consumer, messages) of each delivery."""
    return [(section[0], section[3]) for what in said if is_delivery(what) for section in what[1]]


def test_a_message_published_before_a_cancel_goes_to_the_consumer_that_leaves() -> None:
    bench = Bench()
    bench.attach(1, no_ack=True)
    bench.attach(2, no_ack=True)
    bench.turn()
    bench.publish(1)
    bench.tell(m.Detach(60, 1))
    bench.publish(1)
    said = bench.turn()
    assert sorted(deliveries(said)) == [(1, 1), (2, 1)]
    assert said.index(m.Done(60)) > next(i for i, what in enumerate(said) if is_delivery(what))


def test_a_get_behind_a_publish_finds_what_no_consumer_took() -> None:
    bench = Bench()
    bench.attach(1, prefetch=1)
    bench.turn()
    bench.publish(2)
    bench.tell(m.Get(61, 1, 0, 9, 1, no_ack=True))
    bench.tell(m.Get(62, 1, 0, 9, 1, no_ack=True))
    said = bench.turn()
    assert deliveries(said) == [(1, 1)]
    got = {what.request: bool(what.message) for what in said if isinstance(what, m.Got)}
    assert got == {61: True, 62: False}


def test_what_nobody_acknowledges_is_counted_apart() -> None:
    bench = Bench()
    bench.publish(9)
    bench.attach(1, prefetch=2)
    bench.turn()
    bench.tell(m.Detach(60, 1))
    bench.tell(m.Get(61, 1, 0, 9, 1, no_ack=True))
    bench.tell(m.Get(62, 1, 7, 9, 1, no_ack=False))
    bench.turn()
    bench.attach(2, no_ack=True)
    bench.turn()
    for request in (63, 64):
        bench.tell(m.Get(request, 1, 0, 9, 1, no_ack=True))
    bench.turn()
    told = stats.of_queue(bench.shard.queues[1], 0)
    assert (told.published, told.delivered, told.got) == (9, 9, 2)
    assert (told.delivered_auto, told.got_auto, told.got_empty) == (5, 1, 2)


def test_a_count_or_purge_behind_a_publish_does_not_see_what_a_consumer_takes() -> None:
    bench = Bench()
    bench.attach(1, prefetch=3)
    bench.turn()
    bench.publish(5)
    bench.tell(m.Count(63, 1))
    bench.tell(m.Purge(64, 1))
    said = bench.turn()
    done = {what.request: what.messages for what in said if isinstance(what, m.Done)}
    assert (done[63], done[64]) == (2, 2)


def test_a_consumer_that_comes_behind_a_publish_finds_it_with_the_one_before() -> None:
    bench = Bench()
    bench.attach(1)
    bench.turn()
    bench.publish(1)
    bench.attach(2, priority=5)
    bench.publish(1)
    assert sorted(deliveries(bench.turn())) == [(1, 1), (2, 1)]


def test_what_an_ack_made_room_for_is_delivered_before_the_cancel_behind_it() -> None:
    bench = Bench()
    bench.attach(prefetch=1)
    bench.publish(2)
    assert deliveries(bench.turn()) == [(1, 1)]
    bench.shard.receive(envelope.settles(0, 5, EPOCH, 0, [(1, m.ACK, 1, 1)]), 1000)
    bench.tell(m.Detach(60, 1))
    assert bench.turn() == [("deliver", [(1, 2, False, 1)]), m.Done(60)]


def test_numbers_come_in_parts_of_used_queues_alone_and_outlive_those_that_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(m, "STATS_QUEUES_MAX", 2)
    bench = Bench()
    bench.tell(
        m.CreateQueues(1, [m.QueueSpec(id, "/", str(id), True) for id in range(2, 9)]),
        m.CONTROLLER,
        3,
    )
    bench.publish(3)
    for id in (2, 3, 4, 5):
        bench.tell(m.Attach(50, id, 100 + id, 9, 1, "tag", True, False, 0, 0))

    def asked(*what: Any) -> m.StatsReply:
        bench.turn(m.CONTROLLER)
        bench.tell(m.Stats(77, *what), m.CONTROLLER, 3)
        (reply,) = (said for said in bench.turn(m.CONTROLLER) if isinstance(said, m.StatsReply))
        return reply

    parts = [asked(None, passed) for passed in (0, 2, 4)]
    assert [[queue.id for queue in part.queues] for part in parts] == [[1, 2], [3, 4], [5]]
    assert [part.rest for part in parts] == [3, 1, 0]
    assert [[consumer.queue for consumer in part.consumers] for part in parts] == [[2], [3, 4], [5]]
    named = asked([1, 8, 99])
    assert [(queue.id, queue.published) for queue in named.queues] == [(1, 3)]
    assert asked(None, 0).process["gone_published"] == 0
    bench.tell(m.DeleteQueue(9, 1), m.CONTROLLER, 3)
    assert asked([1]).process["gone_published"] == 3
    bench.tell(m.ListQueues(78), m.CONTROLLER, 3)
    assert sorted(
        next(said.ids for said in bench.turn(m.CONTROLLER) if isinstance(said, m.QueueIds))
    ) == [*range(2, 9)]


@pytest.mark.row("A6.7")
def test_a_consumer_timeout_for_all_queues_holds_for_those_that_do_not_say_one() -> None:
    bench = Bench()
    bench.shard = Shard(0, EPOCH, 1, bench.home, consumer_timeout=500)
    bench.join(m.CONTROLLER, 3)
    own = m.QueueSpec(2, "/", "own", True, arguments={"x-consumer-timeout": 90})
    bench.tell(m.Assign([m.QueueSpec(1, "/", "q", True), own]), m.CONTROLLER, 3)
    assert [bench.shard.queues[number].backlog.limits.consumer_timeout for number in (1, 2)] == [
        500,
        90,
    ]
    assert not bench.shard.queues[1].backlog.limits.timeout_closes


class ThrowingStore(DictStore):
    """Raises what it is told to, once, at the call of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.raises: dict[str, Exception] = {}

    def _maybe(self, call: str) -> None:
        error = self.raises.pop(call, None)
        if error is not None:
            raise error

    def append(self, *arguments: Any) -> Any:
        self._maybe("append")
        return super().append(*arguments)

    def begin_sync(self) -> Any:
        self._maybe("begin_sync")
        return super().begin_sync()

    def finish_sync(self, job: Any) -> None:
        super().finish_sync(job)
        self._maybe("finish_sync")


def throwing_bench() -> tuple[Bench, ThrowingStore]:
    bench = Bench()
    store = ThrowingStore()
    bench.shard.stores["/"] = store
    queue = bench.shard.queues[1]
    assert isinstance(queue, Queue)
    bench.tell(m.CreateQueues(1, [m.QueueSpec(1, "/", "q", True)]), m.CONTROLLER, 3)
    queue.store = store
    return bench, store


@pytest.mark.parametrize(
    "error", [OSError(30, "read-only"), MemoryError(), ValueError(), KeyError()], ids=repr
)
@pytest.mark.parametrize("earlier_waits", [False, True])
def test_the_last_words_do_not_confirm_a_batch_whose_append_broke_off(
    error: Exception, earlier_waits: bool
) -> None:
    bench, store = throwing_bench()
    if earlier_waits:
        bench.publish()
    store.raises["append"] = error
    with pytest.raises(type(error)):
        bench.publish()
    said = [
        read(joined(o.message)) for o in bench.shard.break_off("broken") if o.endpoint == "peer-0"
    ]
    assert said == [m.Alarm("broken")]
    if earlier_waits:
        bench.sync()
        assert bench.turn() == [("confirmed", 1, [])], "what came before it was synced"


def test_a_batch_that_is_dropped_is_refused_and_the_confirms_behind_it_go_on() -> None:
    bench, store = throwing_bench()
    bench.publish()
    store.raises["append"] = envelope.WireError("unreadable")
    with pytest.raises(envelope.WireError):
        bench.publish(3)
    bench.publish()
    bench.sync()
    assert bench.turn() == [("confirmed", 3, [(9, 1, 1, 3)])]


def test_a_sync_without_room_for_all_stores_confirms_nothing() -> None:
    bench, store = throwing_bench()
    bench.publish()
    store.raises["finish_sync"] = NoRoom()
    bench.sync()
    assert bench.turn() == [m.Alarm(m.LOW_ON_DISK)]
    store.raises["begin_sync"] = NoRoom()
    assert bench.shard.syncs.begin() is None
    assert bench.turn() == [], "the sync that it waits for has not ended well"
    bench.shard.syncs.begin()
    assert bench.turn() == [("confirmed", 1, [])]


def test_a_batch_that_never_arrived_ends_the_confirms() -> None:
    bench = Bench()
    bench.publish()
    bench.batch += 1
    with pytest.raises(BatchMissing):
        bench.publish()
    bench.sync()
    assert bench.turn() == [("confirmed", 1, [])]
