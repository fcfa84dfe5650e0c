"""Play one history on two shards whose front doors reach them by lanes: plain passes, and Python's.

The first shard runs its plain passes in `shardd/plain_passes.pxi`. The second has the short way
switched off, so each of its passes goes by links.py, which is the reference. What the front doors
send lies in their rings until the next turn. Then both shards must send the same bytes and hold the
same state (`short_way_history.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from shardmq.shardd.links import Links
from shardmq.shardd.queues import log_order
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as m
from shardmq.shardd.wire.lane import ALL, Lane, Offer, joined, offer
from shardmq.shardd.wire.spin import Spin
from tests.support.short_way_history import DOORS, EPOCH, History, Side

# More passes than the messages of a turn can need.
PASSES = 6
PEER_AT = slice(2, 4)


class Outbox:
    """Stands for the ZeroMQ socket that leads to a front door."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, message: bytes, flags: int = 0) -> None:
        self.sent.append(message)


class LinkedSide(Side):
    """A shard with its links, and the ends of its front doors."""

    def __init__(self, seed: int, short_way: bool, directory: Path) -> None:
        super().__init__(seed, short_way)
        directory.mkdir()
        self.directory = directory
        self.links = Links(str(directory), self.shard, Spin(0))
        self.outboxes: dict[str, Outbox] = {}
        self.links._outbox = lambda to: self.outboxes.setdefault(to, Outbox())  # type: ignore[assignment, method-assign, return-value]
        self.doors: dict[int, Lane] = {}
        self.now = 0
        self.plain = 0  # messages that plain passes took in

    def receive(self, message: bytes | memoryview, now: int) -> None:
        """Put a message of a front door into its ring; take in that of the controller at once."""
        self.now = now
        message = bytes(message)
        peer = int.from_bytes(message[PEER_AT], "little")
        if peer == m.CONTROLLER or self._joins(message):
            self.shard.receive(message, now)
            if peer != m.CONTROLLER:
                self._connect(peer, envelope.read(message).incarnation)
        else:
            self.doors[peer if peer in self.doors else DOORS[0]].send(message)

    def receive_by_ring(self, messages: list[bytes], now: int) -> None:
        for message in messages:
            self.receive(message, now)

    def _joins(self, message: bytes) -> bool:
        if message[:1] != bytes([m.CONTROL]):
            return False
        try:
            return isinstance(envelope.read_control(message), m.Join)
        except envelope.WireError:
            return False

    def _connect(self, peer: int, incarnation: int) -> None:
        """Connect a front door that has joined by a lane that is in use in both directions."""
        if peer in self.doors:
            self.doors[peer].close()
        endpoint = f"peer-{peer}"
        what = Offer(peer=peer, incarnation=incarnation, epoch=EPOCH, endpoint=endpoint)
        door = self.doors[peer] = offer(
            self.directory, 0, what, lambda said: self.links._receive_by_zmq(said, self.now)
        )
        while self.links._lanes_of.get((peer, incarnation)) is None:
            self._hear(self.links.poll.poll(10))
        door.hear()

    def _hear(self, events: list[tuple[int, int]]) -> None:
        for fd, _ in events:
            assert self.links.hear(fd, self.now)

    def turn(self, now: int) -> list[tuple[str, bytes]]:
        """Run passes until nothing is left; return what came to each front door, in its order."""
        self.now = now
        for _ in range(PASSES):
            events = self.links.wait(1)
            if events is not None:
                self._hear(events)
                before = self.shard.short_way.taken
                self.links.receive(now)
                self.plain -= self.shard.short_way.taken - before
            self.links.send(self.shard.turn_end(now))
        came: list[tuple[str, bytes]] = []
        for peer, door in self.doors.items():
            box = self.outboxes.get(f"peer-{peer}", Outbox())
            for said in [*door.take(ALL), *self._by_zmq(door, box)]:
                came.append((f"peer-{peer}", bytes(said)))
            door.let_go()
        others = [to for to in self.outboxes if not to.startswith("peer-")]
        for to in others:
            came += [(to, said) for said in self.outboxes.pop(to).sent]
        return came

    @staticmethod
    def _by_zmq(door: Lane, box: Outbox) -> list[Any]:
        came: list[Any] = []
        for said in box.sent:
            kind = envelope.read(said).kind
            came += [joined(bytes(each)) for each in door.came_by_zmq(kind)]
            if kind != m.RING:
                came.append(said)
        box.sent.clear()
        return came

    @property
    def taken_plain(self) -> int:
        """The messages that plain passes took in, without those of other passes."""
        return self.shard.short_way.taken + self.plain

    def close(self) -> None:
        for door in self.doors.values():
            door.close()
        self.links.close()


class LinkedHistory(History):
    """A history over lanes that is a function of its seed."""

    def __init__(self, seed: int, directory: Path) -> None:
        super().__init__(seed)
        plain, python = (
            LinkedSide(seed, short, directory / name)
            for short, name in ((True, "plain"), (False, "python"))
        )
        self.sides = (plain, python)
        self.plain, self.python = plain, python

    def play(self, acts: int) -> None:
        try:
            # Plain passes look at the real clock, which would decide how long a queue has its turn.
            with mock.patch.object(log_order, "STAY_MS", 0):
                super().play(acts)
        finally:
            for side in (self.plain, self.python):
                side.close()
