"""Keep the queues of a shard, by id.

A queue that was declared and not used yet is stored only as its kind, which equal queues share: of
100,000 queues most are unused. It becomes a Queue when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from shardmq.shardd.queues.delay_queue import DelayQueue
from shardmq.shardd.queues.limits import Limits
from shardmq.shardd.queues.queue import Queue
from shardmq.shardd.queues.store import Store


class Kind(NamedTuple):
    """The properties of a queue that was declared and not used yet."""

    store: Store
    limits: Limits
    durable: bool
    auto_delete: bool


class Roster:
    """The queues of a shard. `by_id` has those that were used."""

    def __init__(self) -> None:
        self.by_id: dict[int, Queue] = {}
        self._unused: dict[int, Kind] = {}
        self._kinds: dict[Kind, Kind] = {}

    def __len__(self) -> int:
        return len(self.by_id) + len(self._unused)

    def __contains__(self, id: int) -> bool:
        return id in self.by_id or id in self._unused

    def __getitem__(self, id: int) -> Queue:
        queue = self.get(id)
        if queue is None:
            raise KeyError(id)
        return queue

    def get(self, id: int) -> Queue | None:
        queue = self.by_id.get(id)
        if queue is not None:
            return queue
        if (kind := self._unused.pop(id, None)) is not None:
            # The time since when the queue is unused does not matter: a queue that expires is never
            # stored as a kind.
            queue = self._make(id, kind, 0)
        return queue

    def _make(self, id: int, kind: Kind, now: int) -> Queue:
        make = DelayQueue if kind.limits.delays else Queue
        queue = self.by_id[id] = make(
            id, kind.store, kind.limits, durable=kind.durable, auto_delete=kind.auto_delete, now=now
        )
        return queue

    def named(self, ids: Sequence[int]) -> list[Queue]:
        """Return the queues with these ids that exist."""
        if len(ids) == 1 and (alone := self.by_id.get(ids[0])) is not None:
            return [alone]
        found = list(map(self.by_id.get, ids))
        if None not in found:
            return found  # type: ignore[return-value] # just checked
        return [queue for queue in map(self.get, ids) if queue is not None]

    def put(self, id: int, kind: Kind, now: int) -> Queue | None:
        """Add a queue, or put other limits in force for a queue that is there.

        Return the queue, or None if it is stored as its kind.
        """
        queue = self.by_id.get(id)
        if queue is not None:
            queue.change(kind.limits, now)
        elif kind.limits.expires is not None:
            self._unused.pop(id, None)
            queue = self._make(id, kind, now)
        else:
            self._unused[id] = self._kinds.setdefault(kind, kind)
        return queue

    def adopt(self, queue: Queue) -> None:
        """Add a queue that was made elsewhere."""
        self.by_id[queue.id] = queue

    def pop(self, id: int) -> Queue | None:
        """Remove a queue; return it, or None if it was never used."""
        self._unused.pop(id, None)
        if not self._unused:
            self._kinds.clear()
        return self.by_id.pop(id, None)

    def clear(self) -> None:
        """Forget all queues."""
        self.by_id.clear()
        self._unused.clear()
        self._kinds.clear()

    def used(self) -> Iterator[Queue]:
        return iter(self.by_id.values())

    def used_ids(self) -> list[int]:
        """Return the ids of used queues, as one copy.

        A copy is quick to make: there may be 100,000 queues, and messages wait meanwhile.
        """
        return [*self.by_id]

    def used_among(self, ids: Iterable[int]) -> Iterator[Queue]:
        return (queue for id in ids if (queue := self.by_id.get(id)) is not None)

    def ids(self) -> list[int]:
        return [*self.by_id, *self._unused]

    def lasting(self, store: Store) -> dict[int, Limits]:
        """Return the limits of the durable queues that keep their messages in `store`, by id."""
        found = {
            id: kind.limits
            for id, kind in self._unused.items()
            if kind.store is store and kind.durable
        }
        for id, queue in self.by_id.items():
            if queue.store is store and queue.backlog.durable and queue.keeps_in_store:
                found[id] = queue.backlog.limits
        return found

    def of(self, store: Store) -> list[int]:
        """Return the ids of all queues of `store`."""
        used = [id for id, queue in self.by_id.items() if queue.store is store]
        return used + [id for id, kind in self._unused.items() if kind.store is store]
