"""Connect one front door and one shard by a lane: two rings in shared memory, two bells, a socket.

ZeroMQ connects the two processes first. It carries the first messages, and every message that a
ring has no room for. The rings carry the other messages, without the four wake-ups and two copies
that the threads of ZeroMQ cost for each message. Each process has a bell, an eventfd, which the
other one rings. The socket carries the offer, and then nothing: its end says that the other process
is gone. A lane that cannot be made is no error: then all messages go through ZeroMQ.

Messages stay in order across both ways. A writer that finds no room writes a switch marker into the
ring. From then on the writer sends by ZeroMQ, until the reader has taken all messages that were in
the ring. Then the writer sends a RING message by ZeroMQ, which says that the ring goes on. A reader
that gets any other message by ZeroMQ first takes the messages in the ring up to the switch marker.
Behind a switch marker the reader leaves the ring alone until the RING message. Both directions
begin as if behind a switch marker.

Why ZeroMQ carries what a ring has no room for, instead of a list of messages that wait for room:
that list would hold data, and no bound that fits the ring is right for it. One message may have
512 MiB (message_bytes_max), and each client of a front door may have CONNECTION_WINDOW_BYTES of
deliveries on their way: with 50 clients that read 200 messages of 10 KB each, the ring of their
deliveries was full 17 times (with one client it was never full). A large message would have to be
cut and put together again, and a reader that has made room would have to ring the bell of the
writer. The switch marker and the RING message are less than that.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple, Self

import msgspec

from shardmq.shardd.wire import envelope
from shardmq.shardd.wire.envelope import Message, Parts
from shardmq.shardd.wire.messages import RING
from shardmq.shardd.wire.shared_memory import (
    CONTROL_BYTES,
    BodyMemory,
    LaneState,
    Reader,
    Taker,
    Writer,
)

# Bytes of messages under way in one direction. Memory that is never used is never touched. The ring
# has room for twice the window of publishes (shard_link.py), or twice the window of deliveries to
# one client (peers.py), with headers: while the reader looks at a message that fills a window, the
# next one has room.
RING_BYTES = (2 << 20) + (256 << 10)
# The control blocks of both rings lie before the rings.
_CONTROL_TO_SHARD, _CONTROL_TO_DOOR = 0, CONTROL_BYTES
_RINGS_AT = mmap.PAGESIZE
MEMORY_BYTES = _RINGS_AT + 2 * RING_BYTES
# A count of messages that no ring can hold.
ALL = RING_BYTES

# Where the control block of a ring (ring.pxi) has the positions of its two ends.
TAIL, HEAD = 0, 64
_POSITION = struct.Struct("=Q")

# The descriptors that come with an Offer: the memory, the shard's bell, the front door's bell.
DESCRIPTORS = 3
# There may be one more: the memory of the bodies that the front door lends (bodies.pxi).
DESCRIPTORS_MAX = 4
# The longest Offer, encoded.
OFFER_BYTES_MAX = 4096
# A shard waits at most this long for an Offer. The front door sends it right after connecting.
OFFER_S_MAX = 1.0
# Front doors that may connect at once.
BACKLOG = 64


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """The first message on the socket of a lane.

    It says which front door offers the lane, and to which epoch of the shard.
    """

    peer: int
    incarnation: int
    epoch: int
    endpoint: str


class NoLane(Exception):
    """A lane could not be made; all messages go through ZeroMQ."""


class Shared(NamedTuple):
    """The things that the two processes of a lane share.

    Both have the same files under descriptors of their own. `close` closes those of this process.
    `bodies` is the memory of the bodies that the front door lends, as the shard sees it.
    """

    end: socket.socket
    memory: mmap.mmap
    shard_bell: int
    door_bell: int
    bodies: mmap.mmap | None = None

    @classmethod
    def make(cls, end: socket.socket, memory: mmap.mmap) -> Self:
        """Add two new bells. Raises OSError if there is no descriptor for them."""
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        shard_bell = os.eventfd(0, flags)
        try:
            return cls(end, memory, shard_bell, os.eventfd(0, flags))
        except OSError:
            os.close(shard_bell)
            raise

    def close(self) -> None:
        self.end.close()
        os.close(self.shard_bell)
        os.close(self.door_bell)


class Lane(LaneState):
    """One end of a lane.

    `fd` is readable when the other process is gone, `bell` when the other process has rung.

    `who` is what the header of the RING messages says. `send_by_zmq` sends a message by ZeroMQ.

    A front door uses the ring only after the shard has rung the bell, because the shard may be
    unable to take the offer. The reader looks at large messages where they lie in the ring: it must
    copy what it still needs before `let_go`.
    """

    def __init__(
        self,
        shared: Shared,
        who: tuple[int, int, int, int],
        send_by_zmq: Callable[[bytes], object],
        *,
        at_shard: bool,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        to_shard = (_CONTROL_TO_SHARD, _RINGS_AT, ring_bytes)
        to_door = (_CONTROL_TO_DOOR, _RINGS_AT + ring_bytes, ring_bytes)
        out, in_ = (to_door, to_shard) if at_shard else (to_shard, to_door)
        self.times_full = 0  # how often the ring had no room
        self._shared = shared
        self._out_at = out[0]
        self.fd = shared.end.fileno()
        self.bell, other_bell = shared.shard_bell, shared.door_bell
        if not at_shard:
            self.bell, other_bell = other_bell, self.bell
        self._send_by_zmq = send_by_zmq
        self._goes_on = envelope.header(RING, *who)
        self.writer = Writer(shared.memory, *out, other_bell)
        self.reader = Reader(shared.memory, *in_, True)
        self._is_accepted = at_shard  # the shard has taken the offer
        self.writes_ring = False
        self.reads_ring = False
        if at_shard:
            os.eventfd_write(other_bell, 1)

    @property
    def is_accepted(self) -> bool:
        """Return whether the shard has taken the offer, and sees the memory of lent bodies."""
        return self._is_accepted

    def send(self, message: Parts) -> None:
        """Put a message on its way, and ring."""
        self.put(message)
        self.writer.ring()

    def ring(self) -> None:
        """Wake the other process if it sleeps: there are messages that were put."""
        self.writer.ring()

    def put(self, message: Parts) -> None:
        """Put a message on its way. The caller calls `ring` behind the last one."""
        if self.writes_ring:
            writer = self.writer
            if writer.put(message) if isinstance(message, bytes) else writer.put_parts(message):
                return
            writer.put_switch()
            self.writes_ring = False
            self.times_full += 1
        elif self._is_accepted and self.writer.empty():
            self._send_by_zmq(self._goes_on)
            self.writes_ring = True
            self.put(message)
            return
        self._send_by_zmq(joined(message))

    def waiting_bytes(self) -> int:
        """Return the bytes in the ring that the other end has not taken.

        The number is for metrics, and a moment old.
        """
        tail, head = (
            _POSITION.unpack_from(self._shared.memory, self._out_at + at)[0] for at in (TAIL, HEAD)
        )
        return max(0, int(tail - head))

    def came_by_zmq(self, kind: int) -> list[Message]:
        """Note that a message of this kind came by ZeroMQ.

        Returns the messages of the ring that must be taken in before it: before a RING there are
        none, and those behind it are returned. The lane must be told also after its end, because
        the last messages of a process that is gone may still arrive by ZeroMQ.
        """
        if kind == RING:
            self.reads_ring = True
        return self.take(ALL)

    def take(self, most: int, taker: Taker | None = None) -> list[Message]:
        """Return the next messages of the ring, at most `most`.

        A `taker` takes the first of them in where they lie, and they are not returned. The messages
        are valid until `let_go` or the next `take`. Raises ValueError if the ring is damaged, once:
        then nothing is read from it any more.
        """
        if not self.reads_ring:
            return []
        if taker is not None:
            before = taker.taken
            if not self.reader.offer(taker, most):
                return []
            most -= taker.taken - before
        try:
            messages, switched = self.reader.take(most)
        except ValueError:
            self.reads_ring = False
            raise
        self.reads_ring = not switched
        return messages

    def let_go(self) -> None:
        """Give the memory of the messages that were taken last back to the writer."""
        self.reader.let_go()

    def sleep(self) -> bool:
        """Return whether there is nothing to take; if so, the bell rings when there is."""
        return not self.reads_ring or self.reader.sleep()

    def hear(self) -> None:
        """Take in the bell, so that `bell` is not readable any more."""
        try:
            os.eventfd_read(self.bell)
        except BlockingIOError:
            return
        self._is_accepted = True

    def is_over(self) -> bool:
        """Return whether the other process is gone.

        The messages that the other process has written can still be taken.
        """
        try:
            return not self._shared.end.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._shared.close()


def joined(message: Parts) -> bytes:
    return message if isinstance(message, bytes) else b"".join(message)


def path_of(runtime_dir: object, shard: int) -> str:
    return f"{runtime_dir}/lane-{shard}.sock"


def listen(runtime_dir: object, shard: int) -> socket.socket:
    """Return the socket on which a shard accepts offers of lanes."""
    path = path_of(runtime_dir, shard)
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def offer(
    runtime_dir: object,
    shard: int,
    what: Offer,
    send_by_zmq: Callable[[bytes], object],
    bodies: int | None = None,
) -> Lane:
    """Offer a lane to a shard, and return the end of the front door.

    `bodies` is the descriptor of the memory of lent bodies. A shard that takes the offer sees it.
    Raises NoLane if nobody listens there, or if there is no memory or descriptor for the lane.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.setblocking(False)
        end.connect(path_of(runtime_dir, shard))
        fd = os.memfd_create("shardmq-lane", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, MEMORY_BYTES)
            shared = Shared.make(end, mmap.mmap(fd, MEMORY_BYTES))
            try:
                fds = [fd, shared.shard_bell, shared.door_bell]
                fds += [] if bodies is None else [bodies]
                socket.send_fds(end, [msgspec.msgpack.encode(what)], fds)
            except OSError:
                shared.close()
                raise
        finally:
            os.close(fd)
    except OSError as error:
        end.close()
        raise NoLane(str(error)) from error
    who = (what.peer, what.incarnation, what.epoch, shard)
    return Lane(shared, who, send_by_zmq, at_shard=False)


