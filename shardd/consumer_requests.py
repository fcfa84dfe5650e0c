"""Answer requests about consumers: attach, settle, credit, detach and release.

This file knows no socket and no clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from shardmq.shardd.peers import Peer
from shardmq.shardd.queues import Allotment, Consumer, LogOrder, Queue, Reader, StreamQueue
from shardmq.shardd.registry import Registry
from shardmq.shardd.serving import Serving
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as m


class ConsumerRequests:
    """The consumers and gets of one shard.

    Each handler takes a message of a peer, and `now` in ms since the epoch.
    """

    def __init__(self, registry: Registry, serving: Serving) -> None:
        self._registry = registry
        self._serving = serving
        self._queues = registry.queues
        self._streams = registry.streams
        self._dirty = registry.dirty

    # -- settle ------------------------------------------------------------------------------------

    def on_settle(self, peer: Peer, message: envelope.Message, now: int) -> None:
        for number, kind, first, last in envelope.read_settles(message):
            holder = peer.holders.get(number)
            if kind == m.ALLOT:
                self.allot(peer, number, first, last, now)
            elif isinstance(holder, Consumer):
                entries, size = holder.unacked.settle(first, last)
                if isinstance(holder, Reader):
                    self._streams.settle(holder, kind, entries, size)
                    self._dirty[holder.queue] = None
                elif entries:
                    self._settle(holder.queue, kind, entries, size)
                self._forget_if_done(peer, holder)
            elif holder is not None:
                for queue, entries, size in holder.settle(first, last):
                    self._settle(queue, kind, entries, size)

    def on_credit(self, peer: Peer, message: envelope.Message, now: int) -> None:
        for connection, count in envelope.read_credit(message):
            window = peer.windows.get(connection)
            if window is None:
                continue
            window.free(count)
            for queue in window.unblocked():
                self._dirty[queue] = None

    def _settle(self, queue: Queue, kind: int, entries: array[int], size: int) -> None:
        if kind == m.ACK:
            queue.ack(entries, size)
        else:
            (queue.reject, queue.requeue, queue.give_back)[kind - 1](entries, size)
        self._registry.store_changed(queue)
        # Acks make no room for the consumer of a group consumer: that waits for an ALLOT.
        if kind != m.ACK or queue.dispatch.order is None:
            self._dirty[queue] = None

    def _forget_if_done(self, peer: Peer, consumer: Consumer) -> None:
        if consumer.detached and not consumer.unacked.count:
            consumer.queue.dispatch.let_holder_go(consumer)
            peer.holders.pop(consumer.number, None)
            peer.forget_window(consumer.connection)

    # -- come and go -------------------------------------------------------------------------------

    def on_attach(self, peer: Peer, attach: m.Attach, now: int) -> None:
        queue = self._queues.get(attach.queue)
        if queue is None or queue.closed or isinstance(queue, StreamQueue):
            peer.tell(m.Refused(attach.request, 404, "gone"))
            return
        self._serving.catch_up(queue, now)
        if not attach.resumed and queue.consumers.refuses(attach.exclusive):
            peer.tell(m.Refused(attach.request, 403, "exclusive use"))
            return
        allotment = self._allotment(peer, attach)
        consumer = Consumer(
            queue,
            peer,
            attach.consumer,
            peer.window(attach.connection),
            connection=attach.connection,
            channel=attach.channel,
            tag=attach.tag,
            no_ack=attach.no_ack,
            exclusive=attach.exclusive,
            priority=attach.priority,
            prefetch=0
            if allotment is not None and allotment.order is not None
            else attach.prefetch,
            allotment=allotment,
            affinity=attach.affinity,
        )
        queue.attach(consumer)
        peer.holders[attach.consumer] = consumer
        if queue.auto_delete and queue.id not in self._registry.used:
            self._registry.used.add(queue.id)
            self._registry.tell_controller(m.FirstConsumer(queue.id))
        if queue.id in self._registry.expected:
            self._came_back(queue.id, peer.number)
        peer.tell(m.Attached(attach.request))
        self._dirty[queue] = None

    def on_attach_reader(self, peer: Peer, attach: m.AttachReader, now: int) -> None:
        queue = self._queues.get(attach.queue)
        if queue is None or queue.closed or not isinstance(queue, StreamQueue):
            peer.tell(m.Refused(attach.request, 404, "gone"))
            return
        try:
            reader = self._streams.attach(queue, peer, attach, self._allotment(peer, attach), now)
        except ValueError as error:
            peer.tell(m.Refused(attach.request, 406, str(error)))
            return
        peer.holders[attach.consumer] = reader
        peer.tell(m.AttachedAt(attach.request, reader.offset))
        self._dirty[queue] = None

    def on_set_bounds(self, peer: Peer, bound: m.SetBounds, now: int) -> None:
        reader = peer.holders.get(bound.consumer)
        if isinstance(reader, Reader):
            reader.bound(bound.stop, bound.mark)
            self._dirty[reader.queue] = None

    def on_detach(self, peer: Peer, detach: m.Detach, now: int) -> None:
        consumer = peer.holders.get(detach.consumer)
        closed = []
        if isinstance(consumer, Consumer):
            self._serving.catch_up(consumer.queue, now)
            self._detach(consumer, now)
            self._forget_if_done(peer, consumer)
            closed = [consumer.queue.id] if consumer.queue.closed else []
        peer.tell(m.Done(detach.request, closed=closed), after_deliveries=True)

    def _detach(self, consumer: Consumer, now: int) -> None:
        queue = consumer.queue
        was_closed = queue.closed
        queue.detach(consumer, now, more_come=queue.id in self._registry.expected)
        self._dirty[queue] = None
        if queue.closed and not was_closed:
            self._registry.tell_controller(m.AutoDeleted(queue.id, "auto-delete"))

    def on_release(self, peer: Peer, release: m.Release, now: int) -> None:
        closed = self.release(peer, release.consumers, now)
        peer.tell(m.Done(release.request, closed=closed))

    def release(self, peer: Peer, numbers: Sequence[int], now: int) -> list[int]:
        """Remove consumers and gets for good; return the ids of queues that close with them.

        The messages of one of them are not handed to another of them, because they would come back
        at once.
        """
        closed: dict[int, None] = {}
        for number in numbers:
            holder = peer.holders.pop(number, None)
            if isinstance(holder, Consumer):
                if peer.number == m.CONTROLLER:  # it visits when all front doors have come back
                    self._registry.expected.pop(holder.queue.id, None)
                self._detach(holder, now)
                holder.queue.release(holder, now)
                if holder.queue.closed:
                    closed[holder.queue.id] = None
                self._registry.store_changed(holder.queue)
                peer.forget_window(holder.connection)
            elif holder is not None:
                for queue, entries, size in holder.take_all():
                    self._settle(queue, m.REQUEUE, entries, size)
        return list(closed)

    # -- front doors that may come back ------------------------------------------------------------

    def expect(self, peer: Peer) -> None:
        """Keep the auto-delete queues of a front door's consumers until it is back or gone.

        The session of the front door has ended. The caller releases the consumers.
        """
        for holder in peer.holders.values():
            if isinstance(holder, Consumer) and holder.queue.auto_delete and not holder.detached:
                doors = self._registry.expected.setdefault(holder.queue.id, {})
                doors[peer.number] = peer.process

    def expect_no_more(self, door: int, process: int) -> None:
        """Let the auto-delete queues go that only this process of a front door was expected for."""
        for queue_id, doors in list(self._registry.expected.items()):
            if doors.get(door) != process:
                continue
            self._came_back(queue_id, door)
            queue = self._queues[queue_id]
            if queue_id not in self._registry.expected and not (queue.closed or queue.consumers):
                queue.closed = True
                self._registry.tell_controller(m.AutoDeleted(queue_id, "auto-delete"))

    def _came_back(self, queue_id: int, door: int) -> None:
        doors = self._registry.expected[queue_id]
        doors.pop(door, None)
        if not doors:
            del self._registry.expected[queue_id]

    # -- allotments --------------------------------------------------------------------------------

    def _allotment(self, peer: Peer, attach: m.Attach) -> Allotment | None:
        """Return the allotment of a new consumer, None if no shared limit holds for it."""
        group = attach.group if isinstance(attach, m.AttachPart | m.AttachStreamPart) else 0
        if not group:
            return Allotment(attach.consumer, peer) if attach.limited else None
        found = peer.allotments.get(group)
        if found is None:
            order = LogOrder(self._registry.wake)
            found = peer.allotments[group] = Allotment(
                group, peer, order, attach.limited, prefetch=attach.prefetch
            )
        return found

    def allot(self, peer: Peer, number: int, allowed: int, mode: int, now: int) -> None:
        """Take the credit of an allotment: of a consumer, or of a group consumer."""
        if mode == m.CLOSE:
            peer.allotments.pop(number, None)
            return
        holder = peer.holders.get(number)
        allotment = peer.allotments.get(number)
        if isinstance(holder, Consumer) and not holder.detached:
            if mode == m.STOP:
                self._serving.catch_up(holder.queue, now)
            allotment = holder.allotment
            if allotment is None:  # the first limit of its channel
                allotment = holder.allotment = Allotment(number, peer, used=holder.delivered)
                holder.queue.consumers.has_allotments = True
            self._dirty[holder.queue] = None
        if allotment is None:
            return
        if mode == m.STOP:
            allotment.stop(allowed)
            self._serving.report(allotment)
        elif allotment.allow(None if allowed == m.UNLIMITED else allowed, mode == m.DRAIN):
            self._serving.report(allotment)
        if allotment.order is not None:
            allotment.order.go_on(now)
