"""Claims in etcd: no number or shard is that of two nodes, and no node loses its own."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import msgspec
import pytest

from shardmq.cluster.etcd import Etcd
from shardmq.cluster.membership import (
    UNCLAIMED,
    Claims,
    NoPlace,
    Place,
    Seats,
    read_place,
    write_place,
)
from shardmq.cluster.pairs import Changes, Delete, Deleted, Listing, Pair, Put
from shardmq.cluster.records import SHARDS_MAX, BadRecord, Copies, KeyNames, encoded

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
    with pytest.raises(NoPlace, match="lives"):
        await claims.forget(gone.number)
    await etcd.transact([], [Delete(keys.node(gone.number))])
    await claims.forget(gone.number, only_check=True)
    await claims.forget(gone.number)
    left = {pair.key.removeprefix(keys.all) for pair in (await etcd.range(keys.all)).pairs}
    assert left == {"members/1", "shards/2", "shards/3"}
    next_one = await claim(etcd, new_place(cluster, "c"))
    assert (next_one.number, next_one.shards) == (gone.number, gone.shards)


async def test_a_node_whose_shards_others_have_copies_of_is_not_forgotten(
    etcd: Etcd, cluster: str
) -> None:
    place = await claim(etcd, new_place(cluster, "a"), shards=1)
    record = Copies(term=1, leader=place.number, in_sync=[place.number], members=[place.number, 7])
    await etcd.transact([], [Put(KeyNames(cluster).shard(place.shards[0]), encoded(record))])
    with pytest.raises(NoPlace, match="copies on other nodes"):
        await Claims(etcd, cluster).forget(place.number, only_check=True)


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
        found[node] = [shard for shard, _, _ in seats.wanted()]
    return found


def test_the_next_nodes_that_live_take_copies() -> None:
    alive = [put(KEYS.node(node), None) for node in range(3)]
    led = [put(KEYS.copies_of(shard), None) for shard in range(4)]
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
