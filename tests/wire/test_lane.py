"""A lane has two ways between two processes and one order, also when one of them dies.

There is no lane where none can be made.
"""

from __future__ import annotations

import mmap
import random
import socket
from collections import deque
from pathlib import Path
from typing import NamedTuple

import pytest

from shardmq.shardd.wire import envelope, lane
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.shared_memory import wait_for_any
from tests.support.lanes import no_descriptor_left, shared_by_two

SMALL = 256
SEEDS = range(60)


class End:
    """The lane as shards and front doors use it.

    A message through the ring is behind those that came by ZeroMQ before it.
    """

    kind: type[lane.Lane] = lane.Lane

    def __init__(self, shared: lane.Shared, *, at_shard: bool) -> None:
        self.by_zmq: deque[bytes] = deque()  # sent, not arrived
        self.lane = self.kind(
            shared, (1, 2, 3, 4), self.by_zmq.append, at_shard=at_shard, ring_bytes=SMALL
        )
        self.got: list[bytes] = []
        self.alone = False  # the other process is gone, and this one knows it
        self.is_closed = False

    def take(self, most: int) -> None:
        self.got += self.lane.take(most)

    def hear_zmq(self, other: End) -> None:
        message = other.by_zmq.popleft()
        kind = envelope.read(message).kind
        self.got += self.lane.came_by_zmq(kind)
        if kind != wire.RING:
            self.got.append(message)

    def hear(self) -> None:
        if self.alone:
            return
        self.lane.hear()
        if self.lane.is_over():
            self.take(lane.ALL)
            self.close()
            self.alone = True

    def close(self) -> None:
        if not self.is_closed:
            self.lane.close()
        self.is_closed = True


def ends(kind: type[End] = End) -> tuple[End, End]:
    one, other = shared_by_two(mmap.mmap(-1, mmap.PAGESIZE + 2 * SMALL))
    return kind(one, at_shard=False), kind(other, at_shard=True)


def _message(number: int, size: int) -> bytes:
    return envelope.header(wire.PUBLISH, 1, 2, 3, 4) + number.to_bytes(4, "little") + b"b" * size


class History(NamedTuple):
    sent: list[bytes]
    got: list[bytes]
    by_zmq: int  # messages that did not go through the ring


def histories(
    seed: int, dies: str = "", *, loses: bool = False, kind: type[End] = End
) -> list[History]:
    """Return what went to the shard and to the door in a random history.

    The process `dies` dies at some time. With `loses`, the end of what it sent by ZeroMQ is lost
    with it.
    """
    door, shard = ends(kind)
    try:
        return played(random.Random(seed), door, shard, dies, loses=loses)
    finally:
        door.close()
        shard.close()


