"""Passes of the front door: what is read together leaves together, once, and in its order."""

from __future__ import annotations

from typing import Any

import pytest

from shardmq.broker.amqp import ChannelException
from shardmq.broker.front_door.hot_state import (
    BATCH_BYTES_MIN,
    SHARED_BATCH_BYTES_MIN,
    ConfirmsState,
    Pace,
    SocketState,
)
from shardmq.broker.front_door.loop import PassLoop
from tests.connections.connection_play import Aio, Publishing, Shards


class Client(SocketState):
    """A client that writes down what is done to it."""

    name = "client"

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.error: Exception | None = None
        self.socket = self

    def flush(self) -> None:
        self.log.append("flush")
        if self.error is not None:
            raise self.error

    def give_up(self) -> None:
        self.log.append("give up")

    def write(self, data: bytes) -> None:
        self.log.append(("write", data))

    def fail(self, error: ChannelException, number: int) -> None:
        self.log.append(("fail", number))

    def pause(self, reason: int) -> None:
        self.log.append(("pause", reason))

    def resume(self, reasons: int) -> None:
        self.log.append(("resume", reasons))


class Due(ConfirmsState):
    """A channel with an ack for its publisher."""

    def answers(self) -> bytes:
        return b"ack"


class Made:
    def __init__(self, tick_us: int = 0) -> None:
        self.aio, self.shards, self.publishing = Aio(), Shards(3), Publishing()
        self.loop = PassLoop(self.aio, self.shards, self.publishing, shards=3, tick_us=tick_us)  # type: ignore[arg-type]

    def confirm(self, client: Client, failure: ChannelException | None = None) -> None:
        """Let a channel have an ack for its publisher, and a failure."""
        confirms = Due()
        confirms.client, confirms.channel, confirms.failure = client, 7, failure
        self.publishing.confirms_due.append(confirms)  # type: ignore[arg-type]


def test_what_a_pass_made_leaves_at_its_end_and_once() -> None:
    made, client = Made(), Client()
    made.loop.begin_pass()
    made.loop.begin_pass()  # the read of another client
    made.loop.dirty.append(client)
    made.confirm(client)
    made.loop.schedule_end_of_pass()
    assert client.log == [] and made.shards.flushed == []
    made.aio.run()
    assert client.log == [("write", b"ack"), "flush"] and made.shards.flushed == [()]
    assert made.publishing.confirms_due == [] and made.loop.dirty == []


def test_confirms_are_written_before_their_clients_are_flushed() -> None:
    made, client = Made(), Client()
    made.confirm(client)
    made.loop.dirty.append(client)
    made.loop.end_of_pass()
    assert client.log == [("write", b"ack"), "flush"]


def test_a_channel_that_lost_a_publish_in_sequence_ends_once() -> None:
    made, client = Made(), Client()
    made.confirm(client, ChannelException(406, "lost", 60, 40))
    (confirms,) = made.publishing.confirms_due
    for _ in range(2):
        made.publishing.confirms_due[:] = [confirms]
        made.loop.end_of_pass()
    assert client.log == [("write", b"ack"), ("fail", 7), ("write", b"ack")]


def test_a_client_that_cannot_be_written_to_ends_and_the_others_are_written_to() -> None:
    made, broken, sound = Made(), Client(), Client()
    broken.error = RuntimeError("a mistake of ours")
    made.loop.dirty += [broken, sound]
    made.loop.end_of_pass()
    assert broken.log == ["flush", "give up"] and sound.log == ["flush"]


def test_a_scheduled_end_does_nothing_when_the_pass_has_ended_before() -> None:
    made = Made()
    made.loop.schedule_end_of_pass()
    made.loop.receiving()  # messages of shards come first
    made.loop.received()
    made.aio.run()
    assert made.shards.flushed == [()]


def test_the_time_of_a_pass_is_when_it_began() -> None:
    made = Made()
    made.aio.now = 7.0
    made.loop.begin_pass()
    made.aio.now = 8.0
    made.loop.begin_pass()
    assert made.loop.now == 7.0


