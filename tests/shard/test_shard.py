"""Nothing is confirmed before its sync; what a peer held comes back when it goes."""

from __future__ import annotations

import struct
from typing import Any

from shardd.shard import PUBLISH_CREDIT_BYTES, Shard
from shardd.wire import codec, envelope
from shardd.wire import messages as m
from tests.support.dict_store import DictStore

EPOCH = 7


class Bench:
    """A shard that is ready, with a controller and a front door."""

    def __init__(self, **arguments: Any) -> None:
        self.store = DictStore()
        self.shard = Shard(0, EPOCH, 1, lambda vhost: self.store)
        self.batch = 0
        self.join(m.CONTROLLER, 3)
        self.tell(m.Assign([m.QueueSpec(1, "/", "q", True, arguments=arguments)]), m.CONTROLLER, 3)
        self.join(0, 5)
        self.turn()

    def join(self, peer: int, incarnation: int) -> None:
        self.shard.receive(envelope.control(peer, incarnation, 0, 0, m.Join(f"peer-{peer}")), 1000)

    def tell(self, what: Any, peer: int = 0, incarnation: int = 5) -> None:
        self.shard.receive(envelope.control(peer, incarnation, EPOCH, 0, what), 1000)

    def publish(self, count: int = 1, sync: bool = True) -> int:
        self.batch += 1
        packer = codec.Packer(1)
        message = struct.pack("<II", 4, 0) + b"\0\1qbody"
        for i in range(count):
            packer.add_stored(0, [1], message, 9, 1, i + 1, 1000, 0xFFFFFFFF, 0xFF, True, sync)
        data = packer.take(0, 0, 5, EPOCH, self.batch)
        assert data is not None
        self.shard.receive(data, 1000)
        return len(data)

    def attach(self, consumer: int = 1, **more: Any) -> None:
        fields = {"no_ack": False, "exclusive": False, "priority": 0, "prefetch": 0} | more
        self.tell(m.Attach(50, 1, consumer, 9, 1, "tag", **fields))

    def sync(self) -> None:
        sync = self.shard.begin_sync()
        assert sync is not None
        sync.run()
        self.shard.sync_ended()

    def turn(self, peer: int = 0) -> list[Any]:
        return [read(o.message) for o in self.shard.turn_end(1000) if o.endpoint == f"peer-{peer}"]


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
    first = bench.shard.begin_sync()
    assert first is not None
    assert not bench.turn()
    bench.publish()
    bench.publish(sync=False)
    first.run()
    bench.shard.sync_ended()
    assert bench.turn() == [("confirmed", 1, [])]
    assert not bench.turn()
    bench.sync()
    assert bench.turn() == [("confirmed", 3, [])]


def test_publishes_are_credited_in_steps_and_every_byte_once() -> None:
    bench = Bench()
    taken = 0
    for _ in range(3):
        while taken < PUBLISH_CREDIT_BYTES:
            assert not bench.turn()
            taken += bench.publish(500)
        assert bench.turn() == [("credit", [(0, taken)])]
        taken = 0


def test_what_a_front_door_held_is_requeued_when_it_goes() -> None:
    bench = Bench()
    bench.attach()
    bench.publish(3)
    assert bench.turn()[-1] == ("deliver", [(1, 1, False, 3)])
    bench.shard.receive(envelope.settles(0, 5, EPOCH, 0, [(1, m.ACK, 2, 2)]), 1000)
    bench.tell(m.Gone(0, 5), m.CONTROLLER, 3)
    assert bench.shard.queues[1].ready_count == 2
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


def test_a_window_stops_deliveries_until_credit() -> None:
    bench = Bench()
    bench.attach()
    bench.shard.peers[0].windows[9].room = 20
    bench.publish(3)
    assert ("deliver", [(1, 1, False, 1), (1, 2, False, 1)]) in bench.turn()
    bench.shard.receive(envelope.credit(0, 5, EPOCH, 0, [(9, 100)]), 1000)
    assert bench.turn() == [("deliver", [(1, 3, False, 1)])]


def test_a_limited_consumer_is_asked_granted_and_gives_back() -> None:
    bench = Bench()
    bench.attach(granted=True)
    bench.publish(2)
    assert bench.turn()[-1] == m.Ungranted(1, 0, True)
    bench.tell(m.Grant(1, 5))
    assert bench.turn() == [("deliver", [(1, 1, False, 2)]), m.Ungranted(1, 3, False)]


def test_a_deleted_queue_cancels_its_consumers_and_leaves_nothing() -> None:
    bench = Bench()
    bench.attach(prefetch=1)
    bench.publish(3)
    bench.turn()
    bench.tell(m.DeleteQueue(9, 1), m.CONTROLLER, 3)
    assert not bench.store.live
    assert bench.turn() == [m.Cancelled(1)]
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
