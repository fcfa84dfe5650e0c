"""Give the messages of a queue to its life on another shard, and take such messages in.

The controller (broker/controller/moving) takes letters here, puts them there, and takes the next
ones when these are on stable storage. One batch is under way at a time, so the messages stay in
order. Requests come again when a process has ended, and a message may then come twice. The second
copy is marked as delivered before, or the shard that has the batch already stores nothing.

The records carry what a message has (`store/segments/letters.py`). This file knows no socket and
no clock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

from shardmq.shardd.peers import Peer
from shardmq.shardd.queues import Queue
from shardmq.shardd.queues.entry import ENDLESS, PLACE, REDELIVERED
from shardmq.shardd.queues.state import marked
from shardmq.shardd.queues.store import bytes_of
from shardmq.shardd.registry import Registry
from shardmq.shardd.serving import Serving
from shardmq.shardd.store.format.record import Arrival
from shardmq.shardd.store.segments.letters import times_of
from shardmq.shardd.stores import Store
from shardmq.shardd.syncs import Syncs
from shardmq.shardd.wire import messages as m

# The largest batch. The shard serves nobody while it makes one, or takes one in.
BATCH_MESSAGES: Final = 1024
BATCH_BYTES: Final = 256 << 10


class _Given(NamedTuple):
    """The last batch that a mover has taken: its number, and the place of its last message."""

    mover: int
    number: int
    until: int


class Moves:
    """The queues that leave this shard or come to it.

    Each handler answers its peer; `now` is in ms since the epoch. `no_room` is what a store raises
    when its disk is full.
    """

    def __init__(
        self,
        registry: Registry,
        serving: Serving,
        syncs: Syncs,
        no_room: tuple[type[Exception], ...],
    ) -> None:
        self._registry = registry
        self._queues = registry.queues
        self._catch_up = serving.catch_up
        self._syncs = syncs
        self._no_room = no_room
        self._given: dict[int, _Given] = {}  # by the id of the queue, as is the next
        self._taken: dict[int, tuple[int, int]] = {}  # mover, and number of its last batch

    def _forget_deleted(self) -> None:
        """Forget the queues that are gone; called for each move, of which few are under way."""
        for table in (self._given, self._taken):
            for queue_id in [each for each in table if each not in self._queues]:
                del table[queue_id]

    def on_recall(self, peer: Peer, recall: m.Recall, now: int) -> None:
        queue = self._queues.get(recall.queue)
        if queue is None:
            peer.tell(m.Refused(recall.request, 404, "gone"))
            return
        if queue.keeps_in_store and _store_of(queue).has_producers(queue.id):
            peer.tell(m.Refused(recall.request, 406, "producers"))
            return
        self._catch_up(queue, now)
        if recall.at_once:
            _recall(queue)
            self._registry.wake(queue)
        peer.tell(m.Done(recall.request, queue.backlog.unacked_count))

    def on_take(self, peer: Peer, take: m.TakeLetters, now: int) -> None:
        queue = self._queues.get(take.queue)
        if queue is None or not queue.backlog.limits.leaving:
            peer.tell(m.Refused(take.request, 404, "gone"))
            return
        self._catch_up(queue, now)
        self._end_batch(queue, take)
        backlog = queue.backlog
        entries = backlog.levels[0].peek(BATCH_MESSAGES)
        given = self._given.get(queue.id)
        if given is not None and given[:2] == (take.mover, take.number) and given.until:
            del entries[_count_until(entries, given.until) :]
        records, count = b"", 0
        if entries:
            records, count = _store_of(queue).letters(entries, take.to, BATCH_BYTES)
        del entries[count:]
        until = entries[-1] if entries else 0
        self._given[queue.id] = _Given(take.mover, take.number, until)
        peer.tell(
            m.Letters(
                take.request,
                count,
                records,
                _runs([at for at, entry in enumerate(entries) if entry & REDELIVERED]),
                _times(queue, entries),
                backlog.ready_count - count,
            )
        )

    def _end_batch(self, queue: Queue, take: m.TakeLetters) -> None:
        """Settle the batch before, or mark what may be at the other shard already."""
        given, level = self._given.get(queue.id), queue.backlog.levels[0]
        if given is not None and given.mover == take.mover:
            if given.number == take.number - 1:
                self._settle(queue, given.until)
            return
        if take.number == 1 and not take.goes_on:
            return
        if given is None:
            level.push_many(marked(level.take_all()))
        else:
            count = _count_until(level.peek(BATCH_MESSAGES), given.until)
            head = level.peek(count)
            level.drop(count)
            level.merge(marked(head))

    def _settle(self, queue: Queue, until: int) -> None:
        backlog = queue.backlog
        level = backlog.levels[0]
        head = level.peek(BATCH_MESSAGES)
        del head[_count_until(head, until) :]
        if head:
            backlog.purge_first(len(head))
            self._registry.store_changed(queue)

    def on_ask(self, peer: Peer, asked: m.AskLetters, now: int) -> None:
        if self._queues.get(asked.queue) is None:
            peer.tell(m.Refused(asked.request, 404, "gone"))
        else:
            peer.tell(m.LastLetters(asked.request, *self._taken.get(asked.queue, (0, 0))))

    def on_put(self, peer: Peer, put: m.PutLetters, now: int) -> None:
        queue = self._queues.get(put.queue)
        if queue is None or not queue.keeps_in_store:
            peer.tell(m.Refused(put.request, 404, "gone"))
            return
        last = self._taken.get(queue.id)
        if put.records and last != (put.mover, put.number):
            try:
                self._take_in(queue, put, last == (put.mover, put.number - 1), now)
            except self._no_room:
                self._registry.set_alarm(m.LOW_ON_DISK)
                peer.tell(m.Refused(put.request, m.NO_ROOM, "no room"))
                return
        if put.number == 0:
            self._forget_deleted()
        self._taken[queue.id] = (put.mover, put.number)
        self._syncs.then(partial(peer.tell, m.Done(put.request)))

    def _take_in(self, queue: Queue, put: m.PutLetters, is_known: bool, now: int) -> None:
        """Append messages. Behind an unknown batch, they may be there already and are marked."""
        store = _store_of(queue)
        (arrival,) = store.append(put.records)
        entries = arrival.entries
        if not is_known:
            entries = marked(entries)
        for first, last in put.marked:
            entries[first : last + 1] = marked(entries[first : last + 1])
        if put.times:
            ordinals = [ordinal for ordinal, _ in put.times]
            store.set_returns(
                queue.id,
                array("Q", [entries[ordinal] for ordinal in ordinals]),
                [times for _, times in put.times],
            )
        queue.restore(
            Arrival(
                queue.id,
                entries,
                arrival.body_bytes,
                arrival.facts,
                None,
                times_of(put.records),
                arrival.marks,
                arrival.kinds,
            ),
            now,
        )
        self._registry.dirty_stores.add(store)
        self._registry.wake(queue)


def _store_of(queue: Queue) -> Store:
    return queue.store  # type: ignore[return-value] # queues were made with our Store


def _recall(queue: Queue) -> None:
    """Make all messages ready again that are handed out or rest, without counting the return.

    A late ack of such a message is no error.
    """
    backlog = queue.backlog
    if backlog.resting is not None:
        entries, size = backlog.resting.take_all()
        backlog.resting = None
        backlog.taken_back(len(entries), size)
        backlog.put_back(array("Q", sorted(entries)), size)
    taken = array("Q", sorted(chain(*queue.dispatch.take_until(queue, ENDLESS - 1))))
    if taken:
        backlog.put_back(marked(taken), bytes_of(queue.store, taken))


def _count_until(head: array[int], until: int) -> int:
    return bisect_right(head, until | ~PLACE)


def _times(queue: Queue, entries: array[int]) -> list[tuple[int, int]]:
    """Return how often messages came back, with their ordinals, if the queue counts that."""
    if not queue.backlog.rules.counts_returns:
        return []
    times = map(queue.dispatch.times_returned, entries)
    return [(at, count) for at, count in enumerate(times) if count]


def _runs(ordinals: Sequence[int]) -> list[tuple[int, int]]:
    """Return first and last of each run of neighbours."""
    found: list[tuple[int, int]] = []
    for ordinal in ordinals:
        if found and found[-1][1] + 1 == ordinal:
            found[-1] = (found[-1][0], ordinal)
        else:
            found.append((ordinal, ordinal))
    return found
