"""The socket of a client: when it is read, what is written when, how it falls silent and ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pamqp import commands

from shardmq.broker.amqp import Connection
from shardmq.broker.front_door.connection.output import OUT_BYTES_MAX
from shardmq.broker.front_door.connection.socket import (
    CLOSE_TIMEOUT_S,
    FULL_READ_BYTES,
    PAUSE_ALARM,
    PAUSE_OUTPUT,
    PAUSE_SLICE,
    PAUSE_WORK,
    ClientSocket,
)
from shardmq.broker.front_door.loop import READ_BYTES, PassLoop
from tests.amqp.bytes_of import HEADER, publish
from tests.connections.connection_play import FD, Aio, Publishing, Shards, Sock


class Made:
    """A socket with an AMQP library behind it, and a connection that counts its calls."""

    def __init__(self) -> None:
        self.aio, self.shards, self.sock = Aio(), Shards(), Sock()
        self.loop = PassLoop(self.aio, self.shards, Publishing(), shards=2, tick_us=0)  # type: ignore[arg-type]
        self.data = self.ends = 0
        self.socket = ClientSocket(
            self.loop,
            self.shards,  # type: ignore[arg-type]
            self.sock,  # type: ignore[arg-type]
            9,
            "client",
            Connection(server_properties={}),
            on_data=self.on_data,
            on_end=self.on_end,
        )

    def on_data(self) -> None:
        self.data += 1

    def on_end(self) -> None:
        self.ends += 1
        self.socket.close(shut=False)

    @property
    def is_read(self) -> bool:
        return FD in self.aio.readers

    def readable(self, *data: bytes | OSError) -> None:
        self.sock.unread += data
        self.aio.readers[FD]()


# -- in --------------------------------------------------------------------------------------------


def test_what_is_read_is_given_to_the_library_and_handled() -> None:
    made = Made()
    made.aio.now = 3.0
    made.readable(HEADER)
    assert (made.data, made.ends, made.socket.received_bytes) == (1, 0, len(HEADER))
    assert made.socket.last_received == 3.0 and made.loop.reads.short == 1


@pytest.mark.parametrize("last", [b"", ConnectionResetError()])
def test_the_end_of_what_is_read_ends_the_connection(last: bytes | OSError) -> None:
    made = Made()
    made.readable(last)
    assert (made.data, made.ends, made.sock.is_closed) == (0, 1, True)
    assert not made.is_read


def test_a_socket_that_has_nothing_after_all_is_read_later() -> None:
    made = Made()
    made.readable()
    assert (made.data, made.ends) == (0, 0) and made.is_read


def test_a_socket_that_was_held_back_since_is_not_read() -> None:
    made = Made()
    readable = made.aio.readers[FD]
    made.socket.pause(PAUSE_ALARM)
    made.sock.unread.append(HEADER)
    readable()
    assert made.data == 0 and list(made.sock.unread) == [HEADER]


def test_a_large_read_is_a_pass_of_its_own_and_a_full_one_says_that_there_is_more() -> None:
    made = Made()
    made.readable(b"x" * FULL_READ_BYTES)
    assert (made.loop.reads.full, made.loop.reads.short) == (0, 1)
    made.readable(b"x" * READ_BYTES)
    assert (made.loop.reads.full, made.loop.reads.short) == (1, 1)


def test_what_a_full_read_left_of_a_message_comes_before_the_next_read() -> None:
    made = Made()
    frames = b"".join(publish(1, "", "a", b"x" * 1000))
    whole = HEADER + frames * (READ_BYTES // len(frames) + 1)
    given: list[tuple[int, int]] = []
    receive_data = made.socket.amqp.receive_data

    def receive(data: memoryview, again: int = 0) -> None:
        given.append((len(data), again))
        receive_data(data, again)

    made.socket.amqp = type(
        "Amqp", (), {"part": None, "unread": b"y" * 100, "receive_data": staticmethod(receive)}
    )()  # type: ignore[assignment]
    made.readable(whole)
    made.aio.readers[FD]()
    assert given[0] == (READ_BYTES, 0)
    assert given[1] == (100 + len(whole) - READ_BYTES, 100)


def test_a_client_is_read_again_when_no_reason_is_left() -> None:
    made = Made()
    made.socket.pause(PAUSE_ALARM)
    made.socket.pause(PAUSE_WORK)
    made.socket.pause(1 << 3)  # a shard
    assert not made.is_read
    made.socket.resume(PAUSE_ALARM | 1 << 3)
    assert not made.is_read
    made.aio.now = 50.0
    made.socket.resume(PAUSE_WORK)
    assert made.is_read and made.socket.last_received == 50.0


def test_a_client_that_is_gone_is_not_read_again() -> None:
    made = Made()
    made.socket.pause(PAUSE_ALARM)
    made.socket.close(shut=False)
    made.socket.resume(PAUSE_ALARM)
    made.socket.pause(PAUSE_ALARM)
    assert not made.is_read


def test_what_is_left_of_a_slice_comes_behind_the_others_and_once() -> None:
    made = Made()
    made.socket.end_slice()
    made.socket.end_slice()
    made.socket.resume(0)
    assert made.data == 0 and not made.is_read
    made.aio.turn()
    assert made.data == 1


def test_a_slice_waits_for_what_else_holds_the_client_back() -> None:
    made = Made()
    made.socket.end_slice()
    made.socket.pause(PAUSE_ALARM)
    made.aio.run()
    assert made.data == 0
    made.socket.resume(PAUSE_ALARM)
    made.aio.run()
    assert made.data == 1
    made.socket.resume(PAUSE_SLICE)
    assert made.is_read


async def test_a_task_goes_on_when_the_shards_have_room() -> None:
    made = Made()
    made.socket.pause(0b01)
    task = asyncio.ensure_future(made.socket.next_slice())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    made.socket.resume(0b01)
    await task
    # what it published leaves at the end of a pass
    assert made.shards.flushed == [] and made.aio.soon


async def test_a_task_goes_on_when_the_client_is_gone_before_the_shards_have_room() -> None:
    made = Made()
    made.socket.pause(0b01)
    task = asyncio.ensure_future(made.socket.next_slice())
    for _ in range(5):
        await asyncio.sleep(0)
    made.socket.close(shut=False)
    await asyncio.wait_for(task, 1)


# -- out -------------------------------------------------------------------------------------------


def test_what_is_written_in_a_pass_leaves_at_its_end_together() -> None:
    made = Made()
    made.socket.write(b"one")
    made.socket.write(b"")
    made.socket.write(b"two")
    assert made.sock.taken == b"" and made.loop.dirty == [made.socket]
    made.aio.run()
    assert made.sock.taken == b"onetwo"


@pytest.mark.parametrize("state", ["closing", "lost"])
def test_nothing_is_written_to_who_is_leaving(state: str) -> None:
    made = Made()
    setattr(made.socket, state, True)
    made.socket.write(b"frames")
    made.socket.write_delivery(b"delivery", 1, 8)
    made.aio.run()
    assert made.sock.taken == b""
    assert made.shards.credits == [(1, 1, 9, 8)]  # or the shard would wait for it


def test_what_was_said_before_the_close_is_written_all_the_same() -> None:
    made = Made()
    made.socket.closing = True
    made.socket.send(0, commands.Connection.CloseOk())
    made.aio.run()
    assert made.sock.taken


def test_credit_goes_back_when_the_kernel_has_the_delivery() -> None:
    made = Made()
    made.sock.room = 4
    made.socket.write_delivery(b"12345678", 1, 100)
    made.aio.run()
    assert made.shards.credits == [] and FD in made.aio.writers
    made.sock.room = 100
    made.aio.writers[FD]()
    assert made.shards.credits == [(1, 1, 9, 100)] and FD not in made.aio.writers


def test_deliveries_in_parts_are_copied_when_their_ring_changes() -> None:
    made = Made()
    ring = bytearray(b"message")
    made.socket.write_delivery([b"frame ", memoryview(ring)], 0, 7)
    made.loop.own_deliveries()
    ring[:] = b"changed"
    made.aio.run()
    assert made.sock.taken == b"frame message"


def test_a_client_that_takes_nothing_is_not_read_until_it_does() -> None:
    made = Made()
    made.sock.room = 0
    made.socket.write(b"x" * (OUT_BYTES_MAX + 1))
    made.aio.run()
    assert made.socket.paused == PAUSE_OUTPUT
    made.socket.write(b"more")  # while the kernel is full nothing is tried
    made.aio.run()
    made.sock.room = OUT_BYTES_MAX // 2 + 5
    made.aio.writers[FD]()
    assert made.socket.paused == 0 and made.is_read and FD in made.aio.writers
    made.sock.room = 1 << 30
    made.aio.writers[FD]()
    assert FD not in made.aio.writers and made.sock.taken.endswith(b"more")


def test_a_client_whose_output_grows_behind_a_full_kernel_is_held_back_too() -> None:
    made = Made()
    made.sock.room = 0
    made.socket.write(b"x")
    made.aio.run()
    assert made.socket.paused == 0
    made.socket.write(b"x" * OUT_BYTES_MAX)
    made.aio.run()
    assert made.socket.paused == PAUSE_OUTPUT


def test_a_socket_that_cannot_be_written_to_ends_the_connection() -> None:
    made = Made()
    made.sock.error = BrokenPipeError()
    made.socket.write(b"x")
    made.aio.run()
    assert (made.ends, made.sock.is_closed) == (1, True)


def test_a_full_socket_that_breaks_ends_the_connection() -> None:
    made = Made()
    made.sock.room = 0
    made.socket.write(b"x")
    made.aio.run()
    made.sock.error = BrokenPipeError()
    made.aio.writers[FD]()
    assert made.ends == 1 and FD not in made.aio.writers


# -- heartbeats, the end ---------------------------------------------------------------------------


def ticked(made: Made, now: float, heartbeat_s: int = 10) -> bytes:
    """Return what a tick at that time makes the client get."""
    made.aio.now = made.loop.now = now
    before = len(made.sock.taken)
    made.socket.tick(now, heartbeat_s)
    made.aio.run()
    return made.sock.taken[before:]


def test_a_client_gets_heartbeats_while_it_gets_nothing_else() -> None:
    made = Made()
    made.socket.last_received = 1e9
    assert not ticked(made, 104.0)
    assert ticked(made, 105.0) == bytes([8, 0, 0, 0, 0, 0, 0, 0xCE])
    assert not ticked(made, 109.0)
    made.socket.write(b"else")
    made.aio.run()
    assert not ticked(made, 113.0)


def test_a_client_that_wants_no_heartbeats_gets_none_and_may_be_silent() -> None:
    made = Made()
    assert not ticked(made, 1e6, heartbeat_s=0)
    assert made.ends == 0


def test_a_client_that_is_silent_for_two_heartbeats_is_dropped() -> None:
    made = Made()
    ticked(made, 120.0)
    assert made.ends == 0
    ticked(made, 120.1)
    assert made.ends == 1


def test_a_client_that_is_not_read_may_be_silent_unless_it_takes_nothing() -> None:
    made = Made()
    made.socket.pause(PAUSE_ALARM)
    ticked(made, 130.0)
    assert made.ends == 0
    made.sock.room = 0
    made.socket.write(b"x" * (OUT_BYTES_MAX + 1))
    made.aio.run()
    ticked(made, 145.0)
    assert made.ends == 0
    ticked(made, 170.0)
    assert made.ends == 1


class Closed:
    """What a close did: `close_behind_output` is told of the socket, or the socket is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.polite: list[bool] = []
        name = "shardmq.broker.front_door.connection.socket.close_behind_output"
        monkeypatch.setattr(name, lambda aio, sock, shut: self.polite.append(shut))


