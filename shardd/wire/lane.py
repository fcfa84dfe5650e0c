"""A lane: the short way between one front door and one shard. Two rings in memory that both share, and a socket.

ZeroMQ connects the two, carries the first words, and whatever a ring has no room for; the rings carry the rest without
the four wake-ups and two copies that its threads cost each message. The socket carries the bell; its end is the other
process's. A lane that cannot be made is not missed: everything takes the long way then.

Order is kept across both ways. A writer that finds no room writes a turn into the ring, and then sends the long way
until the reader has taken all that was in the ring; a LANE message, sent the long way, says that the ring goes on. So a
reader that hears anything the long way first takes what the ring holds up to its turn, and behind a turn leaves the
ring alone until the LANE message. Both directions begin as if behind a turn.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Callable

import msgspec

from shardmq.shardd.wire import envelope
from shardmq.shardd.wire.envelope import Message, Parts
from shardmq.shardd.wire.messages import LANE
from shardmq.shardd.wire.ring import CONTROL_BYTES, Reader, Writer

# Bytes of messages under way in one direction; only what is used is ever touched. The window of publishes
# (shard_link.py) and that of one client's deliveries (peers.py) twice, with what is around them: of messages that fill
# one, the next has room while one is looked at.
RING_BYTES = (2 << 20) + (256 << 10)
# What both rings say of themselves lies before them.
_CONTROL_TO_SHARD, _CONTROL_TO_DOOR = 0, CONTROL_BYTES
_RINGS_AT = mmap.PAGESIZE
MEMORY_BYTES = _RINGS_AT + 2 * RING_BYTES
# More messages than a ring holds.
ALL = RING_BYTES

# Of what a ring says of itself (ring.pyx), how far its two ends are.
TAIL, HEAD = 0, 64
_POSITION = struct.Struct("=Q")

# Of the words that come with the memory.
OFFER_BYTES_MAX = 4096
# The offer is sent before anybody can know of it.
OFFER_S_MAX = 1.0
# Front doors that may come at once.
BACKLOG = 64


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """Who offers a lane, and to which process of the shard."""

    peer: int
    incarnation: int
    epoch: int
    endpoint: str


class NoLane(Exception):
    """It could not be made; everything goes the long way."""


class Lane:
    """One end. `who`: what the header of its LANE messages says; `far`: sends a message the long way.

    A front door goes through the ring only when the shard has rung: the shard may be unable to take the offer. The
    reader looks at large messages where they lie in the ring: what it still needs at let_go() is its own to copy.
    """

    def __init__(
        self,
        bell: socket.socket,
        memory: mmap.mmap,
        who: tuple[int, int, int, int],
        far: Callable[[bytes], object],
        *,
        at_shard: bool,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        to_shard = (_CONTROL_TO_SHARD, _RINGS_AT, ring_bytes)
        to_door = (_CONTROL_TO_DOOR, _RINGS_AT + ring_bytes, ring_bytes)
        out, in_ = (to_door, to_shard) if at_shard else (to_shard, to_door)
        self.turned = 0  # how often there was no room in the ring
        self._memory = memory
        self._out_at = out[0]
        self.fd = bell.fileno()
        self._bell = bell
        self._far = far
        self._goes_on = envelope.header(LANE, *who)
        self._writer = Writer(memory, *out, self.fd)
        self._reader = Reader(memory, *in_, True)
        self._met = at_shard
        self._near = False  # whether what is sent goes through the ring
        self._listening = False  # whether the ring is read
        if at_shard:
            bell.send(b"\0")

    def send(self, message: Parts) -> None:
        if self._near:
            writer = self._writer
            if writer.put(message) if isinstance(message, bytes) else writer.put_parts(message):
                return
            writer.turn()
            self._near = False
            self.turned += 1
        elif self._met and self._writer.empty():
            self._far(self._goes_on)
            self._near = True
            self.send(message)
            return
        self._far(joined(message))

    def waiting_bytes(self) -> int:
        """In the ring and not yet taken by the other end; for metrics, as it was a moment ago."""
        tail, head = (
            _POSITION.unpack_from(self._memory, self._out_at + at)[0] for at in (TAIL, HEAD)
        )
        return max(0, int(tail - head))

    def came_far(self, kind: int) -> list[Message]:
        """A message of this kind came the long way: what is to be taken before it."""
        if kind != LANE:
            return self.take(ALL)
        self._listening = True
        return []

    def take(self, most: int) -> list[Message]:
        """What the ring holds next, good until let_go() or the next take(); ValueError if it is damaged."""
        if not self._listening:
            return []
        messages, turned = self._reader.take(most)
        self._listening = not turned
        return messages

    def let_go(self) -> None:
        """What was taken last is done with."""
        self._reader.let_go()

    def sleep(self) -> bool:
        """Whether there is nothing to take; the bell rings when there is."""
        return not self._listening or self._reader.sleep()

    def hear(self) -> bool:
        """The bells so far. False: the other process is gone; what it has said can still be taken."""
        try:
            self._met = bool(self._bell.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return self._met

    def close(self) -> None:
        self._bell.close()


def joined(message: Parts) -> bytes:
    return message if isinstance(message, bytes) else b"".join(message)


def path_of(runtime_dir: object, shard: int) -> str:
    return f"{runtime_dir}/lane-{shard}.sock"


def listen(runtime_dir: object, shard: int) -> socket.socket:
    """Where a shard takes offers."""
    path = path_of(runtime_dir, shard)
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def offer(runtime_dir: object, shard: int, what: Offer, far: Callable[[bytes], object]) -> Lane:
    """A front door's end. NoLane: nobody listens there, or there is no memory or descriptor for it."""
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        bell.setblocking(False)
        bell.connect(path_of(runtime_dir, shard))
        fd = os.memfd_create("shardmq-lane", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, MEMORY_BYTES)
            memory = mmap.mmap(fd, MEMORY_BYTES)
            socket.send_fds(bell, [msgspec.msgpack.encode(what)], [fd])
        finally:
            os.close(fd)
    except OSError as error:
        bell.close()
        raise NoLane(str(error)) from error
    return Lane(bell, memory, (what.peer, what.incarnation, what.epoch, shard), far, at_shard=False)


def accept(listener: socket.socket) -> tuple[Offer, socket.socket, mmap.mmap] | None:
    """The next offer, None if there is none. NoLane: whoever came did not offer what we know."""
    try:
        bell, _ = listener.accept()
    except BlockingIOError:
        return None
    except OSError as error:
        raise NoLane(str(error)) from error
    fds: list[int] = []
    try:
        bell.settimeout(OFFER_S_MAX)
        data, fds, _flags, _address = socket.recv_fds(bell, OFFER_BYTES_MAX, 1)
        bell.setblocking(False)
        if len(fds) != 1 or os.fstat(fds[0]).st_size != MEMORY_BYTES:
            raise NoLane("no memory came with an offer")
        return msgspec.msgpack.decode(data, type=Offer), bell, mmap.mmap(fds[0], MEMORY_BYTES)
    except (OSError, msgspec.MsgspecError) as error:
        bell.close()
        raise NoLane(str(error)) from error
    except NoLane:
        bell.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)
