"""What is told of queues and consumers to whoever lists them."""

from __future__ import annotations

from shardd.peers import Peer
from shardd.queues import Consumer, Queue
from shardd.wire import messages as m


def of_queue(queue: Queue) -> m.QueueStats:
    counters = queue.counters
    return m.QueueStats(
        id=queue.id,
        ready=queue.ready_count + queue.delayed_count + queue.kept_back,
        unacked=queue.unacked_count,
        consumers=len(queue.consumers),
        ready_bytes=queue.ready_bytes,
        unacked_bytes=queue.unacked_bytes,
        published=counters.published,
        delivered=counters.delivered,
        acked=counters.acked,
        redelivered=counters.redelivered,
        got=counters.got,
        repeated=counters.repeated,
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
        prefetch=consumer.prefetch,
        active=consumer.queue.consumers.active(consumer),
    )
