"""Answer requests about consumers: attach, settle, credit, grant, detach and release.

This file knows no socket and no clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from shardmq.shardd.peers import Peer
from shardmq.shardd.queues import Consumer, Getter, Queue, Reader, StreamQueue
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
            if kind > m.RETURN:
                self.on_turn(holder, kind, first, now, last)
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
        if (
            kind != m.ACK or queue.dispatch.loan is None or not queue.consumers.all[0].lent
        ):  # else the loan wakes the next queue
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
        loan = None
        if isinstance(attach, m.AttachPart):
            loan = peer.loan(attach.whole, self._registry.wake)
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
            prefetch=attach.prefetch,
            limited=attach.granted,
            lent=attach.lent,
            loan=loan,
            affinity=attach.affinity,
        )
        queue.attach(consumer)
        peer.holders[attach.consumer] = consumer
        if queue.auto_delete and queue.id not in self._registry.used:
            self._registry.used.add(queue.id)
            self._registry.tell_controller(m.FirstConsumer(queue.id))
        peer.tell(m.Attached(attach.request))
        self._dirty[queue] = None

    def on_attach_reader(self, peer: Peer, attach: m.AttachReader, now: int) -> None:
        queue = self._queues.get(attach.queue)
        if queue is None or queue.closed or not isinstance(queue, StreamQueue):
            peer.tell(m.Refused(attach.request, 404, "gone"))
            return
        loan = None
        if isinstance(attach, m.AttachStreamPart):
            loan = peer.loan(attach.whole, self._registry.wake)
        try:
            reader = self._streams.attach(queue, peer, attach, loan, now)
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
        queue.detach(consumer, now)
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

    # -- room --------------------------------------------------------------------------------------

    def on_grant(self, peer: Peer, grant: m.Grant, now: int) -> None:
        consumer = peer.holders.get(grant.consumer)
        if isinstance(consumer, Consumer) and not consumer.detached:
            consumer.grant(grant.count)
            self._dirty[consumer.queue] = None

    def on_tune(self, peer: Peer, tune: m.Tune, now: int) -> None:
        consumer = peer.holders.get(tune.consumer)
        if isinstance(consumer, Consumer) and not consumer.detached:
            self._serving.catch_up(consumer.queue, now)
            consumer.tune(tune.prefetch, tune.granted, tune.lent)
            self._dirty[consumer.queue] = None

    @staticmethod
    def on_turn(holder: Consumer | Getter | None, kind: int, count: int, now: int, ms: int) -> None:
        """Raise or lower the prefetch that a consumer was lent.

        The SETTLE kind LENT also begins the turn of this shard in the credit rotation.
        """
        if isinstance(holder, Consumer) and holder.lent and holder.loan is not None:
            if kind == m.LENT:
                holder.loan.begin_turn_of_shard(holder, count, now, ms)
            elif kind == m.LOWERED:
                holder.loan.lower(holder, count)

    def on_recall(self, peer: Peer, recall: m.Recall, now: int) -> None:
        consumer = peer.holders.get(recall.consumer)
        if isinstance(consumer, Consumer) and consumer.lent and consumer.loan is not None:
            consumer.loan.recall(consumer, recall.keep)
            self._dirty[consumer.queue] = None
