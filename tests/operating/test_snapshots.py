"""A snapshot gets its name when it is whole; what cannot be made leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmq.broker.controller.peers.shard_links import ShardSilent
from shardmq.broker.controller.snapshots import Snapshots
from shardmq.broker.controller.stored import snapshot_directory
from shardmq.broker.controller.stored.definitions import ENDED_NAME, Definitions
from shardmq.broker.controller.stored.snapshot_directory import INCOMPLETE, INSIDE, NoSnapshot
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import QueueDelete, QueuePut, UserPut, VhostPut
from shardmq.shardd.wire import messages as wire
from shardmq.supervisor import formats
from tests.definitions.test_log import write
from tests.support.catalogs import state


class Shards:
    """Two shards; `answer` is what the second one says, or an error."""

    def __init__(self) -> None:
        self.shards = [type("Shard", (), {"number": number}) for number in range(2)]
        self.answer: wire.Message | Exception = wire.Done(1)
        self.meanwhile: Callable[[], None] = lambda: None
        self.asked: list[str] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    def request(self, shard: int, message: Callable[[int], Any], wait_s: float) -> Any:
        asked = message(1)
        assert isinstance(asked, wire.Snapshot)
        self.asked.append(asked.directory)
        return asyncio.ensure_future(self._answer(shard, Path(asked.directory)))

    async def _answer(self, shard: int, directory: Path) -> wire.Message:
        await self.goes_on.wait()
        directory.mkdir()
        self.meanwhile()
        answer = self.answer if shard else wire.Done(1)
        if isinstance(answer, Exception):
            raise answer
        return answer


class World:
    def __init__(self, root: Path) -> None:
        data = root / "data"
        definitions = Definitions(data, "boot")
        self.catalog = definitions.load()
        puts = [VhostPut("/"), UserPut("u", ""), QueuePut("/", "q", definitions.new_queue_id(), 1)]
        write(definitions, self.catalog, puts)
        definitions.complete()
        (data / "VERSION").write_text('{"version": 1, "shards": [0, 1]}\n')
        (data / "installation").write_text("an id\n")
        self.shards, self.moving = Shards(), {}
        self.snapshots = Snapshots(
            str(data),
            self.catalog,
            definitions,
            self.shards,
            lambda: self.moving,  # type: ignore[arg-type] # fakes
        )


@pytest.fixture
async def world(tmp_path: Path) -> World:
    return World(tmp_path)


def read(directory: Path) -> Catalog:
    return Definitions(directory, "another boot").load()


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_snapshot_has_the_definitions_and_the_shards(
    world: World, tmp_path: Path, *, is_there: bool
) -> None:
    target = tmp_path / "target"
    if is_there:
        target.mkdir()
    await world.snapshots.make(target)
    assert world.shards.asked == [f"{target}{INCOMPLETE}/shard-0{shard}" for shard in range(2)]
    assert state(read(target)) == state(world.catalog)
    assert read(target).vhosts["/"].queues["q"].id == 1
    for name in ("VERSION", "installation"):
        assert (target / name).read_text() == (tmp_path / "data" / name).read_text()
    assert Definitions(target, "").new_queue_id() == 1  # not read yet
    again = Definitions(target, "third boot")
    again.load()
    assert again.new_queue_id() == 2, "ids are never used twice"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "target"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (wire.Refused(1, 541, "No space left on device"), "shard 1: No space left"),
        (ShardSilent("shard 1 did not answer"), "did not answer"),
    ],
)
async def test_a_snapshot_that_fails_leaves_nothing(
    world: World, tmp_path: Path, answer: wire.Message | Exception, why: str
) -> None:
    world.shards.answer = answer
    with pytest.raises(NoSnapshot, match=why):
        await world.snapshots.make(tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    world.shards.answer = wire.Done(1)
    await world.snapshots.make(tmp_path / "target")


async def test_queues_that_move_meanwhile_make_it_fail(world: World, tmp_path: Path) -> None:
    """A move from a shard that is done later to one that is done already would lose messages."""
    world.moving = {("/", "q"): 1}
    with pytest.raises(NoSnapshot, match="queues move"):
        await world.snapshots.make(tmp_path / "target")
    world.moving = {}
    world.shards.meanwhile = lambda: world.catalog.apply(QueuePut("/", "q", 2, 0))
    with pytest.raises(NoSnapshot, match="has moved"):
        await world.snapshots.make(tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


async def test_a_queue_of_which_messages_are_taken_is_known(world: World, tmp_path: Path) -> None:
    world.shards.meanwhile = lambda: world.catalog.apply(QueuePut("/", "new", 2, 0))
    await world.snapshots.make(tmp_path / "target")
    assert set(read(tmp_path / "target").vhosts["/"].queues) == {"q", "new"}


async def test_the_end_of_a_stream_whose_queue_is_not_in_the_snapshot_is_in_it(
    world: World, tmp_path: Path
) -> None:
    ended = tmp_path / "data" / ENDED_NAME

    def end_stream() -> None:
        ended.write_text("q ended")
        world.catalog.apply(QueueDelete("/", "q"))

    world.shards.meanwhile = end_stream
    await world.snapshots.make(tmp_path / "target")
    assert not read(tmp_path / "target").vhosts["/"].queues
    assert (tmp_path / "target" / ENDED_NAME).read_text() == "q ended"


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_cancel_waits_for_the_thread_before_anything_is_removed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancels: int
) -> None:
    loop, runs, goes_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    seen: list[bool] = []
    plain = snapshot_directory.give_name

    def give_name(fresh: Path, target: Path) -> None:
        loop.call_soon_threadsafe(runs.set)
        goes_on.wait(10)
        seen.append((fresh / "VERSION").exists())
        plain(fresh, target)

    def rmtree(path: Path, **_: object) -> None:
        seen.append(False)
        goes_on.set()

    monkeypatch.setattr(snapshot_directory, "give_name", give_name)
    monkeypatch.setattr(snapshot_directory.shutil, "rmtree", rmtree)
    making = asyncio.create_task(world.snapshots.make(tmp_path / "target"))
    try:
        await runs.wait()
        for _ in range(cancels):
            making.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
    finally:
        loop.call_later(0.05, goes_on.set)
    with pytest.raises(asyncio.CancelledError):
        await making
    assert seen == [True, False], "the thread was first"
    assert state(read(tmp_path / "target")) == state(world.catalog)


async def test_two_at_once_are_one_too_many(world: World, tmp_path: Path) -> None:
    world.shards.goes_on.clear()
    first = asyncio.create_task(world.snapshots.make(tmp_path / "target"))
    await asyncio.sleep(0)
    with pytest.raises(NoSnapshot, match="another snapshot"):
        await world.snapshots.make(tmp_path / "other")
    world.shards.goes_on.set()
    await first
    assert not (tmp_path / "other").exists()


async def test_places_where_something_is_are_left_alone(world: World, tmp_path: Path) -> None:
    full, file, half = (tmp_path / name for name in ("full", "file", f"half{INCOMPLETE}"))
    full.mkdir()
    (full / "mine").write_text("mine")
    file.write_text("mine")
    half.mkdir()
    (tmp_path / "link").symlink_to(full)
    (tmp_path / "way").symlink_to(tmp_path / "data")
    for target, why in (
        (tmp_path / "way" / "shard-07", "take a name in"),
        (full, "is not empty"),
        (file, "is no directory"),
        (tmp_path / "link", "is no directory"),
        (tmp_path / "half", "remove it"),
        (Path("/"), "is not empty"),
        (tmp_path / "data" / "shard-07", "take a name in .*/data/snapshots"),
        (tmp_path / "data" / "snapshots" / "a" / "b", "take a name in"),
        (Path("relative"), "no absolute path"),
        (tmp_path / "a" / ".." / "b", "no absolute path"),
        (tmp_path / "absent" / "target", "No such file"),
        (Path("/proc/target"), "No such file|not permitted|denied"),
    ):
        with pytest.raises(NoSnapshot, match=why):
            await world.snapshots.make(target)
    assert world.shards.asked == []
    assert (full / "mine").read_text() == file.read_text() == "mine"
    assert half.is_dir()


async def test_a_mount_point_is_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: path == target)
    with pytest.raises(NoSnapshot, match="mount point.*a name below"):
        await world.snapshots.make(target)
    assert world.shards.asked == []
    await world.snapshots.make(tmp_path / "other")


async def test_the_folder_for_snapshots_is_on_stable_storage(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(snapshot_directory.READABLE, "sync_directory", synced.append)
    await world.snapshots.make(tmp_path / "data" / INSIDE / "monday")
    assert synced.count(str((tmp_path / "data").resolve())) == 1
    await world.snapshots.make(tmp_path / "data" / INSIDE / "tuesday")
    assert synced.count(str((tmp_path / "data").resolve())) == 1


async def test_in_the_data_directory_there_is_one_folder_for_snapshots(
    world: World, tmp_path: Path
) -> None:
    await world.snapshots.make(tmp_path / "data" / INSIDE / "monday")
    assert state(read(tmp_path / "data" / INSIDE / "monday")) == state(world.catalog)
    # A start does not look there: a later release may have written it.
    assert INSIDE == formats.SNAPSHOTS
    later = (
        b"SHMQMSGS"
        + (99).to_bytes(4, "little")
        + formats.crc32c(bytes(48), 99).to_bytes(4, "little")
    )
    (tmp_path / "data" / INSIDE / "monday" / "msgs.0000000001").write_bytes(later + bytes(48))
    formats.check(tmp_path / "data")
    with pytest.raises(formats.FormatError, match="later version"):
        formats.check(tmp_path / "data" / INSIDE / "monday")