def played(
    numbers: random.Random, door: End, shard: End, dies: str, *, loses: bool
) -> list[History]:
    sent: dict[End, list[bytes]] = {door: [], shard: []}
    went_by_zmq = dict.fromkeys(sent, 0)
    dead = {"door": door, "shard": shard}.get(dies)
    dies_at = numbers.randrange(600)
    for number in range(600):
        if number == dies_at and dead is not None:
            dead.close()
            for _ in range(numbers.randrange(len(dead.by_zmq) + 1) if loses else 0):
                dead.by_zmq.pop()
        gone = dead if number >= dies_at else None
        sender, receiver = (door, shard) if numbers.random() < 0.5 else (shard, door)
        match numbers.choice(["send", "send", "take", "zmq", "hear"]):
            case "send" if sender is not gone and not sender.alone:
                size = numbers.choice([0, 10, 50, 100, 1000])
                sent[sender].append(_message(number, size))
                before = len(sender.by_zmq)
                sender.lane.send(sent[sender][-1])
                went_by_zmq[sender] += (
                    len(sender.by_zmq) > before and sender.by_zmq[-1] == sent[sender][-1]
                )
            case "take" if receiver is not gone and not receiver.alone:
                receiver.take(numbers.randrange(1, 4))
            case "zmq" if receiver is not gone and sender.by_zmq:
                receiver.hear_zmq(sender)
            case "hear" if receiver is not gone:
                receiver.hear()
    for sender, receiver in ((door, shard), (shard, door)):
        if receiver is dead:
            continue
        receiver.take(lane.ALL)
        while sender.by_zmq:
            receiver.hear_zmq(sender)
            receiver.take(lane.ALL)
    return [
        History(sent[one], other.got, went_by_zmq[one])
        for one, other in ((door, shard), (shard, door))
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_order_holds_whichever_way_each_message_takes(seed: int) -> None:
    for history in histories(seed):
        assert history.got == history.sent
        assert len(history.sent) > history.by_zmq > 0


@pytest.mark.parametrize("dies", ["door", "shard"])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_process_had_sent_when_it_died_arrives_in_order(seed: int, dies: str) -> None:
    from_door, from_shard = histories(seed, dies)
    last_words, to_the_dead = (from_door, from_shard) if dies == "door" else (from_shard, from_door)
    assert last_words.got == last_words.sent
    assert to_the_dead.got == to_the_dead.sent[: len(to_the_dead.got)]


@pytest.mark.parametrize("dies", ["door", "shard"])
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_arrives_behind_what_was_lost_with_a_process_that_died(
    seed: int, dies: str
) -> None:
    for history in histories(seed, dies, loses=True):
        assert history.got == history.sent[: len(history.got)]


class ForgetsMarker(lane.Lane):
    """Sends by ZeroMQ what the ring has no room for, and the next message through the ring."""

    def put(self, message: envelope.Parts) -> None:
        if not self.writes_ring:
            super().put(message)
        elif not self.writer.put(lane.joined(message)):
            self._send_by_zmq(lane.joined(message))


class ComesBackEarly(lane.Lane):
    """Goes on with the ring while the reader has not taken all of it."""

    def put(self, message: envelope.Parts) -> None:
        if not self.writes_ring and self._is_accepted:
            self._send_by_zmq(self._goes_on)
            self.writes_ring = True
        super().put(message)


class TakesZmqFirst(lane.Lane):
    """Takes what comes by ZeroMQ before what the ring has."""

    def came_by_zmq(self, kind: int) -> list[envelope.Message]:
        return super().came_by_zmq(kind) if kind == wire.RING else []


class ForgetsLane(End):
    """Knows no lane any more when the other process is gone."""

    def hear_zmq(self, other: End) -> None:
        if not self.alone:
            super().hear_zmq(other)
        elif envelope.read(message := other.by_zmq.popleft()).kind != wire.RING:
            self.got.append(message)


def _end_of(broken: type[lane.Lane]) -> type[End]:
    return type(broken.__name__, (End,), {"kind": broken})


@pytest.mark.parametrize(
    ("broken", "dies"),
    [
        (_end_of(ForgetsMarker), ""),
        (_end_of(ComesBackEarly), ""),
        (_end_of(TakesZmqFirst), ""),
        (ForgetsLane, "door"),
    ],
)
def test_a_broken_lane_is_caught(broken: type[End], dies: str) -> None:
    caught = 0
    for seed in SEEDS:
        try:
            caught += any(
                each.got != each.sent[: len(each.got)]
                for each in histories(seed, dies, kind=broken)
            )
        except ValueError:  # the ring is damaged
            caught += 1
    print(f"caught with {caught} of {len(SEEDS)} seeds")
    assert caught


def test_a_door_waits_for_the_shard_before_it_uses_the_ring() -> None:
    one, other = shared_by_two(mmap.mmap(-1, mmap.PAGESIZE + 2 * SMALL))
    door = End(one, at_shard=False)
    door.lane.send(_message(1, 1))
    assert list(door.by_zmq) == [_message(1, 1)]
    End(other, at_shard=True)
    door.lane.hear()
    door.lane.send(_message(2, 1))
    assert len(door.by_zmq) == 2
    assert envelope.read(door.by_zmq[1]).kind == wire.RING


def test_what_waits_in_a_ring_and_how_often_it_was_full_is_told() -> None:
    door, shard = ends()
    door.lane.hear()
    door.lane.send(b"")  # empty, behind the word that the ring goes on
    assert (door.lane.waiting_bytes(), shard.lane.waiting_bytes(), door.lane.times_full) == (
        8,
        0,
        0,
    )
    door.lane.send(bytes(100))
    assert door.lane.waiting_bytes() == 8 + 8 + 104
    door.lane.send(bytes(SMALL))
    assert door.lane.times_full == 1
    shard.hear_zmq(door)
    assert door.lane.waiting_bytes() == 0


def test_the_end_of_one_process_shows_and_what_it_said_is_still_there() -> None:
    door, shard = ends()
    door.lane.hear()
    assert not door.lane.is_over()
    shard.lane.send(_message(1, 1))
    shard.lane.close()
    door.hear_zmq(shard)
    assert door.lane.is_over()
    door.take(lane.ALL)
    assert door.got == [_message(1, 1)]


def test_an_offer_arrives_with_its_memory(tmp_path: Path) -> None:
    listener = lane.listen(tmp_path, 3)
    assert lane.accept(listener) is None
    what = lane.Offer(peer=1, incarnation=2, epoch=3, endpoint="ipc://x")
    by_zmq: list[bytes] = []
    door = lane.offer(tmp_path, 3, what, by_zmq.append)
    accepted = lane.accept(listener)
    assert accepted is not None
    offered, shared = accepted
    assert offered == what
    shard = lane.Lane(shared, (1, 2, 3, 3), by_zmq.append, at_shard=True)
    assert wait_for_any([door.bell], 0) == [door.bell]
    door.hear()
    door.send(_message(1, 100))
    assert envelope.read(by_zmq.pop()).kind == wire.RING
    assert shard.came_by_zmq(wire.RING) == [_message(1, 100)]
    assert wait_for_any([shard.bell], 0) == [] and not shard.is_over()
    assert shard.sleep()
    door.put(_message(2, 1))
    door.put(_message(3, 1))
    assert wait_for_any([shard.bell], 0) == []
    door.ring()
    assert wait_for_any([shard.bell], 0) == [shard.bell]
    assert shard.take(lane.ALL) == [_message(2, 1), _message(3, 1)]
    door.close()
    assert shard.is_over()
    shard.close()
    listener.close()


def test_nobody_listens_no_lane(tmp_path: Path) -> None:
    with pytest.raises(lane.NoLane):
        lane.offer(tmp_path, 0, lane.Offer(1, 2, 3, "ipc://x"), print)


def test_an_offer_without_memory_is_refused(tmp_path: Path) -> None:
    listener = lane.listen(tmp_path, 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(lane.path_of(tmp_path, 0))
        client.send(b"what")
        with pytest.raises(lane.NoLane):
            lane.accept(listener)
    listener.close()


def test_an_offer_that_finds_no_descriptor_waits_until_there_is_one(tmp_path: Path) -> None:
    listener = lane.listen(tmp_path, 3)
    what = lane.Offer(peer=1, incarnation=2, epoch=3, endpoint="ipc://x")
    door = lane.offer(tmp_path, 3, what, print)
    with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
        lane.accept(listener)
    accepted = lane.accept(listener)
    assert accepted is not None and accepted[0] == what
    accepted[1].close()
    door.close()
    listener.close()
