"""The controller that carries out an unclean election says beforehand what it is about to do."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from shardmq.broker.controller.nodes.nodes import Nodes
from shardmq.broker.controller.nodes.unclean_elections import UncleanElections
from shardmq.cluster.pairs import EtcdAway, EtcdRefused, Get, Outcome, Pair
from shardmq.cluster.records import COPIES_PORT, KeyNames, Node
from shardmq.cluster.rules import Held, Position, Record
from shardmq.cluster.streams import Address
from shardmq.cluster.unclean import Ask, CopyState, NotElected, OutcomeUnknown, Prospect

KEYS = KeyNames("tea")
RECORD = Record(5, "a", 1, "s", {"a": "copy-a"})


class Etcd:
    """An etcd with the record of shard 1, in which a transaction that puts ends as `outcome`."""

    def __init__(self, outcome: Outcome | Exception) -> None:
        self.outcome = outcome
        self.puts = 0

    async def transact(self, compares: Any, then: Any) -> Outcome:
        if isinstance(then[0], Get):
            return Outcome(True, 9, (Pair(then[0].key, msgspec.json.encode(RECORD), 9, 1),))
        self.puts += 1
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Writer:
    """Sends what is asked to a copy on the node c."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._term = 4

    def write(self, data: bytes) -> None:
        term = max(4, msgspec.json.decode(data, type=Ask).promise)
        held = Held("s", "copy-c", is_whole=True, term=term)
        state = CopyState(7, held, Position(5, 12))
        self._reader.feed_data(msgspec.json.encode(state) + b"\n")

    def close(self) -> None: ...


async def connect(address: Address, service: str) -> tuple[Any, Any]:
    reader = asyncio.StreamReader()
    return reader, Writer(reader)


@pytest.mark.parametrize(
    ("outcome", "raised"),
    [
        (Outcome(True, 10, ()), None),
        (Outcome(False, 10, ()), NotElected),
        (EtcdAway("silent"), NotElected),
        (EtcdRefused("no permission"), NotElected),
        (EtcdAway("silent", unknown=True), OutcomeUnknown),
    ],
)
async def test_the_election_is_announced_before_the_record_is_put(
    outcome: Outcome | Exception, raised: type[Exception] | None
) -> None:
    etcd: Any = Etcd(outcome)
    nodes = Nodes(etcd, KEYS, lambda: None, 0)
    nodes.members.update({0: "a", 2: "c"})
    nodes.nodes[2] = Node(2, "c", "127.0.0.1", {f"{COPIES_PORT}1": 9}, "1", 1, 1)
    announced: list[tuple[Prospect, int]] = []

    def announce(prospect: Prospect) -> None:
        announced.append((prospect, etcd.puts))

    electing = UncleanElections(etcd, KEYS, nodes, connect).elect(1, "c", announce)
    if raised is None:
        await electing
    else:
        with pytest.raises(raised):
            await electing
    ((prospect, puts),) = announced
    assert puts == 0 and etcd.puts == 1
    assert prospect.record == Record(6, "c", 7, "s", {"c": "copy-c"})
