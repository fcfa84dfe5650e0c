"""The copies of shards at this node, for those who read streams there."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from typing import Final

from shardmq.broker.controller.nodes.nodes import Nodes
from shardmq.broker.controller.streams.stream_reader import ReaderConnection, connected
from shardmq.cluster.record_store import EtcdRecord, RecordAway, Transactor
from shardmq.cluster.records import KeyNames

NONE: Final = ""

log = logging.getLogger(__name__)


class OwnCopies:
    """The copies at the node `own`."""

    def __init__(
        self, etcd: Transactor, keys: KeyNames, nodes: Nodes, own: str, runtime_dir: str
    ) -> None:
        self._etcd, self._keys, self._nodes = etcd, keys, nodes
        self._own, self._runtime_dir = own, runtime_dir

    def in_sync(self, shard: int) -> Collection[str]:
        return self._nodes.copies().get(shard, ())

    async def own(self, shard: int) -> str:
        """Return the name of the copy of this node; "" unless the copy has all of the shard.

        The record is read from a majority of etcd, after the call. A leader confirms nothing
        without all members of the record. So the copy that the record names has all that was
        confirmed before, whatever this node has heard of leaders and terms.
        """
        try:
            record, _ = await EtcdRecord(self._etcd, self._keys.copies_of(shard)).read()
        except RecordAway as error:
            log.info("the copy of shard %d is not read: %s", shard, error)
            return NONE
        return NONE if record is None else record.in_sync.get(self._own, NONE)

    def reader(self) -> AbstractAsyncContextManager[ReaderConnection]:
        return connected(self._runtime_dir)
