"""Collect the counters of queues, consumers and peers for the controller."""

from __future__ import annotations

from collections.abc import Iterable

from shardmq.shardd.peers import Peer
from shardmq.shardd.queues import Consumer, Counters, Queue, heads
from shardmq.shardd.wire import messages as m

GONE = ("published", "delivered", "acked", "redelivered", "got", "repeated")


def of_gone(counters: Counters) -> dict[str, float]:
    """Return the counters of deleted queues.

    Totals must not fall when a queue is deleted.
    """
    return {f"gone_{name}": getattr(counters, name) for name in GONE}


def of_peers(peers: Iterable[Peer]) -> dict[str, float]:
    """Return how full the windows of deliveries are, and how many are blocked.

    A blocked window delivers nothing more until the client has read.
    """
    windows = [window for peer in peers for window in peer.windows.values()]
    return {
        "delivery_window_bytes": float(sum(window.full - window.room for window in windows)),
        "delivery_windows_full": float(sum(bool(window.blocked) for window in windows)),
    }


def of_queues(
    queues: Iterable[Queue], now: int
) -> tuple[list[m.QueueStats], list[m.ConsumerStats]]:
    """Return the counters of these queues and their consumers.

    Messages wait meanwhile. `now` is in ms since the epoch.
    """
    found, consumers = [], []
    for queue in queues:
        found.append(of_queue(queue, now))
        if len(queue.consumers):
            consumers += [of_consumer(each) for each in queue.consumers]
    return found, consumers


def of_queue(queue: Queue, now: int) -> m.QueueStats:
    counters, backlog, dispatch = queue.counters, queue.backlog, queue.dispatch
    done = (
        counters.published
        + counters.delivered
        + counters.acked
        + counters.got_empty
        + counters.let_go
    )
    if done != queue.seen_count:
        queue.seen_count, queue.seen_at = done, now
    persistent: tuple[int | None, int | None] = 0, 0
    timestamp = oldest_ms = None
    if not queue.keeps_in_store:  # a stream, whose messages all last
        persistent = backlog.ready_count, backlog.ready_bytes
    elif backlog.ready_count or backlog.unacked_count or backlog.kept_back:
        head = queue.head = heads.look(queue.head, backlog, dispatch, queue)
        timestamp = head.timestamp
        oldest_ms = now - (backlog.store.came_at(heads.oldest(head, backlog)) or now)
        persistent = heads.persistent_in(backlog, dispatch, queue)
    return m.QueueStats(  # by position: keyword arguments would take as long as all the rest
        queue.id,
        backlog.ready_count + queue.delayed_count + backlog.kept_back,
        backlog.unacked_count,
        len(queue.consumers),
        backlog.ready_bytes,
        backlog.unacked_bytes,
        counters.published,
        counters.delivered,
        counters.acked,
        counters.redelivered,
        counters.got,
        counters.repeated,
        counters.delivered_auto,
        counters.got_auto,
        counters.got_empty,
        *persistent,
        timestamp,
        oldest_ms,
        max(queue.seen_at, queue.last_used),
        dispatch.share_at(now) if queue.consumers.all else 0.0,
    )


def of_consumer(consumer: Consumer) -> m.ConsumerStats:
    peer = consumer.peer
    assert isinstance(peer, Peer)
    return m.ConsumerStats(
        queue=consumer.queue.id,
        door=peer.number,
        connection=consumer.connection,
        channel=consumer.channel,
        tag=consumer.tag,
        no_ack=consumer.no_ack,
        exclusive=consumer.exclusive,
        prefetch=consumer.listed_prefetch,
        active=consumer.queue.consumers.active(consumer),
        priority=consumer.priority,
        wants=not consumer.is_busy,
    )
