"""Where queues live: the same answer for ever, evenly, and stable when shards are added."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.routing.hashing import hash64, jump
from shardmq.broker.routing.placement import NodeShards, Placement, place


@pytest.mark.row("K9")
@given(st.text(max_size=20), st.text(max_size=20), st.integers(1, 64))
def test_a_new_shard_takes_queues_and_moves_none_between_old_ones(vhost, queue, shards) -> None:
    before, after = place(vhost, queue, shards), place(vhost, queue, shards + 1)
    assert 0 <= before < shards
    assert after in (before, shards)


@given(st.integers(2, 16))
def test_no_shard_has_much_more_than_its_part(shards) -> None:
    counts = Counter(place("/", f"queue-{n}", shards) for n in range(4_000))
    assert len(counts) == shards
    assert max(counts.values()) < 1.5 * 4_000 / shards


def test_hashes_and_places_are_the_same_on_every_day() -> None:
    assert hash64("a") == hash64(b"a") == 0x2F42665B399EF840
    assert [place("/", f"q{n}", 8) for n in range(8)] == PLACES


@given(st.integers(0, 2**64 - 1))
def test_one_bucket_takes_everything(key) -> None:
    assert jump(key, 1) == 0


PLACES = [1, 7, 5, 5, 6, 2, 3, 3]


# -- in a cluster ----------------------------------------------------------------------------------

NODES = st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=5).map(
    lambda rows: [
        NodeShards(number, f"n{number}", tuple(range(number * 10, number * 10 + shards)), is_alive)
        for number, (is_alive, shards) in enumerate([(True, 2), *rows])
    ]
)
NAMES = st.frozensets(st.sampled_from([f"n{number}" for number in range(6)]))


@pytest.mark.row("K9")
@given(NODES, NAMES, st.text(max_size=5))
def test_new_queues_come_to_nodes_that_live_and_are_not_drained(
    nodes: list[NodeShards], drained: frozenset[str], queue: str
) -> None:
    placement = Placement([0, 1], nodes)
    places = placement.without(drained)
    alive = {node.name: node.shards for node in nodes if node.is_alive and node.shards}
    usable = {name: shards for name, shards in alive.items() if name not in drained} or alive
    assert set(places.shards) == {shard for shards in usable.values() for shard in shards}
    assert places.by_name("/", queue) == places.shards[place("/", queue, len(places.shards))]
    for node in places.nodes:
        shard = places.at_node(node, "/", queue)
        assert shard in usable.get(node.name, places.shards)
    assert places.at_node(None, "/", queue) == places.by_name("/", queue)


@pytest.mark.row("K9", "C1.14")
@given(NODES, st.lists(st.booleans(), max_size=40))
def test_balanced_keeps_nodes_and_their_shards_level(
    nodes: list[NodeShards], choices: list[bool]
) -> None:
    places = Placement([0, 1], nodes).without(frozenset())
    counts: Counter[int] = Counter()
    for _ in choices:
        counts[places.with_fewest(counts.__getitem__)] += 1
    loads = [
        [counts[shard] for shard in node.shards] for node in nodes if node.is_alive and node.shards
    ]
    assert sum(map(sum, loads)) == len(choices)
    assert max(map(sum, loads)) - min(map(sum, loads)) <= 1
    assert all(max(of_node) - min(of_node) <= 1 for of_node in loads)


def test_without_a_cluster_balanced_and_near_act_over_all_shards() -> None:
    places = Placement(range(4)).without(frozenset())
    counts: Counter[int] = Counter()
    for _ in range(10):
        counts[places.with_fewest(counts.__getitem__)] += 1
    assert sorted(counts.values()) == [2, 2, 3, 3]
    assert places.at_node(None, "/", "q") == place("/", "q", 4)
    assert places.shard_count == 4


def test_a_node_that_is_down_counts_and_gets_nothing() -> None:
    nodes = [NodeShards(0, "a", (0, 1)), NodeShards(1, "b", (2,), is_alive=False)]
    places = Placement([], nodes).without(frozenset())
    assert (places.shards, places.shard_count) == ((0, 1), 3)


def test_a_change_is_one_only_if_something_differs() -> None:
    placement = Placement([0])
    nodes = [NodeShards(0, "a", (0,)), NodeShards(1, "b", (1,))]
    assert placement.change(nodes)
    assert placement.without(frozenset()).shards == (0, 1)
    assert not placement.change(list(nodes))
    assert placement.change([nodes[0], nodes[1]._replace(is_alive=False)])
    assert placement.without(frozenset()).shards == (0,)