def test_a_close_behind_all_output_lets_the_client_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, made = Closed(monkeypatch), Made()
    made.socket.output.add(b"close-ok")
    made.socket.flush_then_close()
    assert made.sock.taken == b"close-ok"
    assert closed.polite == [False] and not made.sock.is_closed


def test_a_close_waits_for_output_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, made = Closed(monkeypatch), Made()
    made.sock.room = 0
    made.socket.output.add(b"close-ok")
    made.socket.flush_then_close()
    assert made.ends == 0 and not made.sock.is_closed
    made.aio.pass_time(CLOSE_TIMEOUT_S)
    assert made.ends == 1 and made.sock.is_closed and closed.polite == []


def test_a_close_ends_when_the_last_output_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, made = Closed(monkeypatch), Made()
    made.sock.room = 0
    made.socket.output.add(b"close-ok")
    made.socket.flush_then_close()
    made.sock.room = 100
    made.aio.writers[FD]()
    assert closed.polite == [False] and made.ends == 1


def test_an_end_without_words_closes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, made = Closed(monkeypatch), Made()
    made.socket.close(shut=True)
    assert made.sock.is_closed and closed.polite == [] and made.socket.lost
    made.socket.give_up()  # a timer that comes later
    assert made.ends == 0


def test_a_connection_and_its_socket_do_not_hold_each_other_behind_the_end() -> None:
    made: Any = Made()
    made.socket.close(shut=False)
    made.socket.readable()
    assert made.data == made.ends == 0
