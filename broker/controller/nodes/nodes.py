"""The nodes of the cluster and the record of its leader, as etcd has them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from shardmq.broker.controller.cluster_view import Claimed, KnownNode
from shardmq.broker.shared.control import ShardElsewhere
from shardmq.cluster.etcd import Etcd
from shardmq.cluster.membership import member_of, members_key, refused_key, refused_of
from shardmq.cluster.pairs import Changes, Deleted, Listing, Pair
from shardmq.cluster.record_store import RecordAway
from shardmq.cluster.record_store import decoded as record_of
from shardmq.cluster.records import (
    SHARD_PORT,
    BadRecord,
    Copies,
    KeyNames,
    Node,
    decoded,
    number_in,
)
from shardmq.cluster.replicas import Replicas
from shardmq.cluster.replicas import decoded as replicas_in
from shardmq.cluster.rules import Record
from shardmq.cluster.streams import Address

log = logging.getLogger(__name__)


class Nodes:
    """A copy of what etcd has of the nodes; `run` keeps it in step.

    nodes: the nodes that are alive, by number.
    members: the names of all nodes, by number.
    owners: the numbers of the nodes that lead the shards, by shard.
    in_sets: the numbers of copies of the shards that are in a set.
    record: the record of the leader, and `revision` that of its last change; without a record, of
        the whole store.
    changed: called after each change.
    own: the number of the node that keeps the copy.
    """

    def __init__(self, etcd: Etcd, keys: KeyNames, changed: Callable[[], None], own: int) -> None:
        self.nodes: dict[int, Node] = {}
        self.members: dict[int, str] = {}
        self.owners: dict[int, int] = {}
        self.in_sets: dict[int, Replicas] = {}
        self._claims: dict[int, Copies] = {}
        self._copies: dict[int, Record] = {}  # of the shards that have copies
        self.record: Record | None = None
        self.revision = 0
        self._etcd = etcd
        self._keys = keys
        self._members = members_key(keys)
        self._refused = refused_key(keys)
        self._own = own
        self._was_member = False
        self._changed = changed
        self._news = asyncio.Event()

    async def run(self) -> None:
        async with aclosing(self._etcd.watch(self._keys.all)) as watch:
            async for news in watch:
                self._take_all(news)

    def _take_all(self, news: Listing | Changes) -> None:
        if isinstance(news, Listing):
            for known in (self.nodes, self.members, self._claims, self._copies, self.in_sets):
                known.clear()
            self.record, self.revision = None, news.revision
            found: tuple[Pair | Deleted, ...] = news.pairs
        else:
            found = news.changes
        for each in found:
            try:
                if each.key == self._refused:
                    # A listing has one that these nodes have heard of, or none of them did.
                    if isinstance(each, Pair) and not isinstance(news, Listing):
                        log.error("a node was refused: %s", refused_of(each))
                    continue
                self._take(each)
            except (BadRecord, RecordAway) as error:  # it must not hide those behind it
                log.error("etcd has a wrong value: %s", error)
        is_member = self._own in self.members
        if self._was_member and not is_member:
            log.error(
                "etcd does not have this node any more: its data were put back to an earlier "
                "state, or the node was forgotten; restart it"
            )
        self._was_member = is_member
        numbers = {name: number for number, name in self.members.items()}
        self.owners.clear()
        self.owners.update((shard, claim.leader) for shard, claim in self._claims.items())
        self.owners.update(
            (shard, numbers[record.leader])
            for shard, record in self._copies.items()
            if record.leader in numbers
        )
        self._news.set()
        self._news.clear()
        self._changed()

    def _take(self, news: Pair | Deleted) -> None:
        value = news.value if isinstance(news, Pair) else None
        if news.key == self._keys.controller:
            self.record, self.revision = None, news.mod_revision
            if isinstance(news, Pair):
                self.record = record_of(news)
        elif news.key.startswith(self._keys.nodes):
            node = None if value is None else decoded(news.key, value, Node)
            _set(self.nodes, news.key, node)
        elif news.key.startswith(self._members):
            name = None if value is None else member_of(news.key, value).name
            _set(self.members, news.key, name)
        elif news.key.startswith(self._keys.shards):
            claim = decoded(news.key, news.value, Copies) if isinstance(news, Pair) else None
            _set(self._claims, news.key, claim)
        elif news.key.startswith(self._keys.replicas):
            in_set = None if value is None else replicas_in(news.key, value)
            _set(self.in_sets, news.key, in_set)
        elif news.key.startswith(self._keys.copies):
            _set(self._copies, news.key, record_of(news) if isinstance(news, Pair) else None)

    def known(self) -> list[KnownNode]:
        """Return all nodes, those that are not alive too."""
        homes = Counter(claim.leader for claim in self._claims.values())
        return [
            KnownNode(number, name, self._shards_of(number), number in self.nodes, homes[number])
            for number, name in sorted(self.members.items())
        ]

    async def with_member(self, name: str) -> list[KnownNode]:
        """Return all nodes when etcd has said that a node of this name is one of them."""
        while name not in self.members.values():
            await self._news.wait()
        return self.known()

    def _shards_of(self, node: int) -> list[int]:
        return sorted(shard for shard, owner in self.owners.items() if owner == node)

    def shards(self) -> dict[int, list[ShardElsewhere]]:
        """Return the shards that the nodes which are alive lead, by the number of the node.

        A node has ports of shards that it has copies of, too.
        """
        return {
            node.number: [
                ShardElsewhere(shard, node.name, f"tcp://{node.address}:{port}")
                for shard in self._shards_of(node.number)
                if (port := node.ports.get(f"{SHARD_PORT}{shard}")) is not None
            ]
            for node in self.nodes.values()
        }

    def copies(self) -> dict[int, list[str]]:
        """Return the names of the nodes that have all of a shard, for shards with copies."""
        return {shard: sorted(record.in_sync) for shard, record in self._copies.items()}

    def claims(self) -> dict[int, Claimed]:
        """Return who has a copy of a shard, or is to have one, for shards with copies."""
        return {
            shard: Claimed(
                tuple(self.members.get(node, str(node)) for node in claim.members), record.term
            )
            for shard, record in self._copies.items()
            if (claim := self._claims.get(shard)) is not None
        }

    def address(self, name: str) -> Address | None:
        """Return where the controller of a node is reached; None if the node is not alive."""
        for node in self.nodes.values():
            if node.name == name and "cluster" in node.ports:
                return node.address, node.ports["cluster"]
        return None

    def lead(self) -> tuple[str, int] | None:
        """Return the leader and the term of the record; None without a record."""
        return None if self.record is None else (self.record.leader, self.record.term)

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


def _set(table: dict[int, Any], key: str, value: Any) -> None:
    """Set the entry of the number at the end of a key, or remove it if there is no value."""
    number = number_in(key)
    if value is None:
        table.pop(number, None)
    else:
        table[number] = value
