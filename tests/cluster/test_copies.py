"""Definitions are on every member when a change was answered, and any member goes on with them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.fernet import Fernet

from shardmq.broker.controller.stored.definitions import Definitions
from shardmq.broker.controller.stored.key_ring import NO_KEYS, KeyRing
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    AnyChange,
    ParameterPut,
    QueueDelete,
    QueuePut,
    UserPut,
    VhostPut,
)
from shardmq.broker.model.encrypted import is_encrypted
from shardmq.broker.model.federation import UPSTREAM
from shardmq.cluster import frames
from shardmq.cluster.comparing import Comparing
from shardmq.cluster.following import FRAMES_WAITING_MAX, FollowerOfCopies
from shardmq.cluster.leading import UNSENT_BYTES_MAX, LeaderOfCopies
from shardmq.cluster.operations import CopiedDirectory
from shardmq.cluster.replicated_files import Deposed
from shardmq.cluster.rules import Ping, Record, Settings
from shardmq.shardd.store.files import OsFiles
from tests.cluster.copies_world import PATIENCE_S, SETTINGS, CopiesNode, CopiesWorld
from tests.definitions.test_log import write
from tests.support.catalogs import state

HANGS_S_MAX = 60.0


@pytest.fixture
async def world() -> AsyncIterator[CopiesWorld]:
    made = CopiesWorld()
    yield made
    await made.close()


def content(node: CopiesNode) -> dict[str, bytes]:
    root = Path(node.root)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


class FullDisk(OsFiles):
    is_full = False

    def write(self, handle: int, data: bytes | bytearray | memoryview, position: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "no room on purpose")
        super().write(handle, data, position)


class HangingDisk(OsFiles):
    """A disk whose syncs hang for a while."""

    def __init__(self) -> None:
        super().__init__(0o600)
        self._answers = threading.Event()
        self._answers.set()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        self._answers.clear()
        try:
            yield
        finally:
            self._answers.set()

    def sync(self, handle: int) -> None:
        self._answers.wait(HANGS_S_MAX)
        super().sync(handle)


class Kept:
    """Definitions that are written through a leader, each call in another thread."""

    def __init__(self, leader: LeaderOfCopies, node: CopiesNode, keys: KeyRing = NO_KEYS) -> None:
        self.definitions = Definitions(Path(node.root), "boot", leader.replicated, keys=keys)
        self.catalog = Catalog()

    async def load(self) -> Kept:
        self.catalog = await asyncio.to_thread(self.definitions.load)
        return self

    async def write(self, *changes: AnyChange) -> None:
        await asyncio.to_thread(write, self.definitions, self.catalog, list(changes))


def found(node: CopiesNode) -> Catalog:
    return Definitions(Path(node.root), "boot").read()


async def begun(world: CopiesWorld, path: Path, names: str = "ab") -> tuple[CopiesNode, ...]:
    nodes = tuple(world.node(name, path / name) for name in names)
    nodes[0].start()
    await world.leader()
    for node in nodes[1:]:
        node.start()
    await world.in_sync(*names)
    return nodes


@pytest.mark.parametrize("is_alone", [False, True], ids=["beside others", "alone"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["by the loop", "by threads"])
async def test_what_was_answered_is_on_the_follower(
    world: CopiesWorld, tmp_path: Path, is_alone: bool, is_shared: bool
) -> None:
    world.is_alone, world.is_shared = is_alone, is_shared
    a, b = await begun(world, tmp_path)
    kept = await Kept(await world.leader(), a).load()
    await kept.write(VhostPut("/"), UserPut("u", ""))
    for number in range(20):
        await kept.write(QueuePut("/", f"q{number}", number + 1, 0))
        assert state(found(b)) == state(kept.catalog)
    assert content(a) == content(b)


async def test_a_node_that_may_not_found_waits_for_one_that_may_and_leads_later(
    world: CopiesWorld, tmp_path: Path
) -> None:
    """In a cluster that is restored it has nothing, and the other one has the definitions."""
    empty, restored = world.node("a", tmp_path / "a"), world.node("b", tmp_path / "b")
    definitions, catalog = Definitions(Path(restored.root), "boot"), Catalog()
    definitions.load()
    write(definitions, catalog, [VhostPut("/"), QueuePut("/", "q", 1, 0)])
    definitions.close()
    empty.founds = False
    empty.start()
    follower = await world.until(lambda: empty.follower)
    await world.until(lambda: follower.follower.revision >= 0)
    restored.start()
    await world.leader("b")
    await world.in_sync("a", "b")
    await restored.kill()
    assert empty.follower is not None
    empty.follower.leader_gone(1)
    again = await Kept(await world.leader("a"), empty).load()
    assert set(again.catalog.vhosts["/"].queues) == {"q"}


async def test_a_follower_takes_over_and_the_old_leader_throws_its_tail_away(
    world: CopiesWorld, tmp_path: Path
) -> None:
    a, b, c = await begun(world, tmp_path, "abc")
    kept = await Kept(await world.leader(), a).load()
    await kept.write(VhostPut("/"), QueuePut("/", "q", 1, 0))
    world.cut.add("a")
    world.cut_all()
    lost = asyncio.create_task(kept.write(QueuePut("/", "lost", 2, 0)))
    assert b.follower is not None and c.follower is not None
    for node in (b, c):
        assert node.follower is not None
        node.follower.leader_gone(1)
    new = await world.leader("b", "c")
    with pytest.raises(Deposed):
        await lost
    assert "lost" in found(a).vhosts["/"].queues
    leader = b if b.leader is new else c
    again = await Kept(new, leader).load()
    assert state(again.catalog) == state(found(leader))
    await again.write(QueuePut("/", "r", 3, 0))
    world.cut.clear()
    a.start()
    await world.in_sync("a", "b", "c")
    await again.write(QueuePut("/", "s", 4, 0))
    for node in (a, b, c):
        assert set(found(node).vhosts["/"].queues) == {"q", "r", "s"}
        assert content(node) == content(leader)


async def test_after_a_takeover_followers_go_on_without_a_comparison(
    world: CopiesWorld, tmp_path: Path
) -> None:
    a, b, c = await begun(world, tmp_path, "abc")
    kept = await Kept(await world.leader(), a).load()
    await kept.write(VhostPut("/"), QueuePut("/", "q", 1, 0))
    assert world.store.record is not None
    copies = world.store.record.in_sync
    await a.kill()
    assert b.follower is not None
    b.follower.leader_gone(1)
    again = await Kept(await world.leader("b"), b).load()
    await again.write(QueuePut("/", "r", 2, 0))
    assert world.store.record.in_sync == {name: copies[name] for name in "bc"}
    assert content(b) == content(c)


async def test_a_follower_that_was_cut_for_a_moment_goes_on_where_it_was(
    world: CopiesWorld, tmp_path: Path
) -> None:
    a, b = await begun(world, tmp_path)
    kept = await Kept(await world.leader(), a).load()
    await kept.write(VhostPut("/"))
    assert world.store.record is not None
    copy = world.store.record.in_sync["b"]
    for number in range(5):
        world.cut_all()
        await kept.write(QueuePut("/", f"q{number}", number + 1, 0))
    assert world.store.record.in_sync["b"] == copy
    assert content(a) == content(b)


@pytest.mark.row("K4")
async def test_a_silent_follower_holds_changes_up_for_the_lag_and_comes_back(
    world: CopiesWorld, tmp_path: Path
) -> None:
    a, b = await begun(world, tmp_path)
    kept = await Kept(await world.leader(), a).load()
    await kept.write(VhostPut("/"))
    await b.kill()
    began = asyncio.get_running_loop().time()
    await kept.write(QueuePut("/", "q", 1, 0))
    assert asyncio.get_running_loop().time() - began > SETTINGS.lag_s / 2
    await world.in_sync("a")
    b.start()
    await world.in_sync("a", "b")
    await kept.write(QueuePut("/", "r", 2, 0))
    assert content(a) == content(b)


@pytest.mark.row("K3", "K4")
async def test_while_the_record_is_away_nothing_is_confirmed_without_a_member(
    world: CopiesWorld, tmp_path: Path
) -> None:
    a, b = await begun(world, tmp_path)
    kept = await Kept(await world.leader(), a).load()
    await kept.write(VhostPut("/"))
    world.store.is_away = True
    await kept.write(QueuePut("/", "q", 1, 0))
    await b.kill()
    waiting = asyncio.create_task(kept.write(QueuePut("/", "r", 2, 0)))
    asked = world.store.asked_in_vain
    # The leader wants to go on without b, and asks again and again.
    await world.until(lambda: world.store.asked_in_vain > asked + 10)
    assert not waiting.done()
    world.store.is_away = False
    await asyncio.wait_for(waiting, 10)
    await world.in_sync("a")


async def test_with_too_few_copies_a_change_waits_for_a_follower(tmp_path: Path) -> None:
    world = CopiesWorld(Settings(1.0, 0.05, 0.05, 0.1, 20.0, min_in_sync=2))
    try:
        a, b = (world.node(name, tmp_path / name) for name in "ab")
        a.start()
        leader = await world.leader()
        loading = asyncio.create_task(Kept(leader, a).load())
        rules = leader._rules
        await world.until(lambda: rules._syncs and not rules._local)  # nothing is left to a itself
        ticked_at = rules._ticked_at
        await world.until(lambda: rules._ticked_at > ticked_at)
        assert leader.confirmed == 0 and not loading.done()
        b.start()
        await asyncio.wait_for(loading, 10)
    finally:
        await world.close()


async def test_files_of_a_node_that_was_alone_are_put_aside(
    world: CopiesWorld, tmp_path: Path
) -> None:
    a, b = (world.node(name, tmp_path / name) for name in "ab")
    definitions = Definitions(Path(b.root), "boot")
    write(definitions, definitions.load(), [VhostPut("mine")])
    definitions.close()
    before = content(b)
    a.start()
    kept = await Kept(await world.leader(), a).load()
    await kept.write(VhostPut("/"))
    b.start()
    await world.in_sync("a", "b")
    after = content(b)
    for path, data in before.items():
        assert after.pop(f"aside/before-1/{path}") == data
    assert after == content(a)


async def test_secrets_are_encrypted_at_the_follower_too(
    world: CopiesWorld, tmp_path: Path
) -> None:
    """The leader has got a key. The follower leads next, without one and then with the key."""
    a, b = await begun(world, tmp_path)
    kept = await Kept(await world.leader(), a).load()
    uri = "amqp://u:hunter2@h"
    put = ParameterPut("/", UPSTREAM, "u", {"uri": [uri]})
    await kept.write(VhostPut("/"), put)
    assert any(b"hunter2" in data for data in content(b).values())
    await asyncio.to_thread(kept.definitions.close)
    keys = KeyRing([Fernet.generate_key().decode()])
    kept = await Kept(await world.leader(), a, keys).load()
    await kept.write(UserPut("u", ""))
    assert not any(b"hunter2" in data for data in (*content(a).values(), *content(b).values()))
    await a.kill()
    assert b.follower is not None
    b.follower.leader_gone(1)
    later = await Kept(await world.leader("b"), b).load()
    (found,) = later.catalog.parameters["/", UPSTREAM, "u"].value["uri"]
    assert is_encrypted(found)
    await later.write(UserPut("v", ""))
    await asyncio.to_thread(later.definitions.close)
    last = await Kept(await world.leader("b"), b, keys).load()
    assert last.catalog.parameters["/", UPSTREAM, "u"] == put


async def test_a_follower_that_is_too_far_behind_is_compared(
    world: CopiesWorld, tmp_path: Path
) -> None:
    a, b = (world.node(name, tmp_path / name) for name in "ab")
    a.log_bytes_max = 20_000
    a.start()
    kept = await Kept(await world.leader(), a).load()
    b.start()
    await world.in_sync("a", "b")
    await kept.write(VhostPut("/"))
    assert world.store.record is not None
    copy = world.store.record.in_sync["b"]
    world.cut.add("a")
    world.cut_all()
    await kept.write(*(QueuePut("/", f"{n}" * 50, n, 0) for n in range(1, 400)))
    world.cut.clear()
    await world.in_sync("a", "b")
    await kept.write(QueuePut("/", "last", 1000, 0))
    assert world.store.record.in_sync["b"] != copy
    assert content(a) == content(b)


async def test_a_comparison_may_take_longer_than_pings_find_room(
    world: CopiesWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the digests take until more pings have come than messages may wait: nobody is cut off."""
    compare, came = CopiedDirectory.compare, FollowerOfCopies._came
    begun_comparisons: list[Any] = []
    pings: list[Ping] = []
    is_enough = threading.Event()

    def slow(directory: CopiedDirectory, *what: Any) -> Any:
        begun_comparisons.append(what)
        assert is_enough.wait(PATIENCE_S)
        return compare(directory, *what)

    def counted(follower: FollowerOfCopies, connection: Any, frame: memoryview) -> None:
        message = frames.from_leader(frame)
        if begun_comparisons and isinstance(message, Ping):
            pings.append(message)
            if len(pings) > 2 * FRAMES_WAITING_MAX:
                is_enough.set()
        came(follower, connection, frame)

    world.settings = msgspec.structs.replace(SETTINGS, lag_s=10.0)  # also on a busy machine
    monkeypatch.setattr(CopiedDirectory, "compare", slow)
    monkeypatch.setattr(FollowerOfCopies, "_came", counted)
    a, b = (world.node(name, tmp_path / name) for name in "ab")
    a.start()
    await Kept(await world.leader(), a).load()
    b.start()
    await world.until(is_enough.is_set)
    await world.in_sync("a", "b")
    assert len(begun_comparisons) == 1