def hasty() -> Made:
    """Return a loop with a tick, whose thread works for 100 us in each pass."""
    made = Made()
    busy = iter([0.0, 0.0001])
    made.loop.pace = Pace(0.001, lambda: 1.0, lambda: next(busy))
    for client in (1, 2):
        made.loop.pace.read_by(client)
    return made


def test_small_reads_that_come_fast_make_passes_keep_a_distance() -> None:
    made = hasty()
    made.loop.begin_pass()  # a pass alone, which does not ask how busy the thread is
    made.aio.run()
    made.loop.begin_pass()
    made.loop.pace.came(1)
    made.aio.run()
    made.loop.begin_pass()
    assert made.shards.heard_for == [pytest.approx(0.0003)]


@pytest.mark.parametrize("why", ["large read", "work is left"])
def test_a_pass_comes_at_once_behind_much_work(why: str) -> None:
    made = hasty()
    made.loop.begin_pass()  # a pass alone, which does not ask how busy the thread is
    made.aio.run()
    made.loop.begin_pass()
    made.loop.read_was_large(full=False) if why == "large read" else made.loop.pace.worth_a_pass()
    made.aio.run()
    made.loop.begin_pass()
    assert made.shards.heard_for == []


def test_a_small_batch_waits_while_reads_are_full_and_leaves_when_no_pass_follows() -> None:
    made = Made()
    made.shards.left_behind = True
    made.loop.begin_pass()
    made.loop.read_was_large(full=True)
    made.aio.turn()
    assert made.shards.flushed == [(BATCH_BYTES_MIN, SHARED_BATCH_BYTES_MIN)]
    made.aio.turn()
    assert len(made.shards.flushed) == 1  # every socket is looked at first
    made.aio.turn()
    assert made.shards.flushed[1:] == [()]


def test_a_small_batch_that_waits_leaves_with_the_pass_that_follows() -> None:
    made = Made()
    made.shards.left_behind = True
    made.loop.begin_pass()
    made.loop.read_was_large(full=True)
    made.aio.turn()
    made.loop.begin_pass()
    made.loop.reads.short += 1  # its client may wait for an answer
    made.aio.run()
    assert made.shards.flushed == [(BATCH_BYTES_MIN, SHARED_BATCH_BYTES_MIN), ()]


def test_publishers_wait_for_the_shard_that_has_no_room_and_for_no_other() -> None:
    made, both, other = Made(), Client(), Client()
    made.loop.fed(both, 0b011)
    made.loop.fed(both, 0b010)
    made.loop.fed(other, 0b100)
    made.shards.crowd = [1]
    made.loop.end_of_pass()
    assert both.log == [("pause", 0b010)] and other.log == []
    numbers = made.loop.numbers()
    assert [numbers[f"publishers_waiting.{shard}"] for shard in range(3)] == [0, 1, 0]
    made.loop.publish_room(0)
    assert both.log == [("pause", 0b010)]
    made.loop.publish_room(1)
    assert both.log == [("pause", 0b010), ("resume", 0b010)]
    numbers = made.loop.numbers()
    assert numbers["publishers_waiting.1"] == 0 and numbers["publishers_held_back.1"] == 1


def test_who_fed_a_shard_in_an_earlier_pass_is_not_held_for_this_one() -> None:
    made, client = Made(), Client()
    made.loop.fed(client, 0b010)
    made.loop.end_of_pass()
    made.shards.crowd = [1]
    made.loop.fed(Client(), 0b010)
    made.loop.end_of_pass()
    assert client.log == []


def test_a_client_that_is_gone_is_neither_held_nor_read_again() -> None:
    made, held, feeding = Made(), Client(), Client()
    made.loop.fed(held, 1)
    made.shards.crowd = [0]
    made.loop.end_of_pass()
    made.loop.fed(feeding, 1)
    made.loop.forget(held)
    made.loop.forget(feeding)
    made.aio.run()
    made.loop.publish_room(0)
    assert held.log == [("pause", 1)] and feeding.log == []


def test_deliveries_that_lie_in_a_ring_are_copied_once() -> None:
    made = Made()
    owned: list[int] = []

    class Output:
        def own(self) -> None:
            owned.append(1)

    made.loop.borrowers += [Output(), Output()]
    made.loop.own_deliveries()
    made.loop.own_deliveries()
    assert owned == [1, 1]
