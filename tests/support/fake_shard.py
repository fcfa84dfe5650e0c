"""A shard as its front door sees it: real ZeroMQ sockets, and answers that the test decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio

from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as wire

WAIT_S = 60.0


class FakeShard:
    """One process life of a shard: `restart` begins another, under a new epoch."""

    def __init__(self, runtime_dir: Path, number: int) -> None:
        self.number = number
        self.epoch = 1000 + number
        self._path = f"ipc://{runtime_dir}/shard-{number}.sock"
        self._context = zmq.asyncio.Context.instance()
        self._inbox: zmq.asyncio.Socket | None = None
        self._out: zmq.asyncio.Socket | None = None
        self.peer = self.incarnation = 0
        self.open()

    def open(self) -> None:
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(self._path)

    def close(self) -> None:
        for socket in (self._inbox, self._out):
            if socket is not None:
                socket.close(0)
        self._inbox = self._out = None

    async def restart(self) -> None:
        self.close()
        self.epoch += 100
        self.open()
        await self.greet()

    async def receive(self) -> tuple[envelope.Header, bytes]:
        """Return the next message that is no Join."""
        while True:
            assert self._inbox is not None
            message = await asyncio.wait_for(self._inbox.recv(), WAIT_S)
            head = envelope.read(message)
            if head.kind == wire.CONTROL and isinstance(
                what := envelope.read_control(message), wire.Join
            ):
                self._know(head, what)
                continue
            return head, message

    async def receive_control(self) -> wire.Control:
        head, message = await self.receive()
        assert head.kind == wire.CONTROL, head
        return envelope.read_control(message)

    async def greet(self) -> None:
        """Wait for a Join, say Hello."""
        while self._out is None:
            assert self._inbox is not None
            message = await asyncio.wait_for(self._inbox.recv(), WAIT_S)
            if envelope.read(message).kind == wire.CONTROL:
                what = envelope.read_control(message)
                if isinstance(what, wire.Join):
                    self._know(envelope.read(message), what)
        await self.say(wire.Hello(1, True))

    def _know(self, head: envelope.Header, join: wire.Join) -> None:
        self.peer, self.incarnation = head.peer, head.incarnation
        if self._out is None:
            self._out = self._context.socket(zmq.PUSH)
            self._out.connect(join.endpoint)

    @property
    def who(self) -> tuple[int, int, int, int]:
        return self.peer, self.incarnation, self.epoch, self.number

    async def say(self, what: wire.Control) -> None:
        await self.send(lambda *who: envelope.control(*who, what))

    async def send(self, make: Callable[[int, int, int, int], bytes]) -> None:
        """`make(peer, incarnation, epoch, shard)` is the message."""
        assert self._out is not None
        await self._out.send(make(*self.who))
