"""A local lane: messages of one process stay in order, whole and its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.wire.local_lane import LocalLane


def test_what_a_sender_lends_may_change_before_it_is_taken() -> None:
    door, shard = LocalLane.pair()
    lent = bytearray(b"body")
    door.send([b"head ", memoryview(lent)])
    lent[:] = b"else"
    assert shard.take(8) == [b"head body"] and shard.take(8) == []


def test_an_end_is_woken_once_and_only_while_it_sleeps() -> None:
    woken: list[str] = []
    door, shard = LocalLane.pair()
    door.wake = lambda: woken.append("door")
    shard.wake = lambda: woken.append("shard")
    door.send(b"1")
    door.send(b"2")
    assert woken == ["shard"]
    assert not shard.sleep()  # it has something to take
    shard.take(8)
    assert shard.sleep()
    door.put(b"3")
    assert woken == ["shard"]
    door.ring()
    shard.send(b"4")
    assert woken == ["shard", "shard", "door"]
    assert shard.waiting_bytes() == door.waiting_bytes() == 1


@given(st.lists(st.one_of(st.binary(max_size=9), st.integers(0, 4)), max_size=60))
def test_messages_stay_in_order_however_many_are_taken_at_once(steps: list[bytes | int]) -> None:
    door, shard = LocalLane.pair()
    sent: list[bytes] = []
    taken: list[bytes | memoryview] = []
    for step in steps:
        if isinstance(step, bytes):
            door.put(step)
            sent.append(step)
        else:
            found = shard.take(step)
            assert len(found) == min(step, len(sent) - len(taken))
            taken += found
            shard.let_go()
    assert taken + shard.came_by_zmq(0) == sent
