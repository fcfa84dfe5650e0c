"""Make a snapshot of a cluster: each node makes its part, and each shard is in one of them.

The shards write their files at the nodes that lead them. When all have answered, etcd says whether
the same nodes have led them in the same terms all the time. If so, each part has all that was
confirmed before; if not, a part may be of a node that led no more, and all begins anew. No part has
its name before all are on stable storage.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from shardmq.broker.controller.nodes.nodes import Nodes
from shardmq.broker.controller.nodes.snapshot_parts import PartElsewhere, PartHere, PartOfNode
from shardmq.broker.controller.snapshots import Snapshots, look_at
from shardmq.broker.controller.stored.definitions import is_of_definitions
from shardmq.broker.controller.stored.snapshot_directory import NoSnapshot
from shardmq.broker.controller.stored.snapshot_part import OwnPart
from shardmq.cluster import records
from shardmq.cluster.etcd import Etcd
from shardmq.cluster.membership import Origin, Part
from shardmq.cluster.pairs import EtcdAway, EtcdRefused
from shardmq.cluster.record_store import RecordAway
from shardmq.cluster.record_store import decoded as record_of
from shardmq.cluster.records import BadRecord, Copies, KeyNames, decoded, number_in
from shardmq.cluster.replicated_files import Deposed
from shardmq.cluster.streams import SNAPSHOT, NoStream

ATTEMPTS_MAX: Final = 3
ID_BYTES: Final = 8
LOOK_S: Final = 1.0  # how often somebody who waits for a shard looks whether its node is alive

log = logging.getLogger(__name__)


class Lead(NamedTuple):
    """The name of the node that leads a shard, and its term; 0 for a shard without copies."""

    node: str
    term: int


class LeadMoved(Exception):
    """A shard has another leader than when its part was begun."""


class NodesOfSnapshot(Protocol):
    """The nodes of the cluster, as a snapshot needs them.

    own: the name of the node of the controller that leads.
    """

    own: str

    def alive(self) -> dict[str, int]:
        """Return the nodes that are alive: their names with their numbers."""

    def away(self) -> list[str]:
        """Return the names of the other nodes."""

    async def leads(self) -> dict[int, Lead]:
        """Return who leads the shards, as a majority of etcd has it. Raises NoSnapshot."""

    async def part(self, node: str) -> PartOfNode:
        """Return the part of a node that is alive. Raises NoSnapshot."""

    async def assure(self) -> None:
        """Return when the controller has led after the call. Raises NoSnapshot if it has not."""


class ClusterSnapshots:
    """The snapshots of the controller that leads a cluster."""

    def __init__(self, nodes: NodesOfSnapshot) -> None:
        self._nodes = nodes

    async def make(self, target: Path, snapshots: Snapshots) -> dict[str, Any]:
        """Have each node that is alive make its part in a directory of its host.

        Returns what an answer says of the parts. Raises NoSnapshot.
        """
        for left in reversed(range(ATTEMPTS_MAX)):
            try:
                return await self._make(target, snapshots)
            except LeadMoved as error:
                if not left:
                    raise NoSnapshot(f"{error}: try again") from None
                log.warning("a snapshot begins anew: %s", error)
        raise AssertionError("the last attempt raises")

    async def _make(self, target: Path, snapshots: Snapshots) -> dict[str, Any]:
        leads, alive = await self._nodes.leads(), self._nodes.alive()
        if self._nodes.own not in alive:
            raise NoSnapshot("this node is not among those that are alive: try again")
        origin = Origin(
            os.urandom(ID_BYTES).hex(), f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            divided(leads, alive),
        )  # fmt: skip
        parts: dict[str, PartOfNode] = {}
        async with AsyncExitStack() as opened:
            for node in alive:
                try:
                    parts[node] = await self._nodes.part(node)
                except NoSnapshot as error:
                    raise NoSnapshot(f"{node}: {error}") from None
                opened.callback(parts[node].close)
            await _each(parts, lambda part: part.look(target))
            try:
                return await self._fill(target, snapshots, origin, leads, parts)
            except BaseException as error:
                left = await self._remove(parts)
                if left and isinstance(error, NoSnapshot):
                    text = f"{error}; {', '.join(left)} may have a part in {target}: remove it"
                    raise NoSnapshot(text) from None
                raise

    async def _fill(
        self,
        target: Path,
        snapshots: Snapshots,
        origin: Origin,
        leads: Mapping[int, Lead],
        parts: Mapping[str, PartOfNode],
    ) -> dict[str, Any]:
        places: dict[str, Path] = {}

        async def begin(node: str) -> None:
            places[node] = await parts[node].begin(target)

        await _each({node: node for node in parts}, begin)
        before = snapshots.places()
        replies = {shard: snapshots.ask(shard, places[lead.node]) for shard, lead in leads.items()}
        try:
            await asyncio.gather(
                *(
                    self._answered(replies[shard], lead.node, parts[lead.node].gone)
                    for shard, lead in leads.items()
                )
            )
        finally:
            # A shard that comes back later must not be asked for a part of this attempt.
            waiting = [shard for shard, reply in replies.items() if reply.cancel()]
        if (after := await self._nodes.leads()) != leads:
            raise LeadMoved(difference(leads, after))
        for shard, lead in leads.items():
            if shard in waiting:
                raise NoSnapshot(f"shard {shard}: its node {lead.node} is away")
            look_at(shard, replies[shard])
        own = places[self._nodes.own]
        await snapshots.write_definitions(own, before)
        await self._nodes.assure()
        for file in sorted(own.iterdir()):
            if is_of_definitions(file.name):
                await _each(parts, lambda part, file=file: part.add(file))  # type: ignore[misc]
        await _each(parts, lambda part: part.finish(origin))
        await _each(parts, lambda part: part.give_name())
        return {
            "snapshot": origin.snapshot,
            "parts": {node: sorted(part.shards) for node, part in origin.parts.items()},
            "nodes_away": self._nodes.away(),
        }

    async def _answered(self, reply: asyncio.Future[Any], node: str, gone: asyncio.Event) -> None:
        """Return when a shard has answered, or when its node is away, or hangs."""
        away = asyncio.create_task(gone.wait())
        try:
            while not (reply.done() or away.done()) and node in self._nodes.alive():
                await asyncio.wait(
                    (reply, away), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            away.cancel()

    async def _remove(self, parts: Mapping[str, PartOfNode]) -> list[str]:
        """Remove all parts; return the nodes that did not hear of it.

        The part of such a node goes when its stream ends, unless it has its name by then.
        """
        outcomes = await asyncio.gather(
            *(part.remove() for part in parts.values()), return_exceptions=True
        )
        return [node for node, error in zip(parts, outcomes, strict=True) if error is not None]


class NodesAlive:
    """`NodesOfSnapshot` by what etcd has and by streams.

    part: returns a new part of this node.
    leads: the assurance of the controller that it leads. Raises Deposed and OSError.
    connect: opens a stream to a service of a node; raises NoStream.
    """

    def __init__(
        self,
        etcd: Etcd,
        keys: KeyNames,
        nodes: Nodes,
        own: str,
        part: Callable[[], OwnPart],
        leads: Callable[[], Awaitable[None]],
        connect: Callable[
            [records.Node, str], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        ],
    ) -> None:
        self.own = own
        self._etcd, self._keys, self._nodes = etcd, keys, nodes
        self._own_part, self._assure, self._connect = part, leads, connect

    def alive(self) -> dict[str, int]:
        return {node.name: number for number, node in sorted(self._nodes.nodes.items())}

    def away(self) -> list[str]:
        members = self._nodes.members.items()
        return [name for number, name in sorted(members) if number not in self._nodes.nodes]

    async def leads(self) -> dict[int, Lead]:
        names = self._nodes.members
        try:
            claims = (await self._etcd.range(self._keys.shards)).pairs
            recorded = (await self._etcd.range(self._keys.copies)).pairs
            homes = {
                number_in(pair.key): decoded(pair.key, pair.value, Copies).leader for pair in claims
            }
            found = {
                shard: Lead(names.get(home, f"number {home}"), 0) for shard, home in homes.items()
            }
            for pair in recorded:
                record = record_of(pair)
                found[number_in(pair.key)] = Lead(record.leader, record.term)
        except (EtcdAway, EtcdRefused) as error:
            raise NoSnapshot(f"etcd does not say who leads the shards: {error}") from None
        except (BadRecord, RecordAway) as error:
            raise NoSnapshot(str(error)) from None
        return dict(sorted(found.items()))

    async def part(self, node: str) -> PartOfNode:
        if node == self.own:
            return PartHere(self._own_part())
        for known in self._nodes.nodes.values():
            if known.name == node:
                try:
                    return PartElsewhere(*await self._connect(known, SNAPSHOT))
                except (NoStream, OSError) as error:
                    raise NoSnapshot(f"the node cannot be reached: {error}") from None
        raise NoSnapshot("the node is away")

    async def assure(self) -> None:
        try:
            await self._assure()
        except Deposed:
            raise NoSnapshot("another node leads the cluster by now: try again") from None


def divided(leads: Mapping[int, Lead], alive: Mapping[str, int]) -> dict[str, Part]:
    """Return which shards each node is to have in its part, with their terms.

    A node that leads none has a part, too. Raises NoSnapshot if the leader of a shard is away.
    """
    for shard, lead in leads.items():
        if lead.node not in alive:
            raise NoSnapshot(f"shard {shard}: its node {lead.node} is away")
    return {
        node: Part(number, {shard: lead.term for shard, lead in leads.items() if lead.node == node})
        for node, number in alive.items()
    }


def difference(before: Mapping[int, Lead], after: Mapping[int, Lead]) -> str:
    """Return what has changed in who leads the shards."""
    for shard in sorted({*before, *after}):
        if before.get(shard) != (now := after.get(shard)):
            if shard not in before:
                return f"shard {shard} has come meanwhile"
            by = "no node" if now is None else now.node
            return f"shard {shard} is led by {by} since, in another term"
    return "nothing has changed"


async def _each(parts: Mapping[str, Any], step: Callable[[Any], Awaitable[None]]) -> None:
    """Do a step of all parts at once, to its end; raise the error of the first that failed."""
    outcomes = await asyncio.gather(*map(step, parts.values()), return_exceptions=True)
    for node, outcome in zip(parts, outcomes, strict=True):
        if isinstance(outcome, NoSnapshot):
            raise NoSnapshot(f"{node}: {outcome}")
        if isinstance(outcome, BaseException):
            raise outcome
