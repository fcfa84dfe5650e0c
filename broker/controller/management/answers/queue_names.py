"""All queues of a vhost by name, sorted once for all pages that show them so, until one comes or goes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter

from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.model.policies import HIDDEN_PREFIXES


def shown(vhost: Vhost) -> list[QueuePut]:
    """In no order; those of exchanges and of direct replies are nobody's to see."""
    return [queue for queue in vhost.queues.values() if not queue.name.startswith(HIDDEN_PREFIXES)]


class QueueNames:
    """What is remembered is 8 bytes a queue."""

    def __init__(self) -> None:
        self._sorted: dict[str, tuple[Vhost, int, list[QueuePut]]] = {}

    def of(self, vhost: Vhost, there: Collection[str]) -> Sequence[QueuePut]:
        """Not to be changed. `there`: all vhosts' names, so that those that went are forgotten."""
        known = self._sorted.get(vhost.name)
        if known is None or known[0] is not vhost or known[1] != vhost.queue_changes:
            for name in self._sorted.keys() - set(there):
                del self._sorted[name]
            known = vhost, vhost.queue_changes, sorted(shown(vhost), key=attrgetter("name"))
            self._sorted[vhost.name] = known
        return known[2]
