"""The nodes of the cluster and the record of its leader, as etcd has them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from shardmq.broker.controller.nodes.catalog_copies import record_in
from shardmq.broker.controller.nodes.streams import Address
from shardmq.cluster.etcd import Etcd
from shardmq.cluster.pairs import Changes, Deleted, Listing, Pair
from shardmq.cluster.records import BadRecord, KeyNames, Node, decoded, number_in
from shardmq.cluster.rules import Record

log = logging.getLogger(__name__)


class Nodes:
    """A copy of what etcd has of the nodes; `run` keeps it in step.

    nodes: the nodes that are alive, by number.
    record: the record of the leader, and `revision` that of its last change; without a record, of
        the whole store.
    changed: called after each change.
    """

    def __init__(self, etcd: Etcd, keys: KeyNames, changed: Callable[[], None]) -> None:
        self.nodes: dict[int, Node] = {}
        self.record: Record | None = None
        self.revision = 0
        self._etcd = etcd
        self._keys = keys
        self._changed = changed
        self._news = asyncio.Event()

    async def run(self) -> None:
        async with aclosing(self._etcd.watch(self._keys.all)) as watch:
            async for news in watch:
                self._take_all(news)

    def _take_all(self, news: Listing | Changes) -> None:
        try:
            if isinstance(news, Listing):
                self.nodes.clear()
                self.record, self.revision = record_in(news, self._keys.controller)
                found: tuple[Pair | Deleted, ...] = news.pairs
            else:
                found = news.changes
            for each in found:
                self._take(each)
        except (BadRecord, msgspec.MsgspecError) as error:
            log.error("etcd has a wrong value: %s", error)
        self._news.set()
        self._news.clear()
        self._changed()

    def _take(self, news: Pair | Deleted) -> None:
        value = news.value if isinstance(news, Pair) else None
        if news.key == self._keys.controller:
            self.record, self.revision = None, news.mod_revision
            if value is not None:
                self.record = msgspec.json.decode(value, type=Record)
        elif news.key.startswith(self._keys.nodes):
            number = number_in(news.key)
            self.nodes.pop(number, None)
            if value is not None:
                self.nodes[number] = decoded(news.key, value, Node)

    def address(self, name: str) -> Address | None:
        """Return where the controller of a node is reached; None if the node is not alive."""
        for node in self.nodes.values():
            if node.name == name:
                return node.address, node.ports["cluster"]
        return None

    async def leader(self, wait_s: float) -> Address | None:
        """Return the address of the leader; None if none is alive within so many seconds."""
        until = asyncio.get_running_loop().time() + wait_s
        while True:
            found = None if self.record is None else self.address(self.record.leader)
            left_s = until - asyncio.get_running_loop().time()
            if found is not None or left_s <= 0:
                return found
            try:
                async with asyncio.timeout(left_s):
                    await self._news.wait()
            except TimeoutError:
                return None
