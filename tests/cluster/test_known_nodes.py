"""The copies of what etcd has that a controller and a shard keep, without an etcd."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardmq.broker.controller.config import Cluster, ControllerConfig
from shardmq.broker.controller.nodes import node as controllers
from shardmq.broker.controller.nodes.nodes import Nodes
from shardmq.cluster.following import FollowerOfCopies
from shardmq.cluster.membership import Member, Refused, Seats, members_key, refused_key
from shardmq.cluster.pairs import Changes, Deleted, Listing, Pair
from shardmq.cluster.records import Copies, KeyNames, Node, encoded
from shardmq.cluster.replicas import REPLICAS_MAX
from shardmq.cluster.rules import Record
from shardmq.cluster.secret import keys_of
from shardmq.cluster.settings import EtcdSettings
from shardmq.shardd.config import CopiesConfig, ShardConfig
from shardmq.shardd.seat import Seat
from shardmq.shardd.snapshot import LINKS

KEYS = KeyNames("tea")
NO_DIRECTORY = "/dev/null/nowhere"  # nobody can make it, root neither
# Of no use at any key: empty, Latin-1, nested too deeply, another type, and no JSON.
BAD_VALUES = [b"", b'{"name":"caf\xe9"}', b'{"x":' + b"[" * 100_000, b"[]", b"{"]


def node(number: int) -> Node:
    return Node(number, f"n{number}", "127.0.0.1", {"cluster": 1000 + number}, "1", 1, 1)


def pair(key: str, value: bytes, revision: int = 2) -> Pair:
    return Pair(key, value, revision, revision)


class Watching:
    """An etcd that says these news, and a controller that looks at all nodes after each."""

    def __init__(self, *news: Listing | Changes) -> None:
        self._news = news
        self.seen: list[list[str]] = []
        self.nodes = Nodes(self, KEYS, self.look, own=1)  # type: ignore[arg-type]

    async def watch(self, prefix: str):  # type: ignore[no-untyped-def]
        for each in self._news:
            yield each

    def look(self) -> None:
        self.seen.append([each.name for each in self.nodes.nodes.values()])
        self.nodes.address("nobody")
        self.nodes.shards()
        self.nodes.known()


@pytest.mark.parametrize("value", BAD_VALUES)
@pytest.mark.parametrize(
    "key",
    [KEYS.node(9), f"{members_key(KEYS)}9", KEYS.shard(9), KEYS.copies_of(9), KEYS.controller],
)
async def test_a_bad_value_does_not_end_a_controller(key: str, value: bytes) -> None:
    good = pair(KEYS.node(1), encoded(node(1)))
    watching = Watching(
        Listing((good, pair(key, value)), 3), Changes((pair(key, value, 4), good), 4)
    )
    await watching.nodes.run()
    assert len(watching.seen) == 2


async def test_a_node_that_etcd_has_no_more_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its data may have been put back to a state in which the node was not there yet."""
    alive = pair(KEYS.node(1), encoded(node(1)))
    own, other = (
        pair(f"{members_key(KEYS)}{number}", msgspec.json.encode(Member(f"n{number}", "identity")))
        for number in (1, 2)
    )
    there, gone = Listing((other, own, alive), 3), Listing((other, alive), 2)
    await Watching(gone, there, Changes((alive,), 4)).nodes.run()
    assert caplog.text == ""
    await Watching(there, gone, Changes((alive,), 4)).nodes.run()
    assert caplog.text.count("etcd does not have this node any more") == 1


async def test_the_other_nodes_log_why_a_node_was_refused(caplog: pytest.LogCaptureFixture) -> None:
    refused = Refused("stranger", "192.0.2.9", "another secret")
    said = pair(refused_key(KEYS), msgspec.json.encode(refused))
    await Watching(Listing((said,), 3)).nodes.run()
    assert caplog.text == "", "nobody knows when that was"
    gone, bad = Deleted(said.key, 6), pair(said.key, b"[]", 7)
    alive = pair(KEYS.node(1), encoded(node(1)))
    watching = Watching(Listing((), 3), Changes((said,), 5), Changes((gone, bad, alive), 7))
    await watching.nodes.run()
    assert caplog.text.count("a node was refused: stranger at 192.0.2.9: another secret") == 1
    assert watching.seen == [[], [], ["n1"]]


async def test_a_node_without_a_port_for_nodes_is_not_reached() -> None:
    lone = Node(1, "lone", "127.0.0.1", {"amqp": 5672}, "1", 1, 1)
    watching = Watching(Listing((pair(KEYS.node(1), encoded(lone)),), 3))
    await watching.nodes.run()
    assert watching.nodes.address("lone") is None