async def test_a_comparison_that_fails_at_the_leader_is_begun_again(
    world: CopiesWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the follower would answer pings for ever, and wait for what does not come."""
    read, failures = Comparing._read_piece, [MemoryError("nobody foresaw this")]

    def fails_once(comparing: Comparing, *what: Any) -> Any:
        if failures:
            raise failures.pop()
        return read(comparing, *what)

    monkeypatch.setattr(Comparing, "_read_piece", fails_once)
    a, b = (world.node(name, tmp_path / name) for name in "ab")
    a.start()
    await Kept(await world.leader(), a).load()
    b.start()
    await world.in_sync("a", "b")
    assert not failures
    assert content(a) == content(b)


async def test_a_follower_needs_no_further_change_to_come_in_sync(
    world: CopiesWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the last change come during the comparison."""
    compare, loop = CopiedDirectory.compare, asyncio.get_running_loop()
    kept: Kept

    def changed_meanwhile(directory: CopiedDirectory, *what: Any) -> Any:
        change = kept.write(QueuePut("/", "q", 1, 0))
        asyncio.run_coroutine_threadsafe(change, loop).result(PATIENCE_S)
        return compare(directory, *what)

    monkeypatch.setattr(CopiedDirectory, "compare", changed_meanwhile)
    a, b = (world.node(name, tmp_path / name) for name in "ab")
    a.start()
    kept = await Kept(await world.leader(), a).load()
    await kept.write(VhostPut("/"))
    b.start()
    await world.in_sync("a", "b")
    assert content(a) == content(b)


async def test_a_hand_over_loses_nothing_and_needs_no_comparison_of_the_heir(
    world: CopiesWorld, tmp_path: Path
) -> None:
    a, b = await begun(world, tmp_path)
    leader = await world.leader()
    kept = await Kept(leader, a).load()
    await kept.write(VhostPut("/"), QueuePut("/", "q", 1, 0))
    leader.hand_over("b")
    again = await Kept(await world.leader("b"), b).load()
    assert set(again.catalog.vhosts["/"].queues) == {"q"}
    await world.until(lambda: a.why)
    a.start()
    await world.in_sync("a", "b")


async def test_a_change_does_not_wait_for_a_follower_that_has_ended_in_order(
    tmp_path: Path,
) -> None:
    world = CopiesWorld(msgspec.structs.replace(SETTINGS, lag_s=2 * PATIENCE_S))
    try:
        a, b, c = await begun(world, tmp_path, "abc")
        (await world.leader()).copies_are(3)
        kept = await Kept(await world.leader(), a).load()
        assert c.follower is not None
        await c.follower.leave()
        await c.kill()
        async with asyncio.timeout(PATIENCE_S):
            await kept.write(VhostPut("/"))
        await world.in_sync("a", "b")
        c.start()
        await world.in_sync("a", "b", "c")
        assert b.follower is not None and "/" in found(c).vhosts
    finally:
        await world.close()


async def test_a_follower_that_waits_for_the_former_leader_reaches_the_next_one_at_once(
    tmp_path: Path,
) -> None:
    world = CopiesWorld(msgspec.structs.replace(SETTINGS, lag_s=2 * PATIENCE_S))
    try:
        _, b, c = await begun(world, tmp_path, "abc")
        leader = await world.leader()
        world.mute.add("a")
        world.pipes[-1].abort()  # that of c, which came last
        async with asyncio.timeout(PATIENCE_S):
            await world.asked_mute.wait()
            leader.hand_over("b")
            kept = await Kept(await world.leader("b"), b).load()
            await kept.write(VhostPut("/"))
        assert "/" in found(c).vhosts
    finally:
        await world.close()


async def test_the_lead_stays_while_the_record_cannot_be_read(
    world: CopiesWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begun(world, tmp_path)
    leader = await world.leader()
    await world.until(lambda: leader.lag_s() == 0)
    assert await leader.may_hand_over("b")
    assert not await leader.may_hand_over("c"), "no member"
    world.store.is_away = True
    assert not await leader.may_hand_over("b")
    world.store.is_away = False
    assert await leader.may_hand_over("b")
    monkeypatch.setattr("shardmq.cluster.leading.RECORD_S_MAX", 0.01)

    async def hangs() -> tuple[Record | None, int]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(world.store, "read", hangs)
    assert not await leader.may_hand_over("b")


async def test_a_leader_that_was_replaced_hands_nothing_over(
    world: CopiesWorld, tmp_path: Path
) -> None:
    """The record that is read is news to a leader whose watch is behind."""
    await begun(world, tmp_path)
    leader = await world.leader()
    world.store.watchers.clear()
    record = leader.record
    world.store.record = Record(record.term + 1, "b", 1, record.store, record.in_sync)
    world.store.revision += 1
    assert not await leader.may_hand_over("b")


async def test_all_start_again_after_they_were_killed_together(
    world: CopiesWorld, tmp_path: Path
) -> None:
    nodes = await begun(world, tmp_path, "abc")
    kept = await Kept(await world.leader(), nodes[0]).load()
    await kept.write(VhostPut("/"), QueuePut("/", "q", 1, 0))
    for node in nodes:
        await node.kill()
    for node in nodes:
        node.start()
    leader = await world.leader()
    (node,) = [each for each in nodes if each.leader is leader]
    again = await Kept(leader, node).load()
    await again.write(QueuePut("/", "r", 2, 0))
    await world.in_sync("a", "b", "c")
    await again.write(QueuePut("/", "s", 3, 0))
    for each in nodes:
        assert set(found(each).vhosts["/"].queues) == {"q", "r", "s"}


async def test_a_follower_whose_disk_is_full_leaves_and_comes_back(
    world: CopiesWorld, tmp_path: Path
) -> None:
    disk = FullDisk(0o600)
    a, b = world.node("a", tmp_path / "a"), world.node("b", tmp_path / "b", disk)
    a.start()
    kept = await Kept(await world.leader(), a).load()
    b.start()
    await world.in_sync("a", "b")
    await kept.write(VhostPut("/"))
    disk.is_full = True
    await kept.write(UserPut("u", ""), QueuePut("/", "q", 1, 0))
    await world.in_sync("a")
    disk.is_full = False
    await world.in_sync("a", "b")
    await kept.write(QueuePut("/", "r", 2, 0))
    assert content(a) == content(b)


@pytest.mark.row("K14")
async def test_a_leader_whose_disk_hangs_gives_its_place_to_a_member(
    world: CopiesWorld, tmp_path: Path
) -> None:
    """The leader answers all others, and another process keeps its lease."""
    world.settings = msgspec.structs.replace(SETTINGS, disk_stall_s=0.3)
    disk = HangingDisk()
    a, b = world.node("a", tmp_path / "a", disk), world.node("b", tmp_path / "b")
    a.start()
    kept = await Kept(await world.leader(), a).load()
    b.start()
    await world.in_sync("a", "b")
    await kept.write(VhostPut("/"), QueuePut("/", "q", 1, 0))
    with disk.hanging():
        waiting = asyncio.create_task(kept.write(QueuePut("/", "r", 2, 0)))
        again = await Kept(await world.leader("b"), b).load()
        await again.write(QueuePut("/", "s", 3, 0))
        assert {"q", "s"} <= found(b).vhosts["/"].queues.keys()
        assert "b leads" in await world.until(lambda: a.why)
    with pytest.raises(Deposed):
        await waiting
    a.start()
    await world.in_sync("a", "b")
    await again.write(QueuePut("/", "t", 4, 0))
    assert content(a) == content(b)


@pytest.mark.row("K3", "K14")
async def test_a_follower_whose_disk_hangs_holds_changes_up_for_the_lag_only(
    world: CopiesWorld, tmp_path: Path
) -> None:
    world.settings = msgspec.structs.replace(SETTINGS, lag_s=0.5)
    disk = HangingDisk()
    a, b = world.node("a", tmp_path / "a"), world.node("b", tmp_path / "b", disk)
    a.start()
    leader = await world.leader()
    kept = await Kept(leader, a).load()
    b.start()
    await world.in_sync("a", "b")
    await kept.write(VhostPut("/"))
    with disk.hanging():
        await kept.write(QueuePut("/", "q", 1, 0))
        assert world.store.record is not None and set(world.store.record.in_sync) == {"a"}
        await kept.write(QueuePut("/", "r", 2, 0))
    await world.in_sync("a", "b")
    await kept.write(QueuePut("/", "s", 3, 0))
    assert content(a) == content(b)


async def test_a_queue_that_was_declared_anew_while_a_node_was_away_is_the_new_one_there(
    world: CopiesWorld, tmp_path: Path
) -> None:
    """Also when that node leads: it had led, and comes back at once or later."""
    a, b, c = await begun(world, tmp_path, "abc")
    kept = await Kept(await world.leader(), a).load()
    old = QueuePut("/", "q", kept.definitions.new_queue_id(), 0)
    await kept.write(VhostPut("/"), old)
    await a.kill()
    for node in (b, c):
        assert node.follower is not None
        node.follower.leader_gone(1)
    new = await world.leader("b", "c")
    again = await Kept(new, b if b.leader is new else c).load()
    declared = QueuePut("/", "q", again.definitions.new_queue_id(), 0)
    assert declared.id > old.id
    await again.write(QueueDelete("/", "q"))
    await again.write(declared)
    a.start()
    await world.in_sync("a", "b", "c")
    new.hand_over("a")
    once_more = await Kept(await world.leader("a"), a).load()
    assert once_more.catalog.vhosts["/"].queues == {"q": declared}
    assert once_more.definitions.new_queue_id() > declared.id


@pytest.mark.parametrize("names", ["a", "ab"])
async def test_no_confirm_waits_for_the_next_ping(
    world: CopiesWorld, tmp_path: Path, names: str
) -> None:
    a, *_ = await begun(world, tmp_path, names)
    leader = await world.leader()
    kept = await Kept(leader, a).load()
    leader._settings = Settings(heartbeat_s=HANGS_S_MAX)  # for the pings alone
    async with asyncio.timeout(PATIENCE_S):
        for number in range(50):
            await kept.write(VhostPut(f"v{number}"))


async def test_what_no_sync_follows_is_sent_with_the_next_ping_or_when_it_is_much(
    world: CopiesWorld, tmp_path: Path
) -> None:
    a, b = await begun(world, tmp_path)
    files = (await world.leader()).replicated
    handle = files.open(f"{a.root}/file", create=True)
    files.write(handle, b"little", 0)
    await world.until(lambda: content(b).get("file") == b"little", "the next tick")
    for number in range(3):
        files.write(handle, bytes(UNSENT_BYTES_MAX), number * UNSENT_BYTES_MAX)
    await world.until(lambda: len(content(b)["file"]) >= 2 * UNSENT_BYTES_MAX)
    files.close(handle)


async def test_a_sync_in_the_thread_of_the_copies_is_refused(
    world: CopiesWorld, tmp_path: Path
) -> None:
    (a,) = await begun(world, tmp_path, "a")
    with pytest.raises(RuntimeError, match="wait for itself"):
        Definitions(Path(a.root), "boot", (await world.leader()).replicated).load()


async def test_a_leader_ends_when_the_work_that_its_rules_wait_for_fails(
    world: CopiesWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing is proposed any more, and the next follower that dies stops all confirms."""
    a, b = await begun(world, tmp_path)

    async def fails(record: Record, revision: int) -> int:
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(world.store, "swap", fails)
    await b.kill()
    world.cut_all()
    assert a.task is not None
    with pytest.raises(RuntimeError, match="nobody foresaw"):
        async with asyncio.timeout(20):
            await a.task
