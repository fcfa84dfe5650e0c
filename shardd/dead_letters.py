"""Hand dead letters to a front door in batches, and settle them when their copies are stored.

One front door at a time publishes the dead letters of this shard. Without a front door, or when it
is slow, dead letters wait in the store and take 8 bytes each in memory (`queues.departures`). When
the front door goes, the batches that it has not answered are handed to the next one. So a message
may arrive twice, but is never lost. This file knows no socket and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from shardmq.shardd.peers import Peer
from shardmq.shardd.queues import Queue
from shardmq.shardd.short_way import DeadLettersState
from shardmq.shardd.wire import messages as m

# The bytes of messages that a front door may have and has not answered. A batch may exceed the
# window by its own size.
WINDOW_BYTES = 1 << 20
WINDOW_MESSAGES = 8192
# The largest batch. A front door does nothing else while it publishes a batch.
BATCH_BYTES = 256 << 10
BATCH_MESSAGES = 1024
# Messages that could not be stored (a full disk, a full queue, a shard that is away) are handed
# over again after this time.
RETRY_MS = 1000


class Source(NamedTuple):
    """A queue as clients know it."""

    vhost: str
    # The id, in place of the name, of a queue without a dead-letter exchange of its own, whose
    # messages name one in their headers.
    name: str | int


class _Batch(NamedTuple):
    queue: Queue
    size: int
    messages: int


class DeadLetters(DeadLettersState):
    """The dead letters of one shard."""

    def __init__(self) -> None:
        self.idle = True  # nothing waits, so `hand_over` has nothing to do
        self._sources: dict[int, Source] = {}  # by queue id
        # Queues that have had departures, and are not forgotten.
        self._leaving: dict[Queue, None] = {}
        self._waiting: dict[Queue, None] = {}  # queues to serve, in order
        self._later: deque[tuple[int, Queue]] = deque()  # (due in ms, queue that waits until then)
        self._paused: set[Queue] = set()  # the queues in _later
        self._handed: dict[int, _Batch] = {}
        self._in_flight = self._in_flight_messages = 0  # bytes, messages
        # number and incarnation of the front door that has the batches
        self._door: tuple[int, int] | None = None
        self._last_number = 0

    def know(self, queue_id: int, vhost: str, name: str | int) -> None:
        """Remember the name of a queue with a dead-letter exchange.

        The caller does this before the queue lets any message go.
        """
        self._sources[queue_id] = Source(vhost, name)

    def knows(self, queue_id: int) -> bool:
        return queue_id in self._sources

    def forget(self, queue: Queue) -> None:
        """Forget a deleted queue, unless messages are still departing from it."""
        if queue.backlog.departures is None or not queue.backlog.departures.count:
            self._sources.pop(queue.id, None)
            self._leaving.pop(queue, None)

    def forget_vhost(self, vhost: str) -> None:
        """Forget all queues of a vhost whose store is about to be deleted."""
        gone = {queue_id for queue_id, source in self._sources.items() if source.vhost == vhost}
        for queue_id in gone:
            del self._sources[queue_id]
        for queue in [queue for queue in self._leaving if queue.id in gone]:
            queue.backlog.departures = None
            del self._leaving[queue]
            self._waiting.pop(queue, None)
            self._paused.discard(queue)
        self._later = deque(each for each in self._later if each[1].id not in gone)
        for number in [number for number, batch in self._handed.items() if batch.queue.id in gone]:
            self._forget_batch(number)

    def count(self) -> int:
        """Return how many messages wait, or are handed over and not answered."""
        return sum(
            queue.backlog.departures.count
            for queue in self._leaving
            if queue.backlog.departures is not None
        )

    def have_come(self, queue: Queue) -> None:
        """Note that messages wait in the departures of the queue."""
        self.idle = False
        self._leaving[queue] = None
        if queue not in self._paused:
            self._waiting[queue] = None

    def next_due(self) -> int | None:
        return self._later[0][0] if self._later else None

    def hand_over(self, peers: Mapping[int, Peer], now: int) -> None:
        """Hand over as many messages as the window lets through."""
        while self._later and self._later[0][0] <= now:
            queue = self._later.popleft()[1]
            self._paused.discard(queue)
            self._waiting[queue] = None
        self.idle = not self._waiting and not self._later
        if not self._waiting:
            return
        peer = self._choose(peers)
        while (
            peer is not None
            and self._waiting
            and self._in_flight < WINDOW_BYTES
            and self._in_flight_messages < WINDOW_MESSAGES
        ):
            queue = next(iter(self._waiting))
            del self._waiting[queue]
            if queue.backlog.departures is None or not queue.backlog.departures.waits:
                continue
            if queue.backlog.limits.dead_letters is None and not queue.backlog.letters_differ:
                _give_up(queue)
                continue
            self._hand_over_some(peer, queue)
            if queue.backlog.departures.waits:
                self._waiting[queue] = None

    def _forget_batch(self, number: int) -> _Batch:
        batch = self._handed.pop(number)
        self._in_flight -= batch.size
        self._in_flight_messages -= batch.messages
        return batch

    def _choose(self, peers: Mapping[int, Peer]) -> Peer | None:
        """Return the front door that gets dead letters, or None if there is none.

        It is the same front door as before, as long as that one is there.
        """
        if self._door is not None:
            return peers.get(self._door[0])
        found = min((number for number in peers if number != m.CONTROLLER), default=None)
        if found is None:
            return None
        self._door = (found, peers[found].incarnation)
        return peers[found]

    def _hand_over_some(self, peer: Peer, queue: Queue) -> None:
        to, source, departures = (
            queue.backlog.limits.dead_letters,
            self._sources[queue.id],
            queue.backlog.departures,
        )
        assert departures is not None
        reason, entries = departures.first(BATCH_MESSAGES)
        blob, sizes = queue.store.read(entries, BATCH_BYTES)
        self._last_number = number = self._last_number + 1
        departures.hand_over(number, len(sizes))
        self._handed[number] = _Batch(queue, len(blob), len(sizes))
        self._in_flight += len(blob)
        self._in_flight_messages += len(sizes)
        peer.tell(
            m.DeadLetters(
                number,
                source.vhost,
                source.name,
                reason,
                to.exchange if to else None,
                to.routing_key if to else None,
                bool(to and to.insist),
                len(sizes),
                blob,
            )
        )

    def departed(self, peer: Peer, answer: m.DeadLettersPublished, now: int) -> Queue | None:
        """Settle the messages that a front door has stored, and hand over the others later.

        Returns the queue of the batch, or None if the batch is not known.
        """
        if self._door != (peer.number, peer.incarnation):
            return None
        if answer.number not in self._handed:
            return None
        queue = self._forget_batch(answer.number).queue
        assert queue.backlog.departures is not None
        arrived = queue.backlog.departures.take_off(answer.number, answer.left)
        if arrived:
            queue.store.settle(queue.id, arrived, queue.backlog.durable and not queue.deleted)
        if answer.left:
            self._wait(queue, now)
        elif queue.deleted and not queue.backlog.departures.count:
            self._sources.pop(queue.id, None)
            self._leaving.pop(queue, None)
        return queue

    def _wait(self, queue: Queue, now: int) -> None:
        self._waiting.pop(queue, None)
        if queue not in self._paused:
            self.idle = False
            self._paused.add(queue)
            self._later.append((now + RETRY_MS, queue))

    def door_gone(self, number: int) -> None:
        """Take the batches back that a front door has not answered, for another one."""
        if self._door is None or self._door[0] != number:
            return
        self._door = None
        for queue in dict.fromkeys(batch.queue for batch in self._handed.values()):
            assert queue.backlog.departures is not None
            queue.backlog.departures.take_back()
            self.have_come(queue)
        self._handed.clear()
        self._in_flight = self._in_flight_messages = 0


def _give_up(queue: Queue) -> None:
    """Drop the waiting messages of a queue that has no dead-letter exchange any more."""
    departures = queue.backlog.departures
    assert departures is not None
    while departures.waits:
        _, entries = departures.first(BATCH_MESSAGES)
        departures.hand_over(0, len(entries))
        queue.store.settle(queue.id, departures.take_off(0, []), queue.backlog.durable)
