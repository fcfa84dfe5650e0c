"""Sets of shards: which shards have how many copies, and which of them suit a queue."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.cluster.etcd import Etcd
from shardmq.cluster.membership import Claims, NoPlace, Place, Seats
from shardmq.cluster.pairs import Changes, Deleted, Listing, Pair, Put
from shardmq.cluster.records import BadRecord, Copies, KeyNames
from shardmq.cluster.records import encoded as claim_encoded
from shardmq.cluster.replicas import (
    REPLICAS_MAX,
    Replicas,
    ReplicasOfShards,
    ShardSet,
    assigned,
    decoded,
    encoded,
    of_settings,
    shard_set,
)
from shardmq.cluster.rules import Record
from shardmq.supervisor.config import Cluster

KEYS = KeyNames("tea")
NUMBERS = st.integers(1, REPLICAS_MAX).flatmap(
    lambda count: st.integers(0, count).map(lambda least: Replicas(count, least))
)
SHARDS = st.frozensets(st.integers(0, 20), min_size=1, max_size=8)
_clusters = itertools.count(1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1:1", ShardSet(1, Replicas(1))),
        ("2:5/3", ShardSet(2, Replicas(5, 3))),
        ("64:7/7", ShardSet(64, Replicas(7, 7))),
        ("1:2/0", ShardSet(1, Replicas(2))),
    ],
)
def test_a_set_is_written_as_shards_and_replicas(text: str, found: ShardSet) -> None:
    assert shard_set(text) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not SHARDS:REPLICAS"),
        ("3", "is not SHARDS:REPLICAS"),
        ("1:3/", "is not SHARDS:REPLICAS"),
        ("-1:3", "is not SHARDS:REPLICAS"),
        ("1:٣", "is not SHARDS:REPLICAS"),
        ("0:3", "expected 1 shard or more, and 1 to 7 replicas"),
        ("1:0", "expected 1 shard or more, and 1 to 7 replicas"),
        ("1:8", "expected 1 shard or more, and 1 to 7 replicas"),
        ("1:2/3", "min_in_sync 3 is more than 2 replicas"),
    ],
)
def test_a_wrong_set_is_refused_by_the_settings_too(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        shard_set(text)
    if text:
        with pytest.raises(msgspec.ValidationError, match=f"shard_sets: .*{why}"):
            msgspec.convert({"shard_sets": [text]}, Cluster)


@given(NUMBERS)
def test_numbers_come_back_from_etcd(numbers: Replicas) -> None:
    assert decoded("k", encoded(numbers)) == numbers
    assert 1 <= numbers.least <= numbers.count


@pytest.mark.parametrize("value", [b"", b"[]", b'{"count":0}', b'{"count":2,"min_in_sync":3}'])
def test_wrong_numbers_in_etcd_are_named(value: bytes) -> None:
    with pytest.raises(BadRecord, match="replicas/3"):
        decoded(KEYS.replicas_of(3), value)


# -- which shards are in a set ---------------------------------------------------------------------


def likeness(found: dict[int, Replicas], before: dict[int, Replicas]) -> tuple[int, int, int]:
    """Return how many shards of sets stay, how many keep their count, and how many were in a set.

    The first number counts most.
    """
    known = [(before[shard], numbers) for shard, numbers in found.items() if shard in before]
    stay = sum(then == now for then, now in known)
    return stay, sum(then.count == now.count for then, now in known), len(known)


def most_alike(
    shards: frozenset[int], sets: list[ShardSet], before: dict[int, Replicas]
) -> tuple[int, int, int]:
    """Return the likeness of the sets that are most like those before, found slowly."""
    places = [each.replicas for each in sets for _ in range(each.shards)]
    return max(
        likeness(dict(zip(chosen, places, strict=True)), before)
        for chosen in itertools.permutations(sorted(shards), len(places))
    )


FEW = st.frozensets(st.integers(0, 9), min_size=1, max_size=5)
FEW_NUMBERS = st.sampled_from([Replicas(1), Replicas(2), Replicas(3, 2), Replicas(3, 3)])


@given(
    FEW,
    st.lists(st.builds(ShardSet, st.integers(1, 3), FEW_NUMBERS), max_size=3),
    st.dictionaries(st.integers(0, 9), FEW_NUMBERS, max_size=6),
)
def test_the_sets_have_their_shards_and_are_most_like_those_before(
    shards: frozenset[int], sets: list[ShardSet], before: dict[int, Replicas]
) -> None:
    wanted = sorted((n for each in sets for n in [each.replicas] * each.shards), key=repr)
    if len(wanted) > len(shards):
        with pytest.raises(ValueError, match="the sets have"):
            assigned(shards, sets, before)
        return
    found = assigned(shards, sets, before)
    assert found.keys() <= shards
    assert sorted(found.values(), key=repr) == wanted
    assert likeness(found, before) == most_alike(shards, sets, before)
    assert assigned(shards, sets, found) == found, "nothing has changed"
    more = {*shards, 30}
    assert assigned(more, sets, found) == found, "a new shard is in no set"


@pytest.mark.parametrize(
    ("before", "sets", "after"),
    [
        ({}, [ShardSet(1, Replicas(5, 3))], {7: Replicas(5, 3)}),
        # Its numbers change, and shard 7 came later: it keeps its shard, which has the queues.
        ({2: Replicas(5, 3)}, [ShardSet(1, Replicas(5, 2))], {2: Replicas(5, 2)}),
        ({2: Replicas(5, 3)}, [ShardSet(1, Replicas(4))], {2: Replicas(4)}),
        (
            {1: Replicas(2), 2: Replicas(5, 3)},
            [ShardSet(1, Replicas(2, 2)), ShardSet(2, Replicas(5, 2))],
            {1: Replicas(2, 2), 2: Replicas(5, 2), 7: Replicas(5, 2)},
        ),
    ],
)
def test_a_set_whose_numbers_change_keeps_its_shards(
    before: dict[int, Replicas], sets: list[ShardSet], after: dict[int, Replicas]
) -> None:
    assert assigned((0, 1, 2, 7), sets, before) == after


@pytest.fixture
def place() -> Place:
    """Return a place in a cluster that no other test uses."""
    return Place(f"sets-{next(_clusters)}", "a", "identity of a")


async def test_the_home_writes_the_numbers_of_its_shards_and_takes_them_back(
    etcd: Etcd, place: Place
) -> None:
    claims, keys = Claims(etcd, place.cluster), KeyNames(place.cluster)
    place = await claims.shards(await claims.number(place), 3, ())
    assert await claims.replicas(place, []) == {}
    sets = [ShardSet(1, Replicas(1)), ShardSet(1, Replicas(5, 3))]
    found = await claims.replicas(place, sets)
    assert found == {2: Replicas(1), 1: Replicas(5, 3)}
    pairs = (await etcd.range(keys.replicas)).pairs
    assert {pair.key: decoded(pair.key, pair.value) for pair in pairs} == {
        keys.replicas_of(shard): numbers for shard, numbers in found.items()
    }
    assert await claims.replicas(place, sets[::-1]) == found
    assert (await etcd.range(keys.replicas)).pairs == pairs, "nothing was written"
    # With one replica in general, the shards of larger sets have copies.
    assert (await claims.copied(place, 1, found))[0] == [1]
    assert (await claims.copied(place, 2, found))[0] == [0, 1]
    other = Put(keys.replicas_of(9), encoded(Replicas(2)))  # of another node
    await etcd.transact([], [other])
    assert await claims.replicas(place, []) == {}
    assert [pair.key for pair in (await etcd.range(keys.replicas)).pairs] == [other.key]
    with pytest.raises(NoPlace, match="cluster.shard_sets: the sets have 4 shards, the node has 3"):
        await claims.replicas(place, [ShardSet(4, Replicas(1))])


# -- who takes copies ------------------------------------------------------------------------------


def put(key: str, value: bytes) -> Pair:
    return Pair(key, value, 1, 1, 0)


def test_nodes_take_as_many_copies_as_the_set_of_a_shard_says() -> None:
    led = encoded_record("n0")
    pairs = [put(KEYS.node(node), b"") for node in range(4)]
    for shard in range(3):
        pairs += [
            put(KEYS.copies_of(shard), led),
            put(KEYS.shard(shard), claim_encoded(Copies(1, 0, [0], [0]))),
        ]
    pairs += [
        put(KEYS.replicas_of(1), encoded(Replicas(1))),
        put(KEYS.replicas_of(2), encoded(Replicas(4))),
    ]
    takers: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for node in range(4):
        seats = Seats(KEYS, node, 2)
        seats.take(Listing(tuple(pairs), 7))
        for wanted in seats.wanted():
            takers[wanted.shard].append(node)
        seats.take(Changes((Deleted(KEYS.replicas_of(2), 8),), 8))
        assert len([w for w in seats.wanted() if w.shard == 2]) <= 1
    assert {shard: len(nodes) for shard, nodes in takers.items()} == {0: 1, 1: 0, 2: 3}


def encoded_record(leader: str) -> bytes:
    return msgspec.json.encode(Record(1, leader, 1, "s", {leader: "copy"}))


# -- which shards suit a queue ---------------------------------------------------------------------


@given(SHARDS, st.dictionaries(st.integers(0, 20), NUMBERS, max_size=12), NUMBERS, NUMBERS)
def test_a_shard_with_too_few_copies_is_taken_only_if_no_other_has_more(
    shards: frozenset[int], in_sets: dict[int, Replicas], others: Replicas, asked: Replicas
) -> None:
    numbers = ReplicasOfShards(in_sets, others)
    found = numbers.nearest(asked, tuple(sorted(shards)))
    assert found and list(found) == sorted(set(found)) and set(found) <= shards
    if not in_sets:
        assert set(found) == shards
        return
    enough = [s for s in shards if numbers.of(s).count >= asked.count]
    safe = [s for s in enough if numbers.of(s).least >= asked.least]
    for shard in found:
        has = numbers.of(shard)
        if safe:
            assert has.count >= asked.count and has.least >= asked.least
            assert has.count == min(numbers.of(s).count for s in safe)
        elif enough:
            assert has.count >= asked.count
            assert has.least == max(numbers.of(s).least for s in enough)
        else:
            assert has.count == max(numbers.of(s).count for s in shards)
    kinds = {(numbers.of(s).count, numbers.of(s).least) for s in found}
    assert len(kinds) == 1
    alike = {s for s in shards if (numbers.of(s).count, numbers.of(s).least) in kinds}
    assert set(found) == alike, "all shards of a kind are taken alike"


def test_settings_that_allow_fewer_copies_than_are_to_be_in_sync_ask_for_all() -> None:
    assert of_settings(1, 2) == Replicas(1, 1)
    assert of_settings(3, 2) == Replicas(3, 2) and of_settings(3, 0) == Replicas(3)
