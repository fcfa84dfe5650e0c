"""Lane: two ways between two processes, one order; and no lane where none can be made."""

from __future__ import annotations

import mmap
import random
import socket
from collections import deque
from pathlib import Path

import pytest

from shardmq.shardd.wire import envelope, lane
from shardmq.shardd.wire import messages as wire

SMALL = 256


class End:
    """As shards and front doors use it: what comes far is behind what came near."""

    def __init__(self, bell: socket.socket, memory: mmap.mmap, *, at_shard: bool) -> None:
        bell.setblocking(False)
        self.sent_far: deque[bytes] = deque()
        self.lane = lane.Lane(bell, memory, (1, 2, 3, 4), self.sent_far.append, at_shard=at_shard, ring_bytes=SMALL)
        self.got: list[bytes] = []

    def take(self, most: int) -> None:
        self.got += self.lane.take(most)

    def hear_far(self, other: End) -> None:
        message = other.sent_far.popleft()
        kind = envelope.read(message).kind
        self.got += self.lane.came_far(kind)
        if kind != wire.LANE:
            self.got.append(message)


def ends() -> tuple[End, End]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = mmap.mmap(-1, mmap.PAGESIZE + 2 * SMALL)
    return End(one, memory, at_shard=False), End(other, memory, at_shard=True)


def _message(number: int, size: int) -> bytes:
    return envelope.header(wire.PUBLISH, 1, 2, 3, 4) + number.to_bytes(4, "little") + b"b" * size


@pytest.mark.parametrize("seed", range(60))
def test_order_holds_whichever_way_each_message_takes(seed: int) -> None:
    numbers = random.Random(seed)
    door, shard = ends()
    sent: dict[End, list[bytes]] = {door: [], shard: []}
    for number in range(600):
        sender, receiver = (door, shard) if numbers.random() < 0.5 else (shard, door)
        match numbers.choice(["send", "send", "take", "far", "hear"]):
            case "send":
                size = numbers.choice([0, 10, 50, 100, 1000])
                sent[sender].append(_message(number, size))
                sender.lane.send(sent[sender][-1])
            case "take":
                receiver.take(numbers.randrange(1, 4))
            case "far":
                if sender.sent_far:
                    receiver.hear_far(sender)
            case "hear":
                assert receiver.lane.hear()
    for sender, receiver in ((door, shard), (shard, door)):
        receiver.take(lane.ALL)
        while sender.sent_far:
            receiver.hear_far(sender)
            receiver.take(lane.ALL)
        assert receiver.got == sent[sender]
    near = [end for end in (door, shard) if len(end.sent_far) < len(sent[end])]
    assert near == [door, shard]


def test_a_door_waits_for_the_shard_before_it_uses_the_ring() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = mmap.mmap(-1, mmap.PAGESIZE + 2 * SMALL)
    door = End(one, memory, at_shard=False)
    door.lane.send(_message(1, 1))
    assert list(door.sent_far) == [_message(1, 1)]
    End(other, memory, at_shard=True)
    assert door.lane.hear()
    door.lane.send(_message(2, 1))
    assert len(door.sent_far) == 2
    assert envelope.read(door.sent_far[1]).kind == wire.LANE


def test_what_waits_in_a_ring_and_how_often_it_was_full_is_told() -> None:
    door, shard = ends()
    assert door.lane.hear()
    door.lane.send(b"")  # empty, behind the word that the ring goes on
    shard.hear_far(door)
    assert (door.lane.waiting_bytes(), shard.lane.waiting_bytes(), door.lane.turned) == (8, 0, 0)
    door.lane.send(bytes(100))
    assert door.lane.waiting_bytes() == 8 + 8 + 104
    door.lane.send(bytes(SMALL))
    assert door.lane.turned == 1
    shard.take(lane.ALL)
    assert door.lane.waiting_bytes() == 0


def test_the_end_of_one_process_shows_and_what_it_said_is_still_there() -> None:
    door, shard = ends()
    assert door.lane.hear()
    shard.lane.send(_message(1, 1))
    shard.lane.close()
    door.hear_far(shard)
    while door.lane.hear():
        pass
    door.take(lane.ALL)
    assert door.got == [_message(1, 1)]


def test_an_offer_arrives_with_its_memory(tmp_path: Path) -> None:
    listener = lane.listen(tmp_path, 3)
    assert lane.accept(listener) is None
    what = lane.Offer(peer=1, incarnation=2, epoch=3, endpoint="ipc://x")
    far: list[bytes] = []
    door = lane.offer(tmp_path, 3, what, far.append)
    accepted = lane.accept(listener)
    assert accepted is not None
    offered, bell, memory = accepted
    assert offered == what
    shard = lane.Lane(bell, memory, (1, 2, 3, 3), far.append, at_shard=True)
    assert door.hear()
    door.send(_message(1, 100))
    assert envelope.read(far.pop()).kind == wire.LANE
    assert shard.came_far(wire.LANE) == []
    assert shard.take(lane.ALL) == [_message(1, 100)]
    door.close()
    assert not shard.hear()
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
