"""A dialer hears all that a shard has said before a session ended, however late it looks."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Iterator

import pytest
import zmq

from shardmq.broker.front_door.links.shard_inbox import RECEIVE_BURST
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.dialer import Dialer
from shardmq.shardd.wire.session import SessionKeys, prepare

WAIT_S = 60
LAST_WORDS = 3 * RECEIVE_BURST + 1


class Shard:
    """The end of a shard: a ROUTER that a test speaks by."""

    def __init__(self, keys: SessionKeys) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        prepare(self._socket, keys)
        self._socket.curve_server = True
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    def hear(self) -> bytes:
        assert self._socket.poll(WAIT_S * 1000)
        name, _ = self._socket.recv_multipart()
        return name

    def say(self, name: bytes, messages: list[bytes]) -> None:
        for message in messages:
            self._socket.send_multipart((name, message))

    def end(self) -> None:
        """Return when the kernel has all that was said, and the end of the connection."""
        self._socket.close(WAIT_S * 1000)
        self._context.term()


class Owner:
    """The owner of a dialer: takes RECEIVE_BURST messages at most in one call, as front doors."""

    def __init__(self, address: str, keys: SessionKeys) -> None:
        self.taken: list[bytes] = []
        self.has_taken, self.is_over = asyncio.Event(), asyncio.Event()
        self.dialer = Dialer(
            zmq.Context.instance(),
            address,
            keys,
            7,
            began=lambda: self.dialer.send(b"join"),
            speaks=self._take,
            ended=self.is_over.set,
        )

    def _take(self) -> None:
        for _ in range(RECEIVE_BURST):
            if (message := self.dialer.take()) is None:
                return
            assert not self.is_over.is_set()
            self.taken.append(message)
            self.has_taken.set()


@pytest.fixture
def keys() -> SessionKeys:
    public, secret = zmq.curve_keypair()
    return SessionKeys(public.decode(), secret.decode())


@pytest.fixture
def shard(keys: SessionKeys) -> Iterator[Shard]:
    made = Shard(keys)
    yield made
    made.end()


async def test_the_last_words_of_a_shard_are_heard_before_the_end_of_its_session(
    keys: SessionKeys, shard: Shard
) -> None:
    words = [
        bytes(envelope.control(1, 7, 5, 0, wire.Cancelled(number)))
        for number in range(1 + LAST_WORDS)
    ]
    owner = Owner(shard.address, keys)
    owner.dialer.start(asyncio.get_running_loop())
    name = await asyncio.to_thread(shard.hear)
    shard.say(name, words[:1])
    await asyncio.wait_for(owner.has_taken.wait(), WAIT_S)
    shard.say(name, words[1:])
    shard.end()
    # The owner looks when ZeroMQ has taken in all, and has seen the end.
    monitor = owner.dialer._monitor
    assert monitor is not None and select.select([monitor.fileno()], [], [], WAIT_S)[0]
    assert owner.taken == words[:1]
    async with asyncio.timeout(WAIT_S):
        await owner.is_over.wait()
    owner.dialer.close()
    assert owner.taken == words
