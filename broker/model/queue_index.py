"""All queues of all vhosts, found by what the vhosts do not find them by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from shardmq.broker.model.changes import QueuePut

ARGUMENTS_SHARED_MAX = 1_000  # different arguments of queues that are kept to be shared

NOTHING_SAID: Final[dict[str, Any]] = {}  # arguments of most things; never changed


class QueueIndex:
    """Queues by id, by the connection that owns them, and counted by shard."""

    def __init__(self) -> None:
        self._by_id: dict[int, QueuePut] = {}
        self._by_owner: dict[str, dict[int, QueuePut]] = {}
        self._on: Counter[int] = Counter()  # how many, by shard
        self._moving: dict[int, QueuePut] = {}  # those that move to another shard, by id
        # By their representation, which tells types apart.
        self._arguments: dict[str, dict[str, Any]] = {}

    def get(self, id: int) -> QueuePut | None:
        return self._by_id.get(id)

    def all(self) -> Iterable[QueuePut]:
        return self._by_id.values()

    def count_on(self, shard: int) -> int:
        """Count the queues on a shard, those of exchanges among them."""
        return self._on[shard]

    @property
    def has_moving(self) -> bool:
        """Return whether some queue moves to another shard."""
        return bool(self._moving)

    def moving(self) -> list[QueuePut]:
        """Return the queues that move to another shard."""
        return list(self._moving.values())

    def of(self, owner: str) -> list[QueuePut]:
        """Return the exclusive queues of one connection."""
        return list(self._by_owner.get(owner, {}).values())

    def owners(self) -> list[str]:
        """Return the connections that have exclusive queues."""
        return list(self._by_owner)

    def add(self, put: QueuePut) -> None:
        self._by_id[put.id] = put
        self._on[put.shard] += 1
        if put.moving is not None:
            self._moving[put.id] = put
        if put.owner:
            self._by_owner.setdefault(put.owner, {})[put.id] = put

    def remove(self, queue: QueuePut) -> None:
        if self._by_id.get(queue.id) is queue:
            del self._by_id[queue.id]
            self._on[queue.shard] -= 1
            self._moving.pop(queue.id, None)
        owned = self._by_owner.get(queue.owner)
        if owned is not None:
            owned.pop(queue.id, None)
            if not owned:
                del self._by_owner[queue.owner]

    def lean(self, put: QueuePut, vhost: str) -> QueuePut:
        """Return an equal record that shares its vhost's name and its arguments with others.

        There may be 100,000 queues, each read from a socket with strings of its own. Arguments are
        never changed in place, so that they can be shared.
        """
        arguments = put.arguments or NOTHING_SAID
        if arguments:
            if len(self._arguments) >= ARGUMENTS_SHARED_MAX:
                self._arguments.clear()
            arguments = self._arguments.setdefault(repr(arguments), arguments)
        return msgspec.structs.replace(put, vhost=vhost, arguments=arguments)
