"""Serve the queues that may have something to hand out: deliveries, timers, dead letters.

Deliveries are put together in the writers of the peers that they go to. This file knows no socket
and no clock.
"""

from __future__ import annotations

import heapq

from shardmq.shardd.holding import BEHIND_BYTES, BEHIND_MESSAGES, Holding
from shardmq.shardd.lending import LentMessages
from shardmq.shardd.peers import Peer
from shardmq.shardd.queues import Allotment, Consumer, Queue
from shardmq.shardd.registry import Registry
from shardmq.shardd.short_way import ShortWay
from shardmq.shardd.wire import messages as m

# The bytes that one queue hands out before the next queue, and that all queues hand out before
# messages are received again.
QUEUE_PASS_BYTES = 256 << 10
DELIVERY_TURN_BYTES = 1 << 20
# The timers handled in one pass.
TIMERS_PER_TURN = 1000


class Serving:
    """The outlet of all queues of one shard (`queues.Outlet`).

    It also decides which queue is served next.
    """

    def __init__(self, registry: Registry, short_way: ShortWay, holding: Holding) -> None:
        self._registry = registry
        self._short_way = short_way
        self._dirty = registry.dirty
        self._timer_of = registry.timer_of
        self._timers = registry.timers
        self._given = 0  # bytes handed out in this pass
        self.holding = holding

    @property
    def next_due(self) -> int | None:
        """Return when the first timer is due, or held publishers are, in ms since the epoch."""
        due = self._timers[0][0] if self._timers else None
        held = self.holding.next_due
        return due if held is None else held if due is None else min(due, held)

    def turn(self, now: int) -> None:
        """Serve queues until enough is handed out, or until none has more."""
        if self._timers and self._timers[0][0] <= now:
            self._look_at_timers(now)
        if self._dirty:
            self._serve(now)

    def catch_up(self, queue: Queue, now: int) -> None:
        """Hand out the ready messages of a queue to the consumers that are attached.

        A request that attaches, detaches or counts then finds the queue as if each message had been
        handed out when it arrived, though one pass takes in several requests. The windows of the
        consumers bound the work.
        """
        if queue in self._dirty and queue.keeps_in_store:
            while queue.deliver(now, self, QUEUE_PASS_BYTES):
                pass
            for peer in self._registry.peers.values():
                peer.writer.own()  # messages may be appended before the end of this pass

    def _serve(self, now: int) -> None:
        dirty = self._dirty
        self._given = before = self._short_way.given
        while dirty and before < DELIVERY_TURN_BYTES:
            before = self._given = self._short_way.serve(before)
            if not dirty or before >= DELIVERY_TURN_BYTES:
                break
            queue = next(iter(dirty))
            del dirty[queue]
            if queue.deleted:
                continue
            if queue.deliver(now, self, QUEUE_PASS_BYTES):
                dirty[queue] = None
                if self._given == before:  # to drop messages takes time, too
                    self._given += QUEUE_PASS_BYTES
            backlog = queue.backlog
            if backlog.is_watched:
                self._watch(queue, now)
            if backlog.ready_count > BEHIND_MESSAGES or backlog.ready_bytes > BEHIND_BYTES:
                self.holding.look(queue, now)
            due = queue.next_due()
            if due is not None and due < self._timer_of.get(queue.id, due + 1):
                self._timer_of[queue.id] = due
                heapq.heappush(self._timers, (due, queue.id))
            before = self._given

    def _watch(self, queue: Queue, now: int) -> None:
        """Requeue messages of consumers that are too slow, and note new dead letters."""
        for late in queue.late(now):
            timeout = queue.backlog.limits.consumer_timeout
            assert isinstance(late.peer, Peer) and timeout is not None
            late.peer.tell(m.AckTimeout(late.connection, late.channel, timeout))
        if queue.take_overdue(now):
            self._dirty[queue] = None
            self._registry.store_changed(queue)
        if queue.backlog.departures is not None and queue.backlog.departures.waits:
            self._registry.have_died(queue)

    # -- timers ------------------------------------------------------------------------------------

    def _look_at_timers(self, now: int) -> None:
        for _ in range(TIMERS_PER_TURN):
            if not self._timers or self._timers[0][0] > now:
                return
            due, queue_id = heapq.heappop(self._timers)
            if self._timer_of.get(queue_id) != due:
                continue  # an earlier timer was set meanwhile, or the queue is gone
            del self._timer_of[queue_id]
            queue = self._registry.queues[queue_id]
            self._dirty[queue] = None  # old messages expire when the queue is served
            if queue.expired_itself(now):
                queue.closed = True
                self._registry.tell_controller(m.AutoDeleted(queue_id, "expired"))

    # -- queues.Outlet -----------------------------------------------------------------------------

    def deliver(
        self,
        consumer: Consumer,
        first_number: int,
        redelivered: bool,
        count: int,
        blob: bytes | memoryview | LentMessages,
        times: int = 0,
    ) -> None:
        """Send messages to the peer of the consumer at the end of the pass.

        They came back `times` times, 0 if their queue does not count that.
        """
        peer: Peer = consumer.peer  # type: ignore[assignment] # a Peer attached each consumer
        self._given += len(blob)
        peer.has_news = True
        connection, channel, number = consumer.connection, consumer.channel, consumer.number
        hides, weight, lent = consumer.queue.backlog.hides, 0, False
        if isinstance(blob, LentMessages):
            weight = len(blob)
            blob, lent = blob.seen_by(peer.lender)
        peer.writer.add(
            connection,
            channel,
            number,
            first_number,
            redelivered,
            count,
            blob,
            times,
            hides,
            weight,
            lent,
        )

    def deliver_again(
        self,
        consumer: Consumer,
        first_number: int,
        times: int,
        count: int,
        blob: bytes | memoryview | LentMessages,
    ) -> None:
        """Send messages that came back `times` times."""
        self.deliver(consumer, first_number, True, count, blob, times)

    def report(self, allotment: Allotment) -> None:
        assert isinstance(allotment.peer, Peer)
        allotment.peer.tell(m.CreditReport(*allotment.report), after_deliveries=True)

    def passed(self, consumer: Consumer, offset: int) -> None:
        assert isinstance(consumer.peer, Peer)
        consumer.peer.tell(m.MarkReached(consumer.number, offset), after_deliveries=True)