def body_memory(size: int, shards: int) -> BodyMemory:
    """Return memory from which a front door can lend bodies to shards.

    Raises OSError if there is none. Nobody can make the memory smaller under its readers.
    """
    fd = os.memfd_create("shardmq-bodies", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return BodyMemory(mmap.mmap(fd, size), fd, shards)
    except OSError:
        os.close(fd)
        raise


def accept(listener: socket.socket) -> tuple[Offer, Shared] | None:
    """Return the next offer with what the two processes share, or None if there is none.

    Raises NoLane if the other side did not offer a lane that this process knows, and OSError if
    this process cannot accept anything now, because it has no descriptor left. Then the offer
    stays where it is.
    """
    try:
        end, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    fds: list[int] = []
    try:
        end.settimeout(OFFER_S_MAX)
        data, fds, _flags, _address = socket.recv_fds(end, OFFER_BYTES_MAX, DESCRIPTORS_MAX)
        end.setblocking(False)
        if len(fds) < DESCRIPTORS or os.fstat(fds[0]).st_size != MEMORY_BYTES:
            raise NoLane("no memory came with an offer")
        offered = msgspec.msgpack.decode(data, type=Offer)
        bodies = mmap.mmap(fds[3], 0, prot=mmap.PROT_READ) if len(fds) > DESCRIPTORS else None
        shared = Shared(end, mmap.mmap(fds[0], MEMORY_BYTES), fds[1], fds[2], bodies)
        del fds[1:DESCRIPTORS]
        return offered, shared
    except (OSError, msgspec.MsgspecError) as error:
        end.close()
        raise NoLane(str(error)) from error
    except NoLane:
        end.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)
