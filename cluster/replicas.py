"""Decides on how many nodes a shard is to be, and which shards suit a queue that asks for copies.

The unit of copies is the shard: all its queues have as many as it has. So a wish of one queue is
met by placing the queue on a shard that has about as many copies as the queue asks for.

**Sets of shards.** `cluster.replicas` and `min_in_sync` are those of all shards of a cluster, but
of the ones that a node puts into a set of its own: `cluster.shard_sets = ["1:1", "2:5/3"]` says
that of the shards that this node makes, one is on one node only, and two are on five nodes, of
which three have to be in sync. The home of a shard decides, because only its settings name shards
that it has. It writes the numbers to `/shardmq/NAME/replicas/N` at its start. The other nodes read
them there: the supervisors that take copies, the leader that counts who is in sync before it
confirms, and the controller that places queues. A shard without this key has the numbers of the
settings of each node, as if there were no sets. Without `shard_sets` no key is ever written.

A shard stays in its set when the settings are read again, or when there are more shards or sets
(`assigned`). If its home is forgotten, the shard keeps its numbers. A shard that has copies keeps
them when its number is lowered, as with `cluster.replicas`.

**A queue asks** by an argument, its policy, or its vhost, in this order; else it asks for what
`cluster.replicas` says (`broker/controller/decisions/copies.py`). It is placed on the shards that
suit it best (`nearest`): with enough copies, then with enough that must be in sync, then with the
fewest more than it asks for. If no shard has enough, those with the most are taken. So a shard with
fewer copies than asked for is only taken if no other one has more. Among these shards the queue is
placed as ever: by its name, or as its locator says. Nothing moves when a policy or a set changes,
because messages would have to be copied at a moment that nobody chose: `shardctl move_queue` moves
a queue when it suits. Drains and rebalancings keep queues on shards that suit them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta, Struct

from shardmq.cluster.records import BAD_JSON, BadRecord

REPLICAS_MAX: Final = 7
SHARD_SET: Final = re.compile(r"(\d{1,2}):(\d)(?:/(\d))?", re.ASCII)


class Replicas(Struct, frozen=True):
    """The numbers of a shard.

    count: on how many nodes the shard is to be, as far as there are so many.
    min_in_sync: with fewer that have all, nothing is confirmed; 0: half of `count`, rounded up.

    Raises ValueError if `min_in_sync` is more than `count`.
    """

    count: Annotated[int, Meta(ge=1, le=REPLICAS_MAX)]
    min_in_sync: Annotated[int, Meta(ge=0, le=REPLICAS_MAX)] = 0

    def __post_init__(self) -> None:
        if self.min_in_sync > self.count:
            raise ValueError(f"min_in_sync {self.min_in_sync} is more than {self.count} replicas")

    @property
    def least(self) -> int:
        """The number of nodes that must be in sync when all copies are there."""
        return self.min_in_sync or (self.count + 1) // 2


def of_settings(count: int, min_in_sync: int) -> Replicas:
    """Return the numbers of the shards in no set.

    The settings may ask for more nodes in sync than other settings allow copies. Then all that can
    be are asked for.
    """
    return Replicas(count, min(count, min_in_sync))


class ShardSet(NamedTuple):
    """A number of shards of a node that have the same numbers of copies."""

    shards: int
    replicas: Replicas


def shard_set(text: str) -> ShardSet:
    """Return the set in a text such as "2:5/3". Raises ValueError."""
    found = SHARD_SET.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r} is not SHARDS:REPLICAS or SHARDS:REPLICAS/MIN_IN_SYNC, such as 2:5/3"
        )
    shards, count, least = int(found[1]), int(found[2]), int(found[3] or 0)
    if shards < 1 or not 1 <= count <= REPLICAS_MAX:
        raise ValueError(f"{text!r}: expected 1 shard or more, and 1 to {REPLICAS_MAX} replicas")
    if least > count:
        raise ValueError(f"{text!r}: min_in_sync {least} is more than {count} replicas")
    return ShardSet(shards, Replicas(count, least))


def decoded(key: str, value: bytes) -> Replicas:
    """Return the numbers of a shard that are the value of a key. Raises BadRecord."""
    try:
        return msgspec.json.decode(value, type=Replicas)
    except BAD_JSON as error:
        raise BadRecord(f"{key}: no numbers of replicas: {error}") from None


def encoded(replicas: Replicas) -> bytes:
    """Return the value for etcd."""
    return msgspec.json.encode(replicas)


def assigned(
    shards: Collection[int], sets: Sequence[ShardSet], before: Mapping[int, Replicas]
) -> dict[int, Replicas]:
    """Return the shards of a node that are in a set, with their numbers.

    A shard that has the numbers of a set already stays, as far as the set is large enough. What is
    missing is taken from the others: first from shards of other sets, those with as many copies
    before those with more or fewer, so that a set whose numbers change keeps its shards. Then the
    highest number comes first, because the newest shards have the fewest messages. Raises
    ValueError if the node has too few shards.

    before: the numbers that shards have now.
    """
    wanted: dict[Replicas, int] = {}
    for each in sets:
        wanted[each.replicas] = wanted.get(each.replicas, 0) + each.shards
    if (total := sum(wanted.values())) > len(shards):
        raise ValueError(f"the sets have {total} shards, the node has {len(shards)}")
    found: dict[int, Replicas] = {}
    for shard in sorted(shards):
        kept = before.get(shard)
        if kept is not None and wanted.get(kept, 0) > 0:
            wanted[kept] -= 1
            found[shard] = kept
    missing = [replicas for replicas, count in wanted.items() for _ in range(count)]
    others = sorted(set(shards) - found.keys(), reverse=True)
    for shard in [shard for shard in others if shard in before]:
        alike = [replicas for replicas in missing if replicas.count == before[shard].count]
        if alike:
            missing.remove(alike[0])
            found[shard] = alike[0]
    others = [shard for shard in others if shard not in found]
    others.sort(key=lambda shard: shard not in before)  # stable: still the highest first
    return found | dict(zip(others, missing, strict=False))


class ReplicasOfShards(NamedTuple):
    """The numbers of all shards.

    in_sets: those of the shards that are in a set.
    others: those of all others, as the settings of the node that leads the cluster say.
    """

    in_sets: Mapping[int, Replicas] = MappingProxyType({})
    others: Replicas = Replicas(1)

    def of(self, shard: int) -> Replicas:
        """Return the numbers of a shard."""
        return self.in_sets.get(shard, self.others)

    def nearest(self, asked: Replicas, shards: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of the shards that suit a queue best, in the same order."""
        if not self.in_sets:
            return shards
        ranks = [_rank(asked, self.of(shard)) for shard in shards]
        best = min(ranks, default=None)
        return tuple(shard for shard, rank in zip(shards, ranks, strict=True) if rank == best)


def _rank(asked: Replicas, has: Replicas) -> tuple[int, int, int, int]:
    """Return how far off a shard is: what it lacks comes before what it has too many."""
    copies, in_sync = has.count - asked.count, has.least - asked.least
    return max(0, -copies), max(0, -in_sync), max(0, copies), max(0, in_sync)
