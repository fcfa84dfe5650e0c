"""Carry out unclean elections: ask the nodes for their copies of a shard, and put the record.

`shardmq.cluster.unclean` decides. The controller that leads does this for an operator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from shardmq.broker.controller.nodes.nodes import Nodes
from shardmq.cluster.etcd import Etcd
from shardmq.cluster.pairs import Compare, EtcdAway, EtcdRefused, Put
from shardmq.cluster.record_store import EtcdRecord, RecordAway
from shardmq.cluster.records import BAD_JSON, COPIES_PORT, KeyNames
from shardmq.cluster.streams import COPY_STATE, Address, NoStream
from shardmq.cluster.unclean import (
    STATE_S_MAX,
    Announce,
    Ask,
    CopyState,
    NoCopies,
    NotElected,
    OutcomeUnknown,
    Prospect,
    elected,
    has_kept,
    loss,
)

Connect = Callable[[Address, str], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class UncleanElections:
    """The elections of one controller.

    connect: opens a stream to a service at an address; raises NoStream.
    """

    def __init__(self, etcd: Etcd, keys: KeyNames, nodes: Nodes, connect: Connect) -> None:
        self._etcd = etcd
        self._keys = keys
        self._nodes = nodes
        self._connect = connect

    async def look(self, shard: int, node: str) -> Prospect:
        """Return what the election of a node's copy would be. Raises NotElected and NoCopies."""
        prospect, _ = await self._prospect(shard, node)
        return prospect

    async def elect(self, shard: int, node: str, announce: Announce) -> Prospect:
        """Let the copy of a node lead a shard. Raises NotElected, OutcomeUnknown and NoCopies.

        announce: called with the election right before the record is put.
        """
        prospect, compares = await self._prospect(shard, node)
        address = self._addresses(shard).get(node)
        state = address and await self._ask(address, Ask(prospect.record.term))
        if not state or not has_kept(prospect.record, state):
            raise NotElected(f"the copy of {node} has just changed: look again")
        put = Put(self._keys.copies_of(shard), msgspec.json.encode(prospect.record))
        announce(prospect)
        try:
            outcome = await self._etcd.transact(compares, [put])
        except EtcdAway as error:
            if error.unknown:
                raise OutcomeUnknown(str(error)) from None
            raise NotElected(f"etcd does not answer: {error}") from None
        except EtcdRefused as error:
            raise NotElected(f"etcd refuses the record: {error}") from None
        if not outcome.succeeded:
            raise NotElected("another node leads by now, or a member is back: look again")
        return prospect

    async def _prospect(self, shard: int, node: str) -> tuple[Prospect, list[Compare]]:
        key = self._keys.copies_of(shard)
        try:
            record, revision = await EtcdRecord(self._etcd, key).read()
        except RecordAway as error:
            raise NotElected(f"the record of the shard cannot be read: {error}") from None
        if record is None:
            raise NoCopies
        alive = {each.name for each in self._nodes.nodes.values()}
        states = await self._states(shard)
        found = Prospect(elected(record, node, states, alive), loss(record, node, states))
        absent = [
            Compare(self._keys.node(number), create_revision=0)
            for number, name in self._nodes.members.items()
            if name in record.in_sync and name not in alive
        ]
        return found, [Compare(key, mod_revision=revision), *absent]

    async def _states(self, shard: int) -> dict[str, CopyState]:
        """Return the states of the copies of all nodes that answer in time."""
        asked = self._addresses(shard)
        states = await asyncio.gather(*(self._ask(each, Ask()) for each in asked.values()))
        return {name: state for name, state in zip(asked, states, strict=True) if state is not None}

    def _addresses(self, shard: int) -> dict[str, Address]:
        """Return where the copies of a shard are reached, by the names of their nodes."""
        port = f"{COPIES_PORT}{shard}"
        return {
            each.name: (each.address, each.ports[port])
            for each in self._nodes.nodes.values()
            if port in each.ports
        }

    async def _ask(self, address: Address, ask: Ask) -> CopyState | None:
        try:
            async with asyncio.timeout(STATE_S_MAX):
                reader, writer = await self._connect(address, COPY_STATE)
                try:
                    writer.write(msgspec.json.encode(ask) + b"\n")
                    data = await reader.readline()
                finally:
                    writer.close()
            return msgspec.json.decode(data, type=CopyState)
        except (NoStream, OSError, *BAD_JSON):  # a timeout is an OSError
            return None