CLAIM = Copies(1, 0, [0], [0, 1, 2])
# Before the keys of the other nodes, as etcd orders them.
UNREADABLE = pair(f"{KEYS.nodes}0a", b"{}")


def listing(*others: Pair) -> Listing:
    nodes = [pair(KEYS.node(number), encoded(node(number))) for number in range(3)]
    return Listing(tuple(sorted((UNREADABLE, *nodes, *others), key=lambda each: each.key)), 5)


async def test_a_key_that_cannot_be_read_hides_none_behind_it_from_a_controller() -> None:
    watching = Watching(listing(), Changes((UNREADABLE, pair(KEYS.node(7), encoded(node(7)))), 6))
    await watching.nodes.run()
    assert watching.seen == [["n0", "n1", "n2"], ["n0", "n1", "n2", "n7"]]


def test_a_key_that_cannot_be_read_hides_none_behind_it_from_who_takes_copies() -> None:
    seats = Seats(KEYS, 1, 2)
    claim = pair(KEYS.shard(0), encoded(Copies(1, 0, [0], [0])))
    seats.take(listing(record("n0"), claim, pair(f"{KEYS.shards}0a", b"{}")))
    assert [wanted.shard for wanted in seats.wanted()] == [0]


@pytest.mark.parametrize("founds", [True, False])
async def test_a_controller_founds_the_definitions_only_if_its_node_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, founds: bool
) -> None:
    class Asked(Exception):
        """The controller has begun to follow."""

    def begins(*_: Any, founds: str) -> FollowerOfCopies:
        raise Asked(founds)

    monkeypatch.setattr(controllers, "FollowerOfCopies", begins)
    etcd = EtcdSettings(endpoints=["http://127.0.0.1:1"])
    keys = keys_of("a secret of many words", "tea")
    cluster = Cluster(
        name="tea", node="n0", number=0, fd=-1, host="127.0.0.1", port=1, keys=keys, etcd=etcd,
        founds=founds,
    )  # fmt: skip
    directory = str(tmp_path)
    config = ControllerConfig(data_dir=directory, runtime_dir=directory, boot="b", shards=1)
    with pytest.raises(Asked) as asked:
        await controllers.Node(config, cluster, asyncio.Event())._follow()
    assert bool(str(asked.value)) == founds


@contextmanager
def seat_at(runtime_dir: str, node: str = "n0") -> Iterator[Seat]:
    etcd = EtcdSettings(endpoints=["http://127.0.0.1:1"])
    keys = keys_of("a secret of many words", "tea")
    copies = CopiesConfig(
        cluster="tea", node=node, fd=-1, founds=True, keys=keys, etcd=etcd, replicas=3
    )
    made = Seat(ShardConfig(NO_DIRECTORY, runtime_dir, 0), copies)
    try:
        yield made
    finally:
        os.close(made.fd)


@pytest.fixture
def seat() -> Iterator[Seat]:
    with seat_at(NO_DIRECTORY) as made:
        yield made


def record(*names: str) -> Pair:
    value = Record(1, names[0], 1, "s", {name: f"copy-{name}" for name in names})
    return pair(KEYS.copies_of(0), msgspec.json.encode(value))


def test_a_shard_ends_although_the_thread_of_its_copies_has_ended_just_before(seat: Seat) -> None:
    loop = asyncio.new_event_loop()
    playing: Any = loop.create_future()
    seat._loop, seat._playing = loop, playing
    loop.close()
    seat.leave_within(1.0)
    seat.stop()


def test_a_key_that_cannot_be_read_hides_none_behind_it_from_a_shard(seat: Seat) -> None:
    seat._take_all(listing(pair(KEYS.shard(0), encoded(CLAIM))))
    assert sorted(seat._nodes) == [0, 1, 2]
    assert seat._copies_count() == 3


@pytest.mark.parametrize("claim", BAD_VALUES)
def test_without_a_claim_a_shard_has_as_many_copies_as_are_in_sync(
    seat: Seat, claim: bytes
) -> None:
    """With fewer, a node that is alone would confirm what half of the others have not."""
    assert seat._copies_count() == 1
    seat._take_all(listing(record("n0", "n1", "n2"), pair(KEYS.shard(0), claim)))
    assert seat._copies_count() == 3
    seat._take_all(Changes((pair(KEYS.shard(0), encoded(CLAIM)), record("n0")), 6))
    assert seat._copies_count() == 3


