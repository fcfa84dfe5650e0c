"""Connect one front door and one shard by a lane: two rings in shared memory, and a socket.

ZeroMQ connects the two processes first. It carries the first messages, and every message that a
ring has no room for. The rings carry the other messages, without the four wake-ups and two copies
that the threads of ZeroMQ cost for each message. The socket carries the bell, and its end says that
the other process is gone. A lane that cannot be made is no error: then all messages go through
ZeroMQ.

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

import mmap
import os
import socket
import struct
from collections.abc import Callable

import msgspec

from shardmq.shardd.wire import envelope
from shardmq.shardd.wire.envelope import Message, Parts
from shardmq.shardd.wire.messages import RING
from shardmq.shardd.wire.ring import CONTROL_BYTES, Reader, Writer

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

# Where the control block of a ring (ring.pyx) has the positions of its two ends.
TAIL, HEAD = 0, 64
_POSITION = struct.Struct("=Q")

# The first byte on the bell of a lane, if the shard can see the bodies that the front door lends.
SEES_BODIES = b"\1"
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


class Lane:
    """One end of a lane.

    `who` is what the header of the RING messages says. `send_by_zmq` sends a message by ZeroMQ.

    `sees_bodies` says that the shard has the memory of the bodies that the front door lends.

    A front door uses the ring only after the shard has rung the bell, because the shard may be
    unable to take the offer. The reader looks at large messages where they lie in the ring: it must
    copy what it still needs before `let_go`.
    """

    def __init__(
        self,
        bell: socket.socket,
        memory: mmap.mmap,
        who: tuple[int, int, int, int],
        send_by_zmq: Callable[[bytes], object],
        *,
        at_shard: bool,
        sees_bodies: bool = False,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        to_shard = (_CONTROL_TO_SHARD, _RINGS_AT, ring_bytes)
        to_door = (_CONTROL_TO_DOOR, _RINGS_AT + ring_bytes, ring_bytes)
        out, in_ = (to_door, to_shard) if at_shard else (to_shard, to_door)
        self.times_full = 0  # how often the ring had no room
        self._memory = memory
        self._out_at = out[0]
        self.fd = bell.fileno()
        self._bell = bell
        self._send_by_zmq = send_by_zmq
        self._goes_on = envelope.header(RING, *who)
        self._writer = Writer(memory, *out, self.fd)
        self._reader = Reader(memory, *in_, True)
        self._is_accepted = at_shard  # the shard has taken the offer
        self._writes_ring = False
        self._reads_ring = False
        self.sees_bodies = sees_bodies
        if at_shard:
            bell.send(SEES_BODIES if sees_bodies else b"\0")

    def send(self, message: Parts) -> None:
        if self._writes_ring:
            writer = self._writer
            if writer.put(message) if isinstance(message, bytes) else writer.put_parts(message):
                return
            writer.put_switch()
            self._writes_ring = False
            self.times_full += 1
        elif self._is_accepted and self._writer.empty():
            self._send_by_zmq(self._goes_on)
            self._writes_ring = True
            self.send(message)
            return
        self._send_by_zmq(joined(message))

    def waiting_bytes(self) -> int:
        """Return the bytes in the ring that the other end has not taken.

        The number is for metrics, and a moment old.
        """
        tail, head = (
            _POSITION.unpack_from(self._memory, self._out_at + at)[0] for at in (TAIL, HEAD)
        )
        return max(0, int(tail - head))

    def came_by_zmq(self, kind: int) -> list[Message]:
        """Note that a message of this kind came by ZeroMQ.

        Returns the messages of the ring that must be taken in before it: before a RING there are
        none, and those behind it are returned. The lane must be told also after its end, because
        the last messages of a process that is gone may still arrive by ZeroMQ.
        """
        if kind == RING:
            self._reads_ring = True
        return self.take(ALL)

    def take(self, most: int) -> list[Message]:
        """Return the next messages of the ring, at most `most`.

        The messages are valid until `let_go` or the next `take`. Raises ValueError if the ring is
        damaged.
        """
        if not self._reads_ring:
            return []
        messages, switched = self._reader.take(most)
        self._reads_ring = not switched
        return messages

    def let_go(self) -> None:
        """Give the memory of the messages that were taken last back to the writer."""
        self._reader.let_go()

    def sleep(self) -> bool:
        """Return whether there is nothing to take; if so, the bell rings when there is."""
        return not self._reads_ring or self._reader.sleep()

    def hear(self) -> bool:
        """Take in the bell; return False if the other process is gone.

        The messages that the other process has written can still be taken.
        """
        try:
            said = self._bell.recv(1)
            self._is_accepted = bool(said)
            self.sees_bodies = self.sees_bodies or said == SEES_BODIES
        except BlockingIOError:
            return True
        except OSError:
            return False
        return self._is_accepted

    def close(self) -> None:
        self._bell.close()


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

    `bodies` is the descriptor of the memory of lent bodies (bodies.pyx), None if none are lent.
    Raises NoLane if nobody listens there, or if there is no memory or descriptor for the lane.
    """
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        bell.setblocking(False)
        bell.connect(path_of(runtime_dir, shard))
        fd = os.memfd_create("shardmq-lane", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, MEMORY_BYTES)
            memory = mmap.mmap(fd, MEMORY_BYTES)
            fds = [fd] if bodies is None else [fd, bodies]
            socket.send_fds(bell, [msgspec.msgpack.encode(what)], fds)
        finally:
            os.close(fd)
    except OSError as error:
        bell.close()
        raise NoLane(str(error)) from error
    who = (what.peer, what.incarnation, what.epoch, shard)
    return Lane(bell, memory, who, send_by_zmq, at_shard=False)


def accept(
    listener: socket.socket,
) -> tuple[Offer, socket.socket, mmap.mmap, mmap.mmap | None] | None:
    """Return the next offer with its socket and its memory, or None if there is none.

    Behind them is the memory of the bodies that the front door lends, or None.
    Raises NoLane if the other side did not offer a lane that this process knows.
    """
    try:
        bell, _ = listener.accept()
    except BlockingIOError:
        return None
    except OSError as error:
        raise NoLane(str(error)) from error
    fds: list[int] = []
    try:
        bell.settimeout(OFFER_S_MAX)
        data, fds, _flags, _address = socket.recv_fds(bell, OFFER_BYTES_MAX, 2)
        bell.setblocking(False)
        if not fds or os.fstat(fds[0]).st_size != MEMORY_BYTES:
            raise NoLane("no memory came with an offer")
        offered = msgspec.msgpack.decode(data, type=Offer)
        bodies = mmap.mmap(fds[1], 0, prot=mmap.PROT_READ) if len(fds) > 1 else None
        return offered, bell, mmap.mmap(fds[0], MEMORY_BYTES), bodies
    except (OSError, msgspec.MsgspecError) as error:
        bell.close()
        raise NoLane(str(error)) from error
    except NoLane:
        bell.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)
