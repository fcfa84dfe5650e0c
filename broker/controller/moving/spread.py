"""Decides which queues move so that the shards have about as many queues as each other.

Nothing here waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from shardmq.broker.controller.decisions.moves import unfit
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.routing import hidden


class Planned(NamedTuple):
    """A queue that is to move to a shard."""

    queue: QueuePut
    to: int


def why_it_stays(queue: QueuePut) -> str:
    """Return why a queue cannot be moved, "" if it can."""
    if hidden.is_of_exchange(queue.name):
        return "an exchange keeps messages in it"
    return unfit(queue)


def counts_of(queues: Iterable[QueuePut], shards: Collection[int]) -> dict[int, int]:
    """Return how many queues each of these shards has."""
    counts = dict.fromkeys(shards, 0)
    for queue in queues:
        if queue.shard in counts:
            counts[queue.shard] += 1
    return counts


def emptiest(counts: dict[int, int]) -> int:
    return min(counts, key=lambda shard: (counts[shard], shard))


def evened_out(queues: Collection[QueuePut], shards: Collection[int]) -> list[Planned]:
    """Return the fewest moves after which the numbers of queues differ by one at most.

    Queues that cannot be moved count, and stay; where there are too many of them, the numbers
    differ more. Shards that are not among `shards` are left alone.
    """
    counts = counts_of(queues, shards)
    if not counts:
        return []
    least, more = divmod(sum(counts.values()), len(counts))
    # The shards that have most now may have one more, so that the fewest queues move.
    ordered = sorted(counts, key=lambda shard: (-counts[shard], shard))
    wanted = {shard: least + (at < more) for at, shard in enumerate(ordered)}
    found: list[Planned] = []
    for queue in sorted(queues, key=lambda queue: (queue.vhost, queue.name)):
        shard = queue.shard
        if counts.get(shard, 0) <= wanted.get(shard, 0) or why_it_stays(queue):
            continue
        short = {each: counts[each] - wanted[each] for each in counts}
        to = emptiest(short)
        if short[to] >= 0:
            break
        counts[shard] -= 1
        counts[to] += 1
        found.append(Planned(queue, to))
    return found
