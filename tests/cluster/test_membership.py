"""Claims in etcd: no number or shard is that of two nodes, and no node loses its own."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardmq.cluster.etcd import Etcd
from shardmq.cluster.membership import (
    UNCLAIMED,
    Claims,
    Member,
    NoPlace,
    Origin,
    Part,
    Place,
    Seats,
    Wanted,
    inheritance,
    members_key,
    read_place,
    relied_on,
    restored_key,
    write_place,
)
from shardmq.cluster.pairs import (
    Changes,
    Compare,
    Delete,
    Deleted,
    Get,
    Listing,
    Operation,
    Outcome,
    Pair,
    Put,
)
from shardmq.cluster.records import SHARDS_MAX, BadRecord, Copies, KeyNames, decoded, encoded
from shardmq.cluster.replicas import Replicas, ShardSet
from shardmq.cluster.replicas import encoded as value_of_replicas
from shardmq.cluster.rules import Record

KEYS = KeyNames("tea")
_clusters = itertools.count(1)


@pytest.fixture
def cluster() -> str:
    """Return a name that no other test uses."""
    return f"claims-{next(_clusters)}"


def new_place(cluster: str, node: str) -> Place:
    return Place(cluster, node, identity=f"identity of {node}")


async def claim(etcd: Etcd, place: Place, shards: int = 2, held: tuple[int, ...] = ()) -> Place:
    claims = Claims(etcd, place.cluster)
    return await claims.shards(await claims.number(place), shards, held)


@pytest.mark.row("K12")
async def test_nodes_that_claim_at_once_have_nothing_in_common(etcd: Etcd, cluster: str) -> None:
    places = await asyncio.gather(
        *(claim(etcd, new_place(cluster, f"n{index}"), 3) for index in range(6))
    )
    assert sorted(place.number for place in places) == list(range(6))
    assert sorted(shard for place in places for shard in place.shards) == list(range(18))


async def test_a_node_that_comes_back_has_what_it_had(etcd: Etcd, cluster: str) -> None:
    first = await claim(etcd, new_place(cluster, "a"))
    other = await claim(etcd, new_place(cluster, "b"))
    assert await claim(etcd, first) == first
    # Its file was not written before it ended.
    assert await claim(etcd, new_place(cluster, "a")) == first
    more = await claim(etcd, other, 4)
    assert (more.number, more.shards) == (other.number, [2, 3, 4, 5])
    fewer = await claim(etcd, more, 1)
    assert fewer.shards == more.shards


async def test_what_etcd_has_lost_is_claimed_again(etcd: Etcd, cluster: str) -> None:
    await claim(etcd, new_place(cluster, "a"))
    second = await claim(etcd, new_place(cluster, "b"))
    lost = f"{cluster}-lost"
    again = msgspec.structs.replace(second, cluster=lost)
    assert await claim(etcd, again) == again  # in a cluster that has forgotten all
    thief = await claim(etcd, new_place(lost, "c"), 2)
    assert (thief.number, thief.shards) == (0, [0, 1])
    first = Place(lost, "a", "identity of a", number=0, shards=[0, 1])
    with pytest.raises(NoPlace, match="another node of the cluster has the number 0"):
        await claim(etcd, first)


MONDAY = Origin("monday", "", {"a": Part(0, {0: 4, 3: 1}), "b": Part(1, {1: 0, 2: 5})})


def restored(cluster: str, node: str, origin: Origin = MONDAY) -> Place:
    """Return the place of a part of a snapshot."""
    part = origin.parts[node]
    return Place(cluster, node, f"new identity of {node}", part.number, sorted(part.shards), origin)


async def test_nodes_of_a_snapshot_have_their_numbers_and_shards_again(
    etcd: Etcd, cluster: str
) -> None:
    second = await claim(etcd, restored(cluster, "b"), 2, held=(1, 2))
    assert (second.number, second.shards) == (1, [1, 2])
    # A node that comes before the last one of the snapshot takes nothing of that.
    new = await claim(etcd, new_place(cluster, "c"))
    assert (new.number, new.shards, new.origin) == (2, [4, 5], MONDAY)
    first = await claim(etcd, restored(cluster, "a"), 3, held=(0, 3))
    assert (first.number, first.shards) == (0, [0, 3, 6])
    for place in (first, second, new):  # they come back, also if etcd loses all
        assert await claim(etcd, place) == place
        assert await claim(etcd, msgspec.structs.replace(place, cluster=f"{cluster}-2"))


@pytest.mark.parametrize("seed", range(20))
async def test_only_nodes_with_a_part_found_the_definitions_of_a_restored_cluster(
    seed: int,
) -> None:
    """Once the snapshot is noted, all come in any order: one with the name of a part, too."""
    claims = Claims(Memory(), "tea")
    (first, *parts), new = ["a", "b"], ["c", "d"]
    nodes = {name: restored("tea", name) for name in parts} | {
        name: new_place("tea", name) for name in new
    }
    if seed % 2:  # its disk is empty, because nobody has copied the part
        nodes["b"] = new_place("tea", "b")
    order = sorted(nodes)
    random.Random(seed).shuffle(order)
    places = {first: await claims.number(restored("tea", first))}
    for name in order:
        places[name] = await claims.number(nodes[name])
    assert {name for name, place in places.items() if place.founds} == (
        {"a"} if seed % 2 else {"a", "b"}
    )
    for place in places.values():
        assert (await claims.number(place)).founds == place.founds, "it comes back"
    assert new_place("tea", "a").founds
    assert (await Claims(Memory(), "tea").number(new_place("tea", "a"))).founds


async def test_data_that_are_not_of_the_snapshot_do_not_join(etcd: Etcd, cluster: str) -> None:
    await claim(etcd, restored(cluster, "a"))
    tuesday = Origin("tuesday", "", MONDAY.parts)
    with pytest.raises(NoPlace, match="is of the snapshot tuesday.*from the snapshot monday"):
        await claim(etcd, restored(cluster, "b", tuesday))
    with pytest.raises(NoPlace, match="of the cluster as it was before"):
        await claim(etcd, Place(cluster, "b", "identity of b", 1, [1, 2]))
    with pytest.raises(NoPlace, match="only the first node of a cluster may bring data"):
        await claim(etcd, new_place(cluster, "c"), 2, held=(7,))
    assert (await claim(etcd, restored(cluster, "b"))).shards == [1, 2]


async def test_a_snapshot_is_not_mixed_with_a_cluster_that_is_there(
    etcd: Etcd, cluster: str
) -> None:
    old = await claim(etcd, new_place(cluster, "a"))
    with pytest.raises(NoPlace, match="has the node 'a', which is not: start on it with an etcd"):
        await claim(etcd, restored(cluster, "b"))
    assert await claim(etcd, old) == old, "nothing is left of the try"
    assert (await claim(etcd, new_place(cluster, "b"))).origin is None


async def test_the_shards_of_a_node_of_the_snapshot_are_free_when_it_is_forgotten() -> None:
    claims = Claims(Memory(), "tea")
    second = await claims.shards(await claims.number(restored("tea", "b")), 2, ())
    third = await claims.number(new_place("tea", "c"))
    free = SHARDS_MAX - len(MONDAY.shards)
    why = (
        f"the cluster has {free + 2} shards, and 2 more of nodes of the snapshot .* {free + 1} are"
    )
    with pytest.raises(NoPlace, match=f"{why} wanted .* {free} are there"):
        await claims.shards(third, free + 1, ())
    first = await claims.shards(await claims.number(restored("tea", "a")), 2, ())
    with pytest.raises(NoPlace, match=f"the cluster has {SHARDS_MAX} shards, which is the most"):
        await claims.shards(third, free + 1, ())
    await claims.forget(first.number, first.shards)
    with pytest.raises(NoPlace, match="the node 'a' was forgotten"):
        await claims.number(restored("tea", "a"))
    found = await claims.shards(third, free + 2, ())
    assert set(found.shards) == set(range(SHARDS_MAX)) - set(second.shards)


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_node_of_the_snapshot_that_is_killed_at_its_first_write_refuses_no_other(
    is_known: bool,
) -> None:
    """Its note stays in the etcd of a cluster that is not of the snapshot."""
    store = Memory()
    old = await Claims(store, "tea").number(new_place("tea", "a"))
    store.put(restored_key(KEYS), msgspec.json.encode(MONDAY))
    place = old if is_known else new_place("tea", "c")
    found = await Claims(store, "tea").number(place)
    assert (found.number, found.origin) == (0 if is_known else 1, None)
    assert restored_key(KEYS) not in store.pairs
    with pytest.raises(NoPlace, match="has the node 'a', which is not"):
        await Claims(store, "tea").number(restored("tea", "b"))


@pytest.mark.parametrize("seed", range(20))
async def test_of_an_old_node_and_one_of_a_snapshot_that_come_at_once_one_is_refused(
    seed: int,
) -> None:
    """Both are nodes of one cluster in no order of their transactions."""
    rng, memory = random.Random(seed), Memory()
    turns = [Place("tea", "b", "old identity of b", 1, [1, 2]), restored("tea", "a")]

    class Turns:
        """The etcd, which each of them asks some turns of the loop later."""

        async def range(self, prefix: str) -> Listing:
            await self._wait()
            return await memory.range(prefix)

        async def transact(self, *what: Any) -> Outcome:
            await self._wait()
            return await memory.transact(*what)

        async def _wait(self) -> None:
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)

    outcomes = await asyncio.gather(
        *(Claims(Turns(), "tea").number(place) for place in turns), return_exceptions=True
    )
    refused = [each for each in outcomes if isinstance(each, NoPlace)]
    assert len(refused) == 1 and not set(map(type, outcomes)) - {Place, NoPlace}, outcomes


async def test_a_name_is_that_of_one_data_directory(etcd: Etcd, cluster: str) -> None:
    await claim(etcd, new_place(cluster, "a"))
    with pytest.raises(NoPlace, match="has a node 'a' with another data directory"):
        await claim(etcd, Place(cluster, "a", identity="another one"))


async def test_only_the_first_node_brings_shards(etcd: Etcd, cluster: str) -> None:
    first = await claim(etcd, new_place(cluster, "a"), 3, held=(0, 1, 2))
    assert first.shards == [0, 1, 2]
    with pytest.raises(NoPlace, match="only the first node of a cluster may bring data"):
        await claim(etcd, new_place(cluster, "b"), 2, held=(0, 1))
    # A start that made the directories of its shards, and comes again, brings none.
    second = await claim(etcd, new_place(cluster, "c"), 2)
    assert await claim(etcd, second, 2, held=tuple(second.shards)) == second


async def test_a_node_is_forgotten_with_its_claims_unless_it_lives(
    etcd: Etcd, cluster: str
) -> None:
    gone = await claim(etcd, new_place(cluster, "a"))
    await claim(etcd, new_place(cluster, "b"))
    claims, keys = Claims(etcd, cluster), KeyNames(cluster)
    await etcd.transact([], [Put(keys.node(gone.number), b"alive")])
    for lost in (None, gone.shards):
        with pytest.raises(NoPlace, match="lives"):
            await claims.forget(gone.number, lost)
    await etcd.transact([], [Delete(keys.node(gone.number))])
    assert await claims.forget(gone.number) == (gone.shards, {})
    with pytest.raises(NoPlace, match="have just changed"):
        await claims.forget(gone.number, gone.shards[:1])  # more would be lost than was said
    await claims.forget(gone.number, gone.shards)
    left = {pair.key.removeprefix(keys.all) for pair in (await etcd.range(keys.all)).pairs}
    assert left == {"members/1", "forgotten/0", "shards/2", "shards/3"}
    with pytest.raises(NoPlace, match="has no node 0"):
        await claims.forget(gone.number, gone.shards)


async def test_a_node_that_was_forgotten_is_refused_and_its_number_is_not_used_again(
    etcd: Etcd, cluster: str
) -> None:
    gone = await claim(etcd, new_place(cluster, "a"))
    await Claims(etcd, cluster).forget(gone.number, gone.shards)
    for place in (gone, new_place(cluster, "a")):  # as its file says, and without one
        with pytest.raises(NoPlace, match="the node 'a' was forgotten .* empty data directory"):
            await claim(etcd, place)
    other = await claim(etcd, Place(cluster, "a", identity="another one"))
    assert (other.number, other.shards) == (1, gone.shards)


async def test_shards_that_others_have_are_at_home_there_when_their_home_is_forgotten(
    etcd: Etcd, cluster: str
) -> None:
    gone = await claim(etcd, new_place(cluster, "a"), 4)
    await claim(etcd, new_place(cluster, "b"), 1)
    third = await claim(etcd, new_place(cluster, "c"), 1)
    keys, claims = KeyNames(cluster), Claims(etcd, cluster)
    puts = [put(keys.node(third.number), None)]
    for shard, members, leader, in_sync in (
        (0, (0, 1, 2), "c", "ac"), (1, (0, 1), "a", "a"), (2, (0, 1, 2), "a", "abc"),
        (4, (1, 0), "b", "ba"), (5, (2, 0, 1), "c", "c"),
    ):  # fmt: skip
        record = Record(3, leader, 1, "s", dict.fromkeys(in_sync, "copy"))
        puts += [put(keys.shard(shard), claim_of(*members))]
        puts += [Pair(keys.copies_of(shard), msgspec.json.encode(record), 1, 1)]
    await etcd.transact([], [Put(pair.key, pair.value) for pair in puts])
    found = await claims.forget(gone.number)
    # Who leads, or else who lives; shard 1 has a copy that is not in sync, and shard 3 has none.
    assert found == ([1, 3], {0: 2, 2: 2})
    assert await claims.forget(gone.number, found.lost) == found
    listing = await etcd.range(keys.all)
    left = {pair.key for pair in listing.pairs if pair.key.startswith((keys.shards, keys.copies))}
    kept = (0, 2, 4, 5)
    assert left == {*map(keys.shard, kept), *map(keys.copies_of, kept)}
    pair = await etcd.get(keys.shard(0))
    assert pair is not None
    # Of three members there are to be three, so that one does not confirm alone.
    assert decoded(pair.key, pair.value, Copies) == Copies(2, 2, in_sync=[2], members=[0, 1, 2])
    seats = Seats(keys, third.number, 3)
    seats.take(listing)
    assert seats.taken() == {0, 2}, "they are among its copies"
    assert await claims.copied(third, 3) == (third.shards, [0, 2])
    assert await claim(etcd, third, 1) == third, "they are none of those that it has made"
    # Shard 3 had no copies. Those of shard 1 have terms that those of a new shard would not reach.
    assert (await claim(etcd, new_place(cluster, "d"), 2)).shards == [3, 6]
    # The next home is forgotten in the same way.
    await etcd.transact([], [Delete(keys.node(third.number))])
    assert await claims.forget(third.number) == ([0, 5], {2: 1})


class Memory:
    """An etcd in memory. `before` is done once, before the next transaction."""

    def __init__(self) -> None:
        self.pairs: dict[str, Pair] = {}
        self.revision = 1
        self.before: Callable[[], Awaitable[Any]] | None = None

    def put(self, key: str, value: bytes) -> None:
        self.revision += 1
        self.pairs[key] = Pair(key, value, self.revision, self.revision)

    async def range(self, prefix: str) -> Listing:
        found = tuple(pair for key, pair in sorted(self.pairs.items()) if key.startswith(prefix))
        return Listing(found, self.revision)

    async def transact(
        self,
        compares: Iterable[Compare],
        then: Iterable[Operation],
        otherwise: Iterable[Operation] = (),
    ) -> Outcome:
        before, self.before = self.before, None
        if before is not None:
            await before()
        succeeds, read = all(self._holds(each) for each in compares), []
        for operation in then if succeeds else otherwise:
            if isinstance(operation, Put):
                self.put(operation.key, operation.value)
            elif isinstance(operation, Get):
                read.append(self.pairs.get(operation.key))
            else:
                self.pairs.pop(operation.key, None)
        return Outcome(succeeds, self.revision, tuple(read))

    def _holds(self, compare: Compare) -> bool:
        pair = self.pairs.get(compare.key)
        if compare.create_revision is not None:
            return (pair is None) == (compare.create_revision == 0)
        return (0 if pair is None else pair.mod_revision) == compare.mod_revision


class Overtaken:
    """An etcd in which a key changes before each transaction."""

    def __init__(self, etcd: Etcd, changed: Pair) -> None:
        self._etcd = etcd
        self._changed = changed
        self.range = etcd.range

    async def transact(self, *what: Any) -> Outcome:
        await self._etcd.transact([], [Put(self._changed.key, self._changed.value)])
        return await self._etcd.transact(*what)


async def test_a_node_is_not_forgotten_by_what_is_old_already(etcd: Etcd, cluster: str) -> None:
    gone = await claim(etcd, new_place(cluster, "a"))
    await claim(etcd, new_place(cluster, "b"))
    keys = KeyNames(cluster)
    record = msgspec.json.encode(Record(3, "b", 1, "s", {"b": "copy"}))
    for changed in (
        put(keys.node(gone.number), None),
        put(keys.shard(0), claim_of(0, 1)),
        Pair(keys.copies_of(0), record, 1, 1),
        Pair(f"{members_key(keys)}0", msgspec.json.encode(Member("a", "another")), 1, 1),
    ):
        overtaken = Claims(Overtaken(etcd, changed), cluster)
        with pytest.raises(NoPlace, match="have just changed"):
            await overtaken.forget(gone.number, gone.shards)
        await etcd.transact([], [Delete(keys.node(gone.number))])
    assert await etcd.get(keys.shard(1)) is not None


async def test_a_shard_of_a_forgotten_node_in_the_file_is_none_that_was_made_here() -> None:
    store = Memory()
    store.put(KEYS.shard(0), encoded(Copies(2, 1, in_sync=[1], members=[0, 1])))
    store.put(KEYS.shard(1), encoded(claim_of(1)))
    store.put(KEYS.shard(2), encoded(claim_of(2)))
    place = Place("tea", "n1", "identity", 1, shards=[0, 1])
    found = await Claims(store, "tea").shards(place, 1, ())
    assert found.shards == [1]
    with pytest.raises(NoPlace, match="shard 2 belongs to another node"):
        await Claims(store, "tea").shards(msgspec.structs.replace(place, shards=[1, 2]), 1, ())


@pytest.mark.parametrize("created", [0, 1])
async def test_a_node_that_was_just_forgotten_makes_no_shard(created: int) -> None:
    """Have it forgotten when it has made `created` shards of two."""
    store = Memory()
    claims = Claims(store, "tea")
    place = await claims.number(new_place("tea", "a"))

    async def forget_before_the_next() -> None:
        store.before = lambda: Claims(store, "tea").forget(place.number, range(created))

    await forget_before_the_next()
    if created:
        store.before = forget_before_the_next
    with pytest.raises(NoPlace, match="the node 'a' was forgotten"):
        await claims.shards(place, 2, ())
    assert not [key for key in store.pairs if key.startswith(KEYS.shards)]
    assert await claims.shards(await claims.number(new_place("tea", "b")), 2, ())


@pytest.mark.parametrize("sets", [[], [ShardSet(1, Replicas(2))]])
async def test_a_node_that_was_just_forgotten_changes_no_set_of_shards_with_other_homes(
    sets: list[ShardSet],
) -> None:
    store = Memory()
    claims = Claims(store, "tea")
    place = await claims.shards(await claims.number(new_place("tea", "a")), 2, ())
    await claims.number(new_place("tea", "b"))
    await claims.replicas(place, [ShardSet(1, Replicas(5, 3))])
    for shard in place.shards:
        store.put(KEYS.shard(shard), encoded(claim_of(0, 1)))
        record = Record(3, "b", 1, "s", {"b": "copy"})
        store.put(KEYS.copies_of(shard), msgspec.json.encode(record))
    there = store.pairs[KEYS.replicas_of(1)]
    store.before = lambda: Claims(store, "tea").forget(place.number, [])
    with pytest.raises(NoPlace, match="the node 'a' was forgotten"):
        await claims.replicas(place, sets)
    assert [pair for key, pair in store.pairs.items() if key.startswith(KEYS.replicas)] == [there]


@pytest.mark.parametrize("value", [b"", b"[]", b'{"count":0}'])
async def test_the_home_of_a_shard_replaces_the_numbers_that_cannot_be_read(
    value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = Memory()
    claims, other = Claims(store, "tea"), KEYS.replicas_of(9)
    place = await claims.shards(await claims.number(new_place("tea", "a")), 3, ())
    for key in (*map(KEYS.replicas_of, place.shards), other, f"{KEYS.replicas}0a"):
        store.put(key, value)
    assert await claims.replicas(place, [ShardSet(1, Replicas(5, 3))]) == {2: Replicas(5, 3)}
    there = {key for key in store.pairs if key.startswith(KEYS.replicas)}
    assert there == {KEYS.replicas_of(2), other, f"{KEYS.replicas}0a"}
    assert store.pairs[KEYS.replicas_of(2)].value == value_of_replicas(Replicas(5, 3))
    assert store.pairs[other].value == value, "another node is its home"
    assert caplog.text.count("etcd has a wrong value") == 3


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_nodes_that_are_forgotten_at_once_one_keeps_the_shard(first: int) -> None:
    """The other one reads what there is before the first is forgotten, and asks behind it."""
    store = Memory()
    for node in range(3):
        member = msgspec.json.encode(Member(f"n{node}", f"identity {node}"))
        store.put(f"{members_key(KEYS)}{node}", member)
    store.put(KEYS.shard(0), encoded(claim_of(0, 1)))
    record = Record(3, "n0", 1, "s", {"n0": "copy", "n1": "copy"})
    store.put(KEYS.copies_of(0), msgspec.json.encode(record))

    async def both() -> None:
        other = Claims(store, "tea")
        store.before = lambda: Claims(store, "tea").forget(first, [])
        with pytest.raises(NoPlace, match="have just changed"):
            await other.forget(1 - first, [])

    asyncio.run(both())
    assert f"{members_key(KEYS)}{1 - first}" in store.pairs
    assert decoded("", store.pairs[KEYS.shard(0)].value, Copies).leader == 1 - first


def test_the_new_homes_and_the_others_that_have_all_must_stay() -> None:
    names = {node: f"n{node}" for node in range(6)}
    claims = {0: claim_of(0, 1, 2), 1: claim_of(3, 0, 4), 2: claim_of(5, 0), 3: claim_of(0)}
    records = {
        0: Record(3, "n1", 1, "s", dict.fromkeys(("n1", "n2"), "copy")),
        1: Record(3, "n3", 1, "s", dict.fromkeys(("n0", "n3", "n4"), "copy")),
        2: Record(3, "n5", 1, "s", {"n5": "copy"}),
    }
    found = inheritance(0, claims, records, names, {1, 2, 3, 4, 5})
    assert found == ([3], {0: 1})
    assert relied_on(0, claims, records, names, found) == {1, 3, 4}


async def test_more_than_etcd_compares_at_once_is_refused_before_anything_is_lost() -> None:
    store = Memory()
    for node in range(2):
        store.put(f"{members_key(KEYS)}{node}", msgspec.json.encode(Member(f"n{node}", f"{node}")))
    for shard in range(SHARDS_MAX):
        store.put(KEYS.shard(shard), encoded(claim_of(0)))
    with pytest.raises(NoPlace, match="130 compares in etcd, the most is 128"):
        await Claims(store, "tea").forget(0)


def test_a_node_that_alone_has_all_of_the_shard_of_another_one_is_not_forgotten() -> None:
    claims = {0: claim_of(1, 0, 2)}
    records = {0: Record(3, "n0", 1, "s", {"n0": "copy"})}
    names = {node: f"n{node}" for node in range(3)}
    with pytest.raises(NoPlace, match="it alone has all of shard 0, whose home is 'n1'"):
        inheritance(0, claims, records, names, {1, 2})
    records = {0: Record(3, "n0", 1, "s", {"n0": "copy", "n2": "copy"})}
    assert inheritance(0, claims, records, names, {1, 2}) == ([], {})


@pytest.mark.parametrize("seed", range(20))
def test_each_shard_of_a_forgotten_node_is_lost_or_at_home_where_all_of_it_is(seed: int) -> None:
    chance = random.Random(seed)
    names = {node: f"n{node}" for node in range(5)}
    claims, records = {}, {}
    for shard in range(40):
        members = chance.sample(range(5), chance.randint(1, 4))
        claims[shard] = claim_of(*members)
        in_sync = {f"n{node}" for node in chance.sample(members, chance.randint(1, len(members)))}
        if len(members) > 1:
            leader = chance.choice(sorted(in_sync))
            records[shard] = Record(3, leader, 1, "s", dict.fromkeys(in_sync, "copy"))
    alive = {node for node in range(1, 5) if chance.random() < 0.7}
    own = {shard for shard, each in claims.items() if each.leader == 0}
    claims = {  # those that it alone has are refused
        shard: each
        for shard, each in claims.items()
        if shard in own or shard not in records or set(records[shard].in_sync) != {"n0"}
    }
    found = inheritance(0, claims, records, names, alive)
    assert own == {*found.lost, *found.homes} and len(own) == len(found.lost) + len(found.homes)
    for shard in found.lost:
        assert shard not in records or set(records[shard].in_sync) == {"n0"}
    for shard, home in found.homes.items():
        others = set(records[shard].in_sync) - {"n0"}
        assert names[home] in others and home in claims[shard].members
        leader = records[shard].leader
        assert names[home] == leader or leader == "n0"
        assert (
            home in alive or names[home] == leader or not {names[each] for each in alive} & others
        )


async def test_a_member_that_has_just_come_back_keeps_its_copy(etcd: Etcd, cluster: str) -> None:
    claims, keys = Claims(etcd, cluster), KeyNames(cluster)
    outcome = await etcd.transact([], [Put(keys.shard(0), encoded(claim_of(0, 1)))])
    wanted = Wanted(0, claim_of(0, 1), outcome.revision, [0, 2], lost=[1])
    await etcd.transact([], [Put(keys.node(1), b"alive")])
    await claims.take_seat(wanted)
    there = await etcd.get(keys.shard(0))
    assert there is not None and there.value == encoded(claim_of(0, 1))
    await etcd.transact([], [Delete(keys.node(1))])
    await claims.take_seat(wanted)
    there = await etcd.get(keys.shard(0))
    assert there is not None and there.value == encoded(claim_of(0, 2))


def test_a_copy_is_taken_only_while_those_who_count_as_lost_are_absent() -> None:
    seats = Seats(KEYS, 3, 3, AFTER_S)
    names = [msgspec.json.encode(Member(f"n{node}", "identity")) for node in range(4)]
    record = msgspec.json.encode(Record(1, "n0", 1, "s", {"n0": "copy"}))
    listing = (
        *(put(KEYS.node(node), None) for node in (0, 3)),
        *(Pair(f"{members_key(KEYS)}{node}", name, 1, 1, 0) for node, name in enumerate(names)),
        put(KEYS.shard(0), claim_of(0, 1, 2)),
        Pair(KEYS.copies_of(0), record, 1, 1, 0),
    )
    seats.take(Listing(listing, 7), 0.0)
    (wanted,) = seats.wanted(AFTER_S)
    assert wanted.lost == [1, 2] and wanted.members == [0, 2, 3]


async def test_a_cluster_has_a_bound(etcd: Etcd, cluster: str) -> None:
    await claim(etcd, new_place(cluster, "a"), SHARDS_MAX - 1)
    with pytest.raises(NoPlace, match=f"the cluster has {SHARDS_MAX} shards"):
        await claim(etcd, new_place(cluster, "b"), 2)


async def test_the_first_secret_is_that_of_the_cluster(etcd: Etcd, cluster: str) -> None:
    claims = Claims(etcd, cluster)
    await claims.secret(b"one")
    await claims.secret(b"one")
    with pytest.raises(NoPlace, match="the cluster has another secret"):
        await claims.secret(b"two")


async def test_garbage_in_etcd_is_named(etcd: Etcd, cluster: str) -> None:

    await etcd.transact([], [Put(f"{KeyNames(cluster).shards}0", b"no record")])
    with pytest.raises(BadRecord, match="shards/0"):
        await claim(etcd, new_place(cluster, "a"))


def test_the_file_keeps_the_place(tmp_path: Path) -> None:
    new = read_place(tmp_path, "tea", "a")
    assert (new.number, new.shards) == (UNCLAIMED, [])
    assert read_place(tmp_path, "tea", "a").identity != new.identity
    place = msgspec.structs.replace(new, number=3, shards=[4, 5])
    write_place(tmp_path, place)
    assert read_place(tmp_path, "tea", "a") == place
    for cluster, node in (("tea", "b"), ("coffee", "a")):
        with pytest.raises(NoPlace, match="belongs to the node 'a' of the cluster 'tea'"):
            read_place(tmp_path, cluster, node)
    (tmp_path / "cluster.json").write_text("[]")
    with pytest.raises(NoPlace, match="cluster.json"):
        read_place(tmp_path, "tea", "a")


AFTER_S = 100.0
SYNC_S = 5.0


class Cluster:
    """Etcd as each node sees it, with a clock. A new copy is in sync SYNC_S after it was taken."""

    def __init__(self, replicas: int, nodes: int, after_s: float = AFTER_S) -> None:
        self.claims: dict[int, Copies] = {}
        self.records: dict[int, set[int]] = {}  # the in-sync sets; the lowest one that lives leads
        self.members = set(range(nodes))
        self.alive = set(range(nodes))
        self.took: list[tuple[int, int]] = []  # node and shard
        self.at_once_max = 0
        self._in_sync_at: dict[tuple[int, int], float] = {}
        self._now = 0.0
        self._seats = {node: Seats(KEYS, node, replicas, after_s) for node in range(nodes)}

    def behind(self) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {node: set() for node in self._seats}
        for node, shard in self._in_sync_at:
            found[node].add(shard)
        return found

    def _listing(self) -> Listing:
        pairs = [put(KEYS.node(node), None) for node in self.alive]
        for node in self.members:
            value = msgspec.json.encode(Member(f"n{node}", "identity"))
            pairs.append(Pair(f"{members_key(KEYS)}{node}", value, 1, 1, 0))
        pairs += [put(KEYS.shard(shard), claim) for shard, claim in self.claims.items()]
        for shard, in_sync in self.records.items():
            leader = min(in_sync & self.alive or in_sync)
            record = Record(2, f"n{leader}", 1, "s", {f"n{node}": "copy" for node in in_sync})
            value = msgspec.json.encode(record)
            pairs.append(Pair(KEYS.copies_of(shard), value, 1, 1, 0))
        return Listing(tuple(pairs), 7)

    def run(self, seconds: float) -> None:
        end = self._now + seconds
        while self._now < end:
            self._now += 1
            for (node, shard), at in list(self._in_sync_at.items()):
                if self._now >= at:
                    del self._in_sync_at[node, shard]
                    self.records[shard] = self.records[shard] | {node}
            for node in sorted(self.alive):
                seats = self._seats[node]
                seats.take(self._listing(), self._now)
                for wanted in seats.wanted(self._now):
                    self.claims[wanted.shard] = msgspec.structs.replace(
                        wanted.claim, members=wanted.members
                    )
                    self.took.append((node, wanted.shard))
                    self._in_sync_at[node, wanted.shard] = self._now + SYNC_S
            self.at_once_max = max(self.at_once_max, *map(len, self.behind().values()))


def test_a_claim_gets_no_shorter_when_two_nodes_are_lost() -> None:
    """With fewer members, fewer of them would be enough for a confirm."""
    lost = Cluster(replicas=3, nodes=4)
    lost.claims, lost.records = {0: claim_of(0, 1, 2)}, {0: {0}}
    lost.alive = {0, 3}
    lost.run(AFTER_S + 60)
    assert sorted(lost.claims[0].members) == [0, 2, 3]
    lost = Cluster(replicas=3, nodes=5)
    lost.claims, lost.records = {0: claim_of(0, 1, 2)}, {0: {0}}
    lost.alive = {0, 3, 4}
    lost.run(AFTER_S + 60)
    assert sorted(lost.claims[0].members) == [0, 3, 4]


def test_a_node_that_is_lost_is_replaced_where_its_copy_is_not_needed() -> None:
    lost = Cluster(replicas=2, nodes=4)
    lost.claims = {shard: claim_of(0, 1) for shard in range(6)}
    lost.records = {shard: {0, 1} for shard in range(6)}
    lost.alive = {0, 2, 3}
    lost.run(AFTER_S + 1)
    assert lost.took == [], "it is in sync, so that it may be needed"
    lost.records = {shard: {0} for shard in range(6)}
    lost.run(1)
    assert all(len(shards) <= 1 for shards in lost.behind().values()), "one at a time"
    lost.run(60)
    assert all(len(claim.members) == 2 and 1 not in claim.members for claim in lost.claims.values())
    assert {node for node, _ in lost.took} == {2, 3}
    assert lost.at_once_max == 1


def test_a_home_that_is_lost_keeps_its_place() -> None:
    lost = Cluster(replicas=2, nodes=4)
    lost.claims, lost.records = {0: claim_of(0, 1)}, {0: {1}}
    lost.alive = {1, 2, 3}
    lost.run(AFTER_S - 1)
    assert lost.took == []
    lost.run(60)
    assert len(lost.took) == 1
    assert lost.claims[0].members[:2] == [0, 1]
    assert len(lost.claims[0].members) == 3
    lost.alive.add(0)
    lost.run(60)
    assert len(lost.claims[0].members) == 3


def test_a_node_that_comes_back_in_time_is_not_replaced() -> None:
    lost = Cluster(replicas=2, nodes=3)
    lost.claims, lost.records = {0: claim_of(0, 1)}, {0: {0}}
    for _ in range(3):
        lost.alive = {0, 2}
        lost.run(AFTER_S - 1)
        lost.alive = {0, 1, 2}
        lost.run(1)
    assert lost.took == []


def test_a_node_that_is_forgotten_is_replaced_at_once_also_without_a_time() -> None:
    lost = Cluster(replicas=2, nodes=3, after_s=0)
    lost.claims, lost.records = {0: claim_of(0, 1)}, {0: {0}}
    lost.alive = {0, 2}
    lost.run(100 * AFTER_S)
    assert lost.took == []
    lost.members.discard(1)
    lost.run(1)
    assert lost.claims[0].members == [0, 2]


def test_a_home_that_is_forgotten_is_replaced_and_the_next_home_keeps_its_copy() -> None:
    lost = Cluster(replicas=2, nodes=3)
    lost.claims, lost.records = {0: claim_of(0, 1)}, {0: {1}}
    lost.alive = {1, 2}
    lost.members.discard(0)
    lost.claims = {0: Copies(2, 1, in_sync=[1], members=[0, 1])}
    lost.run(60)
    assert lost.claims[0].members == [1, 2] and lost.records[0] == {1, 2}
    assert lost.took == [(2, 0)]


def test_nobody_is_replaced_while_nobody_leads_or_no_other_node_is_there() -> None:
    lost = Cluster(replicas=2, nodes=3)
    lost.claims, lost.records = {0: claim_of(0, 1)}, {0: {1}}
    lost.alive = {2}
    lost.run(10 * AFTER_S)
    assert lost.took == [], "nobody leads"
    lost.alive, lost.records = {0}, {0: {0}}
    lost.run(10 * AFTER_S)
    assert lost.took == [], "no other node"


def put(key: str, record: Copies | None, revision: int = 1) -> Pair:
    return Pair(key, encoded(record) if record is not None else b"", revision, 1, 0)


def claim_of(home: int, *others: int) -> Copies:
    return Copies(term=1, leader=home, in_sync=[home], members=[home, *others])


def seats_of(replicas: int, *pairs: Pair) -> dict[int, list[int]]:
    """Return for each of three nodes the shards that it is to take a copy of."""
    found = {}
    for node in range(3):
        seats = Seats(KEYS, node, replicas)
        seats.take(Listing(pairs, 7))
        found[node] = [wanted.shard for wanted in seats.wanted()]
    return found


def test_the_next_nodes_that_live_take_copies() -> None:
    alive = [put(KEYS.node(node), None) for node in range(3)]
    value = msgspec.json.encode(Record(1, "n0", 1, "s", {"n0": "copy"}))
    led = [Pair(KEYS.copies_of(shard), value, 1, 1, 0) for shard in range(4)]
    claims = [put(KEYS.shard(shard), claim_of(0)) for shard in range(4)]
    assert seats_of(1, *alive, *led, *claims) == {0: [], 1: [], 2: []}
    # One after the other, so that not all copies lie on one node.
    assert seats_of(2, *alive, *led, *claims) == {0: [], 1: [0, 2], 2: [1, 3]}
    assert seats_of(3, *alive, *led, *claims) == {0: [], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}
    assert seats_of(3, *alive[:2], *led, *claims)[1] == [0, 1, 2, 3]
    assert seats_of(3, *alive, *claims) == {0: [], 1: [], 2: []}, "nobody leads by these rules"
    taken = put(KEYS.shard(0), claim_of(2, 0))
    assert seats_of(2, *alive, *led, taken) == {0: [], 1: [], 2: []}
    assert seats_of(3, *alive, *led, taken) == {0: [], 1: [0], 2: []}


def test_a_node_knows_the_copies_that_it_has() -> None:
    seats = Seats(KEYS, 1, 2)
    seats.take(Listing((put(KEYS.shard(0), claim_of(0, 1)), put(KEYS.shard(1), claim_of(1, 0))), 7))
    assert seats.taken() == {0}
    seats.take(Changes((Deleted(KEYS.shard(0), 8), put(KEYS.shard(2), claim_of(2, 1))), 8))
    assert seats.taken() == {2}
