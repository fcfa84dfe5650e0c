"""A front door with sockets of the kernel, rings and bells, which waits by epoll."""

from __future__ import annotations

import mmap
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from shardmq.shardd.wire import lane
from shardmq.shardd.wire import messages as wire
from tests.connections.door_play import INCARNATION, SHARDS, Door, Tasks
from tests.reference.watch import Pass
from tests.support.lanes import shared_by_two

# A client writes at most this at once, which the kernel takes.
WRITE_BYTES = 60_000
PASSES_MAX = 1000


class Epolled(Tasks):
    """An event loop whose descriptors are asked when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._epoll = select.epoll()

    def add_reader(self, fd: int, call: Callable[..., None], *args: Any) -> None:
        if fd not in self.readers:
            self._epoll.register(fd, select.EPOLLIN)
        self.readers[fd] = partial(call, *args)

    def remove_reader(self, fd: int) -> bool:
        if fd in self.readers:
            self._epoll.unregister(fd)
        return super().remove_reader(fd)

    def readable(self) -> list[int]:
        """Return what is readable, in the order in which it became so."""
        return [fd for fd, _ in self._epoll.poll(0)]

    def writable(self) -> list[int]:
        return select.select([], list(self.writers), [], 0)[1]

    def close(self) -> None:
        self._epoll.close()


class WiredClient:
    """The far end of the socket of one client."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        for end in (self.near, self.far):
            end.setblocking(False)
        self.taken = b""

    @property
    def is_closed(self) -> bool:
        return self.near.fileno() < 0

    def collect(self) -> None:
        with suppress(OSError):  # there is no more, or the client has ended
            while data := self.far.recv(1 << 20):
                self.taken += data


class Wired(Door):
    """A front door that goes the short way in compiled passes, or Python's way in slow ones."""

    new_loop = Epolled

    def __init__(self, *, short: bool, passes: type[Pass] = Pass, **settings: Any) -> None:
        self._short = short
        self._lanes: list[lane.Lane | None] = [None] * SHARDS
        self._by_zmq: list[bytes] = []
        self._heard = [0] * SHARDS
        self._unsent: list[tuple[int, bytes]] = []
        super().__init__(short=short, **settings)
        self._pass = passes(self.loop, self.links.inbox, self.aio.readers)

    # -- clients

    def new_client(self) -> tuple[Any, Any]:
        client = WiredClient()
        return client, client.near

    def read(self, at: int, data: bytes) -> None:
        self._unsent.append((at, data))

    def _say(self) -> None:
        """Let each client write some of what it has to say."""
        writers: set[int] = set()
        rest = []
        for at, data in self._unsent:
            if at in writers:
                rest.append((at, data))
                continue
            writers.add(at)
            with suppress(OSError):  # the front door has closed it
                self.clients[at].far.sendall(data[:WRITE_BYTES])
                if data[WRITE_BYTES:]:
                    rest.append((at, data[WRITE_BYTES:]))
        self._unsent = rest

    # -- shards

    def restart(self, shard: int) -> None:
        link = self.links.links[shard]
        if self._short and self.loop.watch is None:
            self.services.watch()
        if link.lane is not None:
            self._collect(shard)
            self.links.inbox.close_lane(link)
            self._lanes[shard].close()  # type: ignore[union-attr]
        super().restart(shard)
        ours, theirs = shared_by_two(mmap.mmap(-1, lane.MEMORY_BYTES))
        who = (0, INCARNATION, link.epoch, shard)
        link.lane = lane.Lane(ours, who, link.send_by_zmq, at_shard=False)
        self.links.inbox.listen(link, link.lane)
        self._lanes[shard] = lane.Lane(theirs, who, self._by_zmq.append, at_shard=True)

    def hear(self, shard: int, *messages: bytes) -> None:
        for message in messages:
            self._lanes[shard].send(message)  # type: ignore[union-attr]
        by_zmq, self._by_zmq[:] = self._by_zmq[:], []
        for message in by_zmq:
            self.links.inbox.take_by_zmq(message)

    def _collect(self, shard: int) -> None:
        """Let a shard take in what was sent to it."""
        ours, sent = self._lanes[shard], self.wires[shard].sent
        assert ours is not None
        new = sent[self._heard[shard] :]
        came = ours.came_by_zmq(wire.RING) if any(each[0] == wire.RING for each in new) else []
        sent += map(bytes, [*came, *ours.take(lane.ALL)])
        ours.let_go()
        ours.hear()
        ours.sleep()
        self._heard[shard] = len(sent)

    # -- passes

    def run(self) -> None:
        """Run passes until nothing is readable and nothing is to be said."""
        for _ in range(PASSES_MAX):
            self._say()
            readable = self.aio.readable()
            watch = self.loop.watch
            if watch is None:
                if readable:
                    self._pass.run(readable)
            else:
                for fd in readable:
                    self.aio.readers.get(fd, watch.ready)()
            for fd in self.aio.writable():
                self.aio.writers[fd]()
            was_busy = bool(readable or self._unsent or self.aio.soon)
            self.aio.run()
            for shard in range(SHARDS):
                self._collect(shard)
            for client in self.clients:
                client.collect()
            if not was_busy:
                return
        raise AssertionError("the passes do not end")

    def close(self) -> None:
        for link in self.links.links:
            self.links.inbox.close_lane(link)
            self._lanes[link.shard].close()  # type: ignore[union-attr]
        for client in self.clients:
            client.near.close()
            client.far.close()
        self.aio.close()
