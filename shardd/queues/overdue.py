"""Who has held what for too long, for queues that do not wait for ever (x-consumer-timeout)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from shardmq.shardd.queues.consumers import Consumer
from shardmq.shardd.queues.handed import Handed
from shardmq.shardd.queues.unacked import Getter


def handed(consumer: Consumer, now: int, timeout: int) -> Handed:
    """With what it has been given by now."""
    if consumer.handed is None:
        consumer.handed = Handed()
    if not consumer.no_ack:
        consumer.handed.note(consumer.unacked.next_number, now, timeout)
        consumer.handed.forget_before(consumer.unacked.first_number)
    return consumer.handed


def taken_from(
    holder: Consumer | Getter, queue: object, now: int, timeout: int
) -> tuple[array[int], int]:
    """What it has held of that queue for longer than that, and the sum of its sizes."""
    if isinstance(holder, Getter):
        return holder.take_overdue(queue, now - timeout)
    return holder.unacked.settle(1, handed(holder, now, timeout).overdue(now, timeout) - 1)


def is_late(holder: Consumer | Getter, queue: object, now: int, timeout: int) -> bool:
    """Whether it has held something of that queue for longer than that."""
    if isinstance(holder, Getter):
        since = holder.since(queue)
        return since is not None and since <= now - timeout
    return (
        not holder.no_ack
        and handed(holder, now, timeout).overdue(now, timeout) > holder.unacked.first_number
    )


def due_at(holders: Iterable[Consumer | Getter], queue: object, timeout: int) -> int | None:
    """When the first of them will have held something for too long, but for those who were told so."""
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
