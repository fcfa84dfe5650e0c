"""Connect a front door and the shard of the same process: two lists, without ring and bell.

Both run in one event loop, so nothing is shared between threads. Messages stay in order, because
all of them go this way. The windows of publishes and deliveries bound the lists, as they bound the
messages of a lane between processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from shardmq.shardd.wire.envelope import Message, Parts
from shardmq.shardd.wire.lane import ALL, Lane, joined
from shardmq.shardd.wire.shared_memory import Taker


class LocalLane:
    """One end of the way between a front door and the shard of its process.

    `wake`, which the owner of the end sets, is called when a message comes while the end sleeps. A
    message is kept in one piece of its own: buffers that a sender lends, such as the buffer for
    reads and the write buffer of a store, change before the message is taken.
    """

    times_full = 0

    def __init__(self) -> None:
        self.wake: Callable[[], object] = lambda: None
        self._came: deque[bytes] = deque()
        self._sleeps = True
        self._other = self

    @classmethod
    def pair(cls) -> tuple[LocalLane, LocalLane]:
        """Return the end of the front door and the end of the shard."""
        door, shard = cls(), cls()
        door._other, shard._other = shard, door
        return door, shard

    def put(self, message: Parts) -> None:
        """Put a message on its way. The caller calls `ring` behind the last one."""
        self._other._came.append(joined(message))

    def ring(self) -> None:
        """Wake the other end if it sleeps and there is something to take."""
        other = self._other
        if other._sleeps and other._came:
            other._sleeps = False
            other.wake()

    def send(self, message: Parts) -> None:
        """Put a message on its way, and ring."""
        self.put(message)
        self.ring()

    def take(self, most: int, taker: Taker | None = None) -> list[Message]:
        """Return the next messages, at most `most`, whatever a `taker` could take in."""
        came = self._came
        return [came.popleft() for _ in range(min(most, len(came)))]

    def came_by_zmq(self, kind: int) -> list[Message]:
        """Return all messages: a message that came by ZeroMQ was sent after them."""
        return self.take(ALL)

    def let_go(self) -> None:
        """Do nothing: the messages that were taken are nobody else's."""

    def sleep(self) -> bool:
        """Return whether there is nothing to take; if so, `wake` is called when there is."""
        self._sleeps = not self._came
        return self._sleeps

    def waiting_bytes(self) -> int:
        """Return the bytes that the other end has not taken."""
        return sum(map(len, self._other._came))


AnyLane = Lane | LocalLane
