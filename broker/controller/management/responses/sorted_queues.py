"""The visible queues of each vhost by name, sorted once and kept until a queue comes or goes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter

from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.model.policies import HIDDEN_PREFIXES


class SortedQueues:
    """The sorted lists that pages of queues are cut from. They take 8 bytes a queue."""

    def __init__(self) -> None:
        self._sorted: dict[str, tuple[Vhost, int, list[QueuePut]]] = {}

    def of(self, vhost: Vhost, vhost_names: Collection[str]) -> Sequence[QueuePut]:
        """Return the queues of a vhost by name, without those that only exchanges use.

        The caller must not change the list. `vhost_names`: the names of all vhosts; lists of other
        vhosts are dropped.
        """
        known = self._sorted.get(vhost.name)
        if known is None or known[0] is not vhost or known[1] != vhost.queue_changes:
            for name in self._sorted.keys() - set(vhost_names):
                del self._sorted[name]
            visible = [
                queue
                for queue in vhost.queues.values()
                if not queue.name.startswith(HIDDEN_PREFIXES)
            ]
            known = vhost, vhost.queue_changes, sorted(visible, key=attrgetter("name"))
            self._sorted[vhost.name] = known
        return known[2]
