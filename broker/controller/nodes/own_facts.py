"""The facts of a node that does not lead: for the leader, and for its own checks."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.disk_watch import DiskWatch
from shardmq.broker.controller.memory import MemoryWatch, pids, status_stamp
from shardmq.broker.controller.node_facts import ETCD_HEARD_EACH_S, NodeFacts, facts_of


class OwnFacts:
    """Watches the memory and the disk of this node.

    config: returns the settings as of the last reload.
    etcd_silent_s: returns for how many seconds etcd has not answered.
    """

    def __init__(
        self, config: Callable[[], ControllerConfig], etcd_silent_s: Callable[[], float]
    ) -> None:
        self._config = config
        self._etcd_silent_s = etcd_silent_s
        self._memory = MemoryWatch()
        self._disk = DiskWatch(config().data_dir)
        self._disk.look()

    def news(self) -> Hashable:
        """Look at what must be told soon; return something else if there is news."""
        config = self._config()
        self._memory.look(
            pids(config.runtime_dir),
            config.memory_high_watermark,
            config.memory_high_watermark_bytes,
        )
        late_s = int(max(0.0, self._etcd_silent_s() - ETCD_HEARD_EACH_S))
        return self._memory.alarm, status_stamp(config.runtime_dir), late_s

    def now(self) -> NodeFacts:
        self._disk.look()
        return facts_of(self._config(), self._memory, self._etcd_silent_s(), self._disk.free_bytes)
