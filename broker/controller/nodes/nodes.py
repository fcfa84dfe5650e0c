"""The nodes of the cluster and its leader, as etcd has them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from shardmq.broker.controller.nodes.streams import Address
from shardmq.cluster.etcd import Etcd
from shardmq.cluster.pairs import Changes, Deleted, Listing, Pair
from shardmq.cluster.records import BadRecord, KeyNames, Leader, Node, decoded, number_in

log = logging.getLogger(__name__)


class Nodes:
    """A copy of what etcd has of the nodes; `run` keeps it in step.

    nodes: the nodes that are alive, by number.
    controller: the record of the leader, with the revision of its last change (0: there is none).
    version: counts the news of etcd; 0 before the first listing.
    changed: called after each change.
    """

    def __init__(self, etcd: Etcd, keys: KeyNames, changed: Callable[[], None]) -> None:
        self.nodes: dict[int, Node] = {}
        self.controller: Leader | None = None
        self.revision = 0
        self.version = 0
        self._etcd = etcd
        self._keys = keys
        self._changed = changed
        self._news = asyncio.Event()

    async def run(self) -> None:
        async with aclosing(self._etcd.watch(self._keys.all)) as watch:
            async for news in watch:
                self._take_all(news)

    def _take_all(self, news: Listing | Changes) -> None:
        if isinstance(news, Listing):
            self.nodes.clear()
            self.controller, self.revision = None, 0
            found: tuple[Pair | Deleted, ...] = news.pairs
        else:
            found = news.changes
        for each in found:
            self._take(each)
        self.version += 1
        self._news.set()
        self._news.clear()
        self._changed()

    def _take(self, news: Pair | Deleted) -> None:
        value = news.value if isinstance(news, Pair) else None
        try:
            if news.key == self._keys.controller:
                self.controller, self.revision = None, 0
                if value is not None:
                    self.controller = decoded(news.key, value, Leader)
                    self.revision = news.mod_revision
            elif news.key.startswith(self._keys.nodes):
                number = number_in(news.key)
                self.nodes.pop(number, None)
                if value is not None:
                    self.nodes[number] = decoded(news.key, value, Node)
        except BadRecord as error:
            log.error("etcd has a wrong value: %s", error)

    async def newer(self, version: int) -> None:
        """Wait until `version` is another one."""
        while self.version == version:
            await self._news.wait()

    async def leader(self, wait_s: float) -> Address | None:
        """Return the address of the leader, who may be dead; None if nobody leads for so long."""
        until = asyncio.get_running_loop().time() + wait_s
        while self.controller is None:
            left_s = until - asyncio.get_running_loop().time()
            if left_s <= 0:
                return None
            try:
                async with asyncio.timeout(left_s):
                    await self._news.wait()
            except TimeoutError:
                return None
        host, _, port = self.controller.address.rpartition(":")
        return host.strip("[]"), int(port)
