"""Find messages that were held for too long, for queues with a consumer timeout.

The argument of such a queue is `x-consumer-timeout`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from shardmq.shardd.queues.consumers import Consumer
from shardmq.shardd.queues.handed import Handed
from shardmq.shardd.queues.unacked import Getter


def handed(consumer: Consumer, now: int, timeout: int) -> Handed:
    """Return the stamps of a consumer, brought up to date."""
    if consumer.handed is None:
        consumer.handed = Handed()
    if not consumer.no_ack:
        consumer.handed.note(consumer.unacked.next_number, now, timeout)
        consumer.handed.forget_before(consumer.unacked.first_number)
    return consumer.handed


def taken_from(
    holder: Consumer | Getter, queue: object, now: int, timeout: int
) -> tuple[array[int], int]:
    """Take the messages of a queue that a holder has held for longer than `timeout`.

    Return their entries and the sum of their sizes.
    """
    if isinstance(holder, Getter):
        return holder.take_overdue(queue, now - timeout)
    return holder.unacked.settle(1, handed(holder, now, timeout).overdue(now, timeout) - 1)


def is_late(holder: Consumer | Getter, queue: object, now: int, timeout: int) -> bool:
    """Return whether a holder has held a message of the queue for longer than `timeout`."""
    if isinstance(holder, Getter):
        since = holder.since(queue)
        return since is not None and since <= now - timeout
    return (
        not holder.no_ack
        and handed(holder, now, timeout).overdue(now, timeout) > holder.unacked.first_number
    )


def due_at(holders: Iterable[Consumer | Getter], queue: object, timeout: int) -> int | None:
    """Return when the first holder will have held a message of the queue for too long.

    Holders that were told so already do not count. Return None if no holder holds a message.
    """
    found: list[int] = []
    for holder in holders:
        if holder.told_late:
            continue
        if isinstance(holder, Getter):
            since = holder.since(queue)
            due = None if since is None else since + timeout
        else:
            due = (
                holder.handed.due(timeout)
                if holder.handed is not None and holder.unacked.count
                else None
            )
        if due is not None:
            found.append(due)
    return min(found, default=None)
