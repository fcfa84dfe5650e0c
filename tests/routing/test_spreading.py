"""Each message has one destination: fair, stable, and the same in Python and in the packer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    BindingDelete,
    BindingPut,
    ExchangeDelete,
    ExchangePut,
    QueueDelete,
    QueuePut,
    VhostPut,
)
from shardmq.broker.routing import RoutingTable, goes_by_key, route_message, spread_of
from shardmq.broker.routing.hashing import jump_weighted, key_hash, rendezvous_weighted
from shardmq.broker.routing.matching import Message, Target
from shardmq.broker.routing.spreading import (
    Chance,
    ConsistentHash,
    ModulusHash,
    Spread,
    exchange_fault,
    weight_fault,
)
from shardmq.shardd.wire import codec
from tests.support.catalogs import rebuilt

KEYS = 20_000
# Chi-square over n - 1 degrees of freedom stays below this but once in a million (Wilson and
# Hilferty).
Z = 4.75


def chi_square_limit(freedom: int) -> float:
    return freedom * (1 - 2 / (9 * freedom) + Z * (2 / (9 * freedom)) ** 0.5) ** 3


def bound(spread: Spread, count: int, key: str = "1") -> Spread:
    for i in range(count):
        spread.add(key, {}, Target("queue", f"q{i}"))
    return spread


def owner(spread: Spread, message: Message) -> str:
    (target,) = spread.match(message)
    return target.name


@given(st.binary(max_size=255))
def test_the_packer_hashes_as_plain_python_does(key: bytes) -> None:
    assert codec.key_hash(key) == key_hash(key)


@given(
    st.integers(0, (1 << 64) - 1),
    st.lists(
        st.tuples(st.integers(1, 10000), st.integers(0, (1 << 64) - 1)), min_size=1, max_size=20
    ),
    st.booleans(),
)
def test_the_packer_chooses_as_plain_python_does(
    hashed: int, members: list[tuple[int, int]], equal: bool
) -> None:
    if equal:
        members = [(7, seed) for _, seed in members]
    assert codec.winner(hashed, members) == rendezvous_weighted(hashed, members)


@given(st.integers(0, (1 << 64) - 1), st.lists(st.integers(1, 10000), min_size=1, max_size=64))
def test_the_packer_jumps_as_plain_python_does(hashed: int, weights: list[int]) -> None:
    assert codec.jump_winner(hashed, weights) == jump_weighted(hashed, weights)


def jump() -> Spread:
    return ConsistentHash({"x-algorithm": "jump"})


KINDS = [ConsistentHash, jump, ModulusHash, Chance]


@pytest.mark.row("E3.9")
@pytest.mark.parametrize(
    "count",
    [
        *(2, 3, 5, 8, 16, 33, 64),
        *(pytest.param(count, marks=pytest.mark.torture) for count in (4, 7, 11, 24, 48)),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_equal_at_weight_1(kind: Callable[[], Spread], count: int) -> None:
    spread, chance = bound(kind(), count), random.Random(count)
    keys = [Message(f"customer-{i}", draw=chance.getrandbits(64)) for i in range(KEYS)]
    shares = Counter(owner(spread, key) for key in keys)
    expected = KEYS / count
    chi_square = sum((shares[f"q{i}"] - expected) ** 2 / expected for i in range(count))
    assert chi_square < chi_square_limit(count - 1)


@pytest.mark.row("E3.9")
@pytest.mark.parametrize("count", [2, 8, 64])
@pytest.mark.parametrize("kind", [ConsistentHash, jump, ModulusHash])
def test_shares_are_equal_over_the_names_of_shard_queues_too(
    kind: Callable[[], Spread], count: int
) -> None:
    spread = kind()
    for i in range(count):
        spread.add("1", {}, Target("queue", f"sharding: images - shardmq@localhost - {i}"))
    shares = Counter(owner(spread, Message(str(i))) for i in range(KEYS))
    expected = KEYS / count
    chi_square = sum(
        (shares[each.target.name] - expected) ** 2 / expected for each in spread.destinations
    )
    assert chi_square < chi_square_limit(count - 1)


@pytest.mark.row("E3.2", "E1.7")
@pytest.mark.parametrize("kind", [ConsistentHash, jump])
def test_shares_are_as_the_weights(kind: Callable[[], Spread]) -> None:
    spread = kind()
    for name, weight in (("one", "1"), ("three", "3"), ("six", "6")):
        spread.add(weight, {}, Target("queue", name))
    shares = Counter(owner(spread, Message(str(i))) for i in range(KEYS))
    for name, part in (("one", 0.1), ("three", 0.3), ("six", 0.6)):
        assert abs(shares[name] / KEYS - part) < 4 * (part * (1 - part) / KEYS) ** 0.5
    assert spread.shares() == [0.1, 0.6, 0.3]


@pytest.mark.row("E3.5")
@settings(max_examples=30)
@given(st.integers(1, 40), st.sampled_from(["1", "7"]), st.booleans(), st.integers(0, 1 << 30))
def test_one_more_takes_its_share_and_moves_nothing_between_the_others(
    count: int, weight: str, jumps: bool, salt: int
) -> None:
    spread = bound(jump() if jumps else ConsistentHash(), count, weight)
    keys = [Message(f"{salt}.{i}") for i in range(300)]
    before = [owner(spread, key) for key in keys]
    spread.add(weight, {}, Target("queue", f"q{count}"))
    after = [owner(spread, key) for key in keys]
    moved = [now for was, now in zip(before, after, strict=True) if was != now]
    assert set(moved) <= {f"q{count}"}
    part = 1 / (count + 1)
    assert abs(len(moved) / 300 - part) < 6 * (part * (1 - part) / 300) ** 0.5


@pytest.mark.row("E3.7")
@settings(max_examples=30)
@given(st.integers(2, 40), st.integers(0, 39), st.integers(0, 1 << 30))
def test_without_one_of_n_only_its_keys_move(count: int, gone: int, salt: int) -> None:
    gone %= count
    spread = bound(ConsistentHash(), count)
    keys = [Message(f"{salt}.{i}") for i in range(300)]
    before = [owner(spread, key) for key in keys]
    spread.remove("1", {}, Target("queue", f"q{gone}"))
    after = [owner(spread, key) for key in keys]
    assert all(was == now for was, now in zip(before, after, strict=True) if was != f"q{gone}")
    assert f"q{gone}" not in after
    moved, part = before.count(f"q{gone}"), 1 / count
    assert abs(moved / 300 - part) < 6 * (part * (1 - part) / 300) ** 0.5


def routed(catalog: Catalog, keys: int = 200) -> list[tuple[str, ...]]:
    table = catalog.vhosts["/"].table
    return [route_message(table, "h", Message(str(i))).queues for i in range(keys)]


def hash_of_three(*more: ExchangePut | QueuePut) -> Catalog:
    catalog = Catalog()
    queues = [QueuePut("/", f"q{i}", i, 0) for i in range(3)]
    for change in (VhostPut("/"), ExchangePut("/", "h", "x-consistent-hash"), *queues, *more):
        catalog.apply(change)
    for i in range(3):
        catalog.apply(BindingPut("/", "h", "queue", f"q{i}", "1"))
    return catalog


@pytest.mark.row("E3.7", "E3.10")
def test_a_destination_exchange_that_is_deleted_leaves_no_hole() -> None:
    catalog = hash_of_three(ExchangePut("/", "behind", "fanout"), QueuePut("/", "far", 9, 0))
    without = routed(catalog)
    catalog.apply(BindingPut("/", "behind", "queue", "far", ""))
    catalog.apply(BindingPut("/", "h", "exchange", "behind", "5"))
    assert ("far",) in routed(catalog)
    catalog.apply(ExchangeDelete("/", "behind"))
    assert routed(catalog) == without


@pytest.mark.row("E3.7")
@pytest.mark.parametrize("left", ["1", "2"])
def test_of_two_bindings_to_one_queue_the_other_one_keeps_it(left: str) -> None:
    catalog = hash_of_three()
    catalog.apply(BindingPut("/", "h", "queue", "q0", "2"))
    catalog.apply(BindingDelete("/", "h", "queue", "q0", "1" if left == "2" else "2"))
    assert set(routed(catalog)) == {("q0",), ("q1",), ("q2",)}


@pytest.mark.row("E3.7", "E3.11")
def test_a_queue_that_is_deleted_leaves_no_hole() -> None:
    catalog = hash_of_three()
    catalog.apply(QueueDelete("/", "q1"))
    assert set(routed(catalog)) == {("q0",), ("q2",)}


@pytest.mark.row("E3.8")
@given(st.permutations(range(3)))
def test_every_copy_of_the_catalog_routes_alike(order: list[int]) -> None:
    catalog = hash_of_three()
    changes = catalog.changes()
    bindings = [change for change in changes if isinstance(change, BindingPut)]
    others = [change for change in changes if not isinstance(change, BindingPut)]
    copy = rebuilt(0, [*others, *(bindings[i] for i in order)])
    assert routed(copy) == routed(catalog)


@pytest.mark.row("E3.8")
@given(st.permutations(range(8)), st.integers(0, 7))
def test_the_map_depends_on_the_bindings_only_not_on_how_they_came_about(
    order: list[int], again: int
) -> None:
    straight = bound(ConsistentHash(), 8)
    roundabout = ConsistentHash()
    for i in order:
        roundabout.add("1", {}, Target("queue", f"q{i}"))
    roundabout.add("1", {"n": 1}, Target("queue", f"q{again}"))
    roundabout.remove("1", {}, Target("queue", f"q{again}"))
    assert roundabout.destinations == straight.destinations


@pytest.mark.row("E3.6")
def test_a_destination_bound_twice_counts_once_and_stays_until_the_last_binding_goes() -> None:
    spread = bound(ConsistentHash(), 2)
    spread.add("9", {}, Target("queue", "q0"))
    assert [each.weight for each in spread.destinations] == [9, 1]
    spread.remove("9", {}, Target("queue", "q0"))
    assert [each.weight for each in spread.destinations] == [1, 1]


@pytest.mark.row("E3.3")
@pytest.mark.parametrize(
    ("arguments", "same", "other"),
    [
        ({"hash-header": "h"}, Message("b", {"h": "x"}), {"headers": {"h": "y"}}),
        ({"x-hash-on": "h"}, Message("b", {"h": 5}), {"headers": {"h": 6}}),
        (
            {"hash-property": "message_id"},
            Message("b", {}, {"message_id": "x"}),
            {"properties": {"message_id": "y"}},
        ),
        (
            {"hash-property": "timestamp"},
            Message("b", {}, {"timestamp": 1}),
            {"properties": {"timestamp": 2}},
        ),
    ],
)
def test_a_header_or_property_decides_instead_of_the_key(
    arguments: dict, same: Message, other: dict
) -> None:
    spread = bound(ConsistentHash(arguments), 64)
    assert not spread.by_key
    assert {owner(spread, same._replace(key=str(i))) for i in range(20)} == {owner(spread, same)}
    assert owner(spread, same._replace(**other)) != owner(spread, same)  # of 64, for these values


@pytest.mark.row("E3.4")
def test_messages_without_the_header_go_to_one_destination() -> None:
    spread = bound(ConsistentHash({"hash-header": "h"}), 8)
    assert len({owner(spread, Message(str(i))) for i in range(50)}) == 1


@pytest.mark.row("E3.10")
@pytest.mark.parametrize("kind", KINDS)
def test_without_bindings_there_is_no_destination(kind: Callable[[], Spread]) -> None:
    assert not kind().match(Message("k"))


@pytest.mark.row("E3.2")
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("0", "The binding key must be greater than 0"),
        ("-1", "The binding key must be greater than 0"),
        ("10001", "The binding key must not exceed 10000"),
        ("1.5", 'The binding key must be an integer: <<"1.5">>'),
        ("", "The binding key must be an integer: <<>>"),
        ("10000", None),
    ],
)
def test_a_weight_that_cannot_be_is_named(key: str, text: str | None) -> None:
    assert weight_fault("x-consistent-hash", key) == text
    assert weight_fault("x-modulus-hash", key) is None


@pytest.mark.row("E3.3")
def test_what_cannot_be_hashed_is_named() -> None:
    both = {"hash-header": "h", "hash-property": "message_id"}
    assert (
        exchange_fault("x-consistent-hash", both)
        == "hash-header and hash-property are mutually exclusive"
    )
    assert (
        exchange_fault("x-consistent-hash", {"hash-property": "app_id"})
        == "Unsupported property: app_id"
    )
    assert exchange_fault("x-consistent-hash", {"hash-property": "timestamp"}) is None
    assert exchange_fault("direct", both) is None
    two = {"hash-header": "a", "x-hash-on": "b"}
    assert (
        exchange_fault("x-consistent-hash", two)
        == "hash-header and x-hash-on are mutually exclusive"
    )
    assert exchange_fault("x-consistent-hash", {"hash-header": "a", "x-hash-on": "a"}) is None
    assert (
        exchange_fault("x-consistent-hash", {"x-algorithm": "best"})
        == "Unsupported x-algorithm: best"
    )
    assert exchange_fault("x-consistent-hash", {"x-algorithm": "jump"}) is None


def test_only_an_exchange_that_leads_to_queues_alone_is_left_to_the_packer() -> None:
    table = RoutingTable.empty().with_exchange("h", "x-consistent-hash").with_queue("q")
    assert spread_of(table, "h") is None
    table = table.with_binding("h", "queue", "q", "1")
    found = spread_of(table, "h")
    assert found is not None and [each.target.name for each in found.destinations] == ["q"]
    assert goes_by_key(table, "h")
    table = table.with_exchange("r", "x-random").with_binding("r", "exchange", "h", "")
    assert spread_of(table, "r") is None
    assert not goes_by_key(table, "r")
    assert route_message(table, "r", Message("k", draw=3)).queues == ("q",)
