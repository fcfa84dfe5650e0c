"""Decides which queues move so that the shards have about as many queues as each other.

Nothing here waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
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


def spread(
    queues: Collection[QueuePut],
    shards: Collection[int],
    suiting: Callable[[QueuePut], tuple[int, ...]],
) -> list[Planned]:
    """Return the fewest moves that bring queues to shards that suit them, and even these out.

    suiting: returns the shards that suit a queue. If it does not return the same for two queues, it
        returns nothing that is common to both.
    """
    there: dict[int, list[QueuePut]] = {shard: [] for shard in shards}
    coming: dict[tuple[int, ...], list[QueuePut]] = {}
    kinds: dict[int, tuple[int, ...]] = {}
    for queue in queues:
        if queue.shard not in there:
            continue
        suits = suiting(queue)
        kinds.update(dict.fromkeys(suits, suits))
        if queue.shard in suits or why_it_stays(queue):
            there[queue.shard].append(queue)
        else:
            coming.setdefault(suits, []).append(queue)
    return [
        planned
        for kind in dict.fromkeys(kinds[shard] for shard in sorted(kinds))
        for planned in evened_out(
            [queue for shard in kind for queue in there[shard]], kind, coming.get(kind, ())
        )
    ]


def evened_out(
    queues: Collection[QueuePut], shards: Collection[int], coming: Iterable[QueuePut] = ()
) -> list[Planned]:
    """Return the fewest moves after which the numbers of queues differ by one at most.

    Queues that cannot be moved count, and stay; where there are too many of them, the numbers
    differ more. Shards that are not among `shards` are left alone.

    coming: queues that lie on none of the shards, and are moved to them.
    """
    counts = counts_of(queues, shards)
    if not counts:
        return []
    found: list[Planned] = []
    for queue in sorted(coming, key=lambda queue: (queue.vhost, queue.name)):
        to = emptiest(counts)
        counts[to] += 1
        found.append(Planned(queue, to))
    least, more = divmod(sum(counts.values()), len(counts))
    # The shards that have most now may have one more, so that the fewest queues move.
    ordered = sorted(counts, key=lambda shard: (-counts[shard], shard))
    wanted = {shard: least + (at < more) for at, shard in enumerate(ordered)}
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