def test_a_claim_that_cannot_be_read_any_more_counts_as_before(seat: Seat) -> None:
    seat._take_all(listing(record("n0"), pair(KEYS.shard(0), encoded(CLAIM))))
    seat._take_all(Changes((pair(KEYS.shard(0), b"{"),), 6))
    assert seat._copies_count() == 3


def test_a_shard_confirms_by_the_numbers_of_its_set(seat: Seat) -> None:
    assert seat._min_in_sync() == 7, "etcd has not said yet whether there is a set"
    claim, own = pair(KEYS.shard(0), encoded(CLAIM)), KEYS.replicas_of(0)
    seat._take_all(listing(claim, pair(KEYS.replicas_of(1), b'{"count":1}')))
    assert (seat._min_in_sync(), seat._copies_count()) == (None, 3)
    seat._take_all(Changes((pair(own, b'{"count":2,"min_in_sync":2}'),), 6))
    assert (seat._min_in_sync(), seat._copies_count()) == (2, 2)
    seat._take_all(Changes((pair(own, b"{"),), 7))
    assert (seat._min_in_sync(), seat._copies_count()) == (2, 2), "it counts as before"
    seat._take_all(Changes((Deleted(own, 8),), 8))
    assert (seat._min_in_sync(), seat._copies_count()) == (None, 3)
    seat._take_all(Changes((pair(own, b'{"count":1}'),), 9))
    assert (seat._min_in_sync(), seat._copies_count()) == (0, 1)
    seat._take_all(listing(claim))
    assert (seat._min_in_sync(), seat._copies_count()) == (None, 3)


@pytest.mark.parametrize("value", BAD_VALUES)
def test_a_shard_whose_set_was_never_read_confirms_by_no_smaller_one(
    seat: Seat, value: bytes
) -> None:
    """The settings may ask for fewer nodes than the set does."""
    claim, own = pair(KEYS.shard(0), encoded(CLAIM)), KEYS.replicas_of(0)
    seat._take_all(listing(claim, pair(own, value)))
    assert seat._min_in_sync() == REPLICAS_MAX
    seat._take_all(Changes((pair(own, value),), 6))
    seat._take_all(listing(claim, pair(own, value)))
    assert seat._min_in_sync() == REPLICAS_MAX
    seat._take_all(Changes((pair(own, b'{"count":3,"min_in_sync":2}'),), 7))
    assert (seat._min_in_sync(), seat._copies_count()) == (2, 3)
    seat._take_all(listing(claim, pair(own, value)))
    assert (seat._min_in_sync(), seat._copies_count()) == (2, 3), "it counts as before"


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_shard_that_has_left_its_set_confirms_by_the_settings(seat: Seat, is_seen: bool) -> None:
    claim, own = pair(KEYS.shard(0), encoded(CLAIM)), KEYS.replicas_of(0)
    seat._take_all(listing(claim, pair(own, b"{")))
    seat._take_all(Changes((Deleted(own, 6),), 6) if is_seen else listing(claim))
    assert (seat._min_in_sync(), seat._copies_count()) == (None, 3)


def test_the_next_process_of_a_shard_knows_how_often_its_home_has_lost_the_lead(
    tmp_path: Path,
) -> None:
    for times in range(3):
        with seat_at(str(tmp_path), "n1") as seat:
            assert seat._giving.lost == times
            seat._take_all(listing(record("n0", "n1"), pair(KEYS.shard(0), encoded(CLAIM))))
            seat._take_all(Changes((record("n1"),), 6))
    (tmp_path / "shard-00.lost-leads").write_text("no number")
    with seat_at(str(tmp_path), "n1") as seat:
        assert seat._giving.lost == 0


def test_a_count_that_cannot_be_written_ends_nothing(seat: Seat) -> None:
    seat._take_all(listing(record("n0", "n1"), pair(KEYS.shard(0), encoded(CLAIM))))
    seat._take_all(Changes((record("n1"),), 6))
    assert seat._giving.lost == 1


def test_a_shard_that_begins_to_follow_removes_the_links_of_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(seat: Seat) -> str:
        return "played" if not (tmp_path / LINKS).exists() else "links are left"

    monkeypatch.setattr(Seat, "_play", play)
    (tmp_path / LINKS / "a").mkdir(parents=True)
    (tmp_path / LINKS / "a" / "msgs.1").write_bytes(b"m")
    with seat_at(str(tmp_path)) as seat:
        seat._root = str(tmp_path)
        seat._run()
        assert seat.over == "played"
