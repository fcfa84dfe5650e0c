"""Answer requests about single queues and about numbers: get, count, purge, reserve, statistics.

This file knows no socket and no clock.
"""

from __future__ import annotations

from collections.abc import Callable

from shardmq.shardd import stats
from shardmq.shardd.peers import Peer
from shardmq.shardd.queues import Getter, Queue, StreamQueue
from shardmq.shardd.registry import Registry
from shardmq.shardd.serving import Serving
from shardmq.shardd.wire import messages as m


class QueueRequests:
    """The requests about the queues of one shard.

    Each handler answers its peer; `now` is in ms since the epoch. `numbers` returns the numbers of
    the process by name.
    """

    def __init__(
        self, registry: Registry, serving: Serving, numbers: Callable[[], dict[str, float]]
    ) -> None:
        self._registry = registry
        self._queues = registry.queues
        self._streams = registry.streams
        self._catch_up = serving.catch_up
        self._numbers = numbers
        # The ids of the queues whose counters the controller asks for, some at a time.
        self._listed_ids: list[int] = []

    def _changed(self, queue: Queue) -> None:
        """Serve the queue in this pass, and sync its store sooner or later.

        Consumers of other queues may wait for this queue to end its turn.
        """
        self._registry.wake(queue)
        self._registry.store_changed(queue)

    # -- messages ----------------------------------------------------------------------------------

    def on_get(self, peer: Peer, get: m.Get, now: int) -> None:
        queue = self._queues.get(get.queue)
        if queue is None:
            peer.tell(m.Refused(get.request, 404, "gone"))
            return
        self._catch_up(queue, now)
        getter = None
        if not get.no_ack:
            holder = peer.holders.setdefault(
                get.consumer, Getter(peer, get.connection, get.channel)
            )
            assert isinstance(holder, Getter), "a consumer does not get"
            getter = holder
        message, number, redelivered, times = queue.get(getter, now) or (b"", 0, False, 0)
        left = queue.backlog.ready_count
        peer.tell(m.Got(get.request, message, number, redelivered, left, times))
        self._registry.wake(queue)

    def on_dead_letter_up_to(self, peer: Peer, asked: m.DeadLetterUpTo, now: int) -> None:
        queue = self._queues.get(asked.queue)
        if queue is None or not queue.keeps_in_store or queue.backlog.limits.dead_letters is None:
            peer.tell(m.Refused(asked.request, 404, "gone, or without a dead-letter exchange"))
            return
        self._catch_up(queue, now)
        peer.tell(m.Done(asked.request, queue.dead_letter_until(asked.until, asked.reason)))
        self._changed(queue)

    def on_purge(self, peer: Peer, purge: m.Purge, now: int) -> None:
        queue = self._queues.get(purge.queue)
        if queue is None:
            peer.tell(m.Refused(purge.request, 404, "gone"))
            return
        if purge.count is not None and not queue.keeps_in_store:
            peer.tell(m.Refused(purge.request, 404, "a stream"))
            return
        self._catch_up(queue, now)
        if isinstance(queue, StreamQueue):
            self._streams.purge(queue, peer, purge.request)
        elif purge.count is None:
            peer.tell(m.Done(purge.request, queue.purge()))
        else:
            queue.backlog.expire(now)
            peer.tell(m.Done(purge.request, queue.backlog.purge_first(purge.count)))
        self._changed(queue)

    def on_dead_letters_published(
        self, peer: Peer, departed: m.DeadLettersPublished, now: int
    ) -> None:
        queue = self._registry.dead_letters.departed(peer, departed, now)
        if queue is not None:
            self._registry.store_changed(queue)
            if queue.backlog.limits.delays:  # the queue may let more messages go
                self._registry.wake(queue)

    # -- about messages ----------------------------------------------------------------------------

    def on_count(self, peer: Peer, count: m.Count, now: int) -> None:
        queue = self._queues.get(count.queue)
        if queue is None or queue.closed:
            peer.tell(m.Refused(count.request, 404, "gone"))
            return
        self._catch_up(queue, now)
        queue.backlog.expire(now)
        self._registry.wake(queue)
        queue.last_used = now
        messages = queue.backlog.ready_count + queue.backlog.kept_back
        peer.tell(m.Done(count.request, messages, len(queue.consumers)))

    def on_count_unsettled(self, peer: Peer, asked: m.CountUnsettled, now: int) -> None:
        queue = self._queues.get(asked.queue)
        if queue is None:
            peer.tell(m.Refused(asked.request, 404, "gone"))
            return
        until = asked.until or queue.newest()
        peer.tell(m.UnsettledCount(asked.request, until, queue.count_unsettled_until(until)))

    def on_dedup_ask(self, peer: Peer, question: m.DedupAsk, now: int) -> None:
        answer = self._registry.dedup.ask(peer.number, question, now)
        peer.tell(m.DedupVerdicts(question.request, answer))

    def on_dedup_outcome(self, peer: Peer, what: m.DedupOutcome, now: int) -> None:
        self._registry.dedup.became(peer.number, what, self._registry.peers)

    def on_dedup_forget(self, peer: Peer, what: m.DedupForget, now: int) -> None:
        self._registry.dedup.forget(what.thing)

    # -- room for transactions ---------------------------------------------------------------------

    def on_reserve(self, peer: Peer, asked: m.Reserve, now: int) -> None:
        wanted = [
            (queue, sizes)
            for id, sizes in asked.wanted
            if (queue := self._queues.get(id)) is not None
        ]
        for queue, _ in wanted:
            self._catch_up(queue, now)
            queue.backlog.expire(now)
            self._registry.wake(queue)
        if self._registry.reservations.reserve(peer.number, asked.number, wanted):
            peer.tell(m.Done(asked.request))
        else:
            peer.tell(m.Refused(asked.request, 406, "full"))

    def on_redeem(self, peer: Peer, what: m.Redeem, now: int) -> None:
        self._registry.reservations.redeem(peer.number, what.number)

    def on_unreserve(self, peer: Peer, what: m.Unreserve, now: int) -> None:
        self._registry.reservations.end(peer.number, what.number)

    # -- numbers -----------------------------------------------------------------------------------

    def on_stats(self, peer: Peer, asked: m.Stats, now: int) -> None:
        process = self._numbers() if asked.passed == 0 else {}
        wanted, rest = asked.queues, 0
        if wanted is None:
            if asked.passed == 0:
                self._registry.note_time(now)
                self._listed_ids = self._queues.used_ids()
            end = asked.passed + m.STATS_QUEUES_MAX
            wanted = self._listed_ids[asked.passed : end]
            rest = max(0, len(self._listed_ids) - end)
        queues, consumers = stats.of_queues(self._queues.used_among(wanted), now)
        streams, readers = self._streams.stats(wanted), self._streams.reader_stats(wanted)
        reply = asked.request, queues, consumers, process, rest, streams, readers
        peer.tell(m.StatsReply(*reply, self._streams.gaps(wanted)))
