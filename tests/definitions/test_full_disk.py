"""Test that a full disk does not damage the definitions.

Changes that would make the definitions grow are refused, and everything else goes on. A start needs
no room on the disk. A definition that was confirmed is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.loading import load_or_begin
from shardmq.broker.controller.requests import Pause
from shardmq.broker.controller.stored.definitions import Definitions
from shardmq.broker.controller.stored.errors import DefinitionsError
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    ParameterDelete,
    ParameterPut,
    PermissionDelete,
    PermissionPut,
    TopicPermissionDelete,
    TopicPermissionPut,
    UserDelete,
    UserPut,
    VhostDelete,
    VhostPut,
)
from shardmq.broker.model.checks import NO_ROOM
from shardmq.broker.shared.control import (
    Bind,
    BindMany,
    ExchangeDeclare,
    ExchangeRemove,
    QueueDeclare,
    QueueRemove,
    Unbind,
)
from tests.support.catalogs import state
from tests.support.small_disk import RefusingDisk, small_disk, take_all_bytes, take_all_inodes
from tests.topology.test_authority import World

STREAM = {"x-queue-type": "stream"}
POLICY = {"pattern": "^a", "definition": {"max-length": 9}, "apply-to": "queues", "priority": 0}
# Each kind of declare, and each change of what exists, by name.
GROWS: dict[str, Callable[[str], Any]] = {
    "queue": lambda name: QueueDeclare("/", name, True, False, False, {}),
    "queue that does not last": lambda name: QueueDeclare("/", name, False, True, False, {}),
    "exclusive queue": lambda name: QueueDeclare("/", name, False, False, True, {}),
    "queue with large arguments": lambda name: QueueDeclare(
        "/", name, True, False, False, {"x-text": "x" * 100_000}
    ),
    "stream": lambda name: QueueDeclare("/", name, True, False, False, dict(STREAM)),
    "exchange": lambda name: ExchangeDeclare("/", name, "topic", True, False, False, {}),
    "stream exchange": lambda name: ExchangeDeclare(
        "/", name, "x-random", True, False, False, {"x-shards": 3}
    ),
    "binding": lambda name: Bind("/", "amq.topic", "queue", "there", name, {}),
    "bindings": lambda name: BindMany(
        "/", [("amq.topic", "there", f"{name}.{i}") for i in range(9)]
    ),
    "vhost": lambda name: VhostPut(name),
    "user": lambda name: UserPut(name, ""),
    "permission": lambda name: PermissionPut("/", "there", name, "", ""),
    "topic permission": lambda name: TopicPermissionPut("/", "there", "amq.topic", name, ""),
    "policy": lambda name: ParameterPut("/", "policy", name, POLICY),
    "operator policy": lambda name: ParameterPut("/", "operator_policy", name, POLICY),
    "pause": lambda name: Pause("/", f"paused-{name}", True),
}
SHRINKS: dict[str, Any] = {
    "binding": Unbind("/", "amq.topic", "queue", "there", "k", {}),
    "queue": QueueRemove("/", "goes", False, False),
    "exchange": ExchangeRemove("/", "goes", False),
    "permission": PermissionDelete("/", "there"),
    "topic permission": TopicPermissionDelete("/", "there"),
    "policy": ParameterDelete("/", "policy", "there"),
    "user": UserDelete("goes"),
    "vhost": VhostDelete("goes"),
}


def named(what: str, kind: str) -> str:
    return what if kind == "pause" else f"{what} {kind}"


async def prepare(world: World) -> None:
    for name in ("there", "goes"):
        await world.ask(VhostPut(name))
        await world.ask(UserPut(name, ""))
        await world.ask(QueueDeclare("/", name, True, False, False, {}))
        await world.ask(ExchangeDeclare("/", name, "fanout", True, False, False, {}))
    for kind in ("full", "again"):
        await world.ask(QueueDeclare("/", f"paused-{kind}", True, False, False, {}))
    await world.ask(Bind("/", "amq.topic", "queue", "there", "k", {}))
    await world.ask(PermissionPut("/", "there", "", "", ""))
    await world.ask(TopicPermissionPut("/", "there", "amq.topic", "", ""))
    await world.ask(ParameterPut("/", "policy", "there", POLICY))


@contextlib.asynccontextmanager
async def running(directory: Path):  # type: ignore[no-untyped-def]
    world = World(directory)
    task = asyncio.create_task(world.authority.run())
    try:
        yield world
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        world.definitions.close()


def loaded(directory: Path, boot: str = "boot") -> Catalog:
    definitions = Definitions(directory, boot)
    catalog = definitions.load()
    definitions.close()
    return catalog


Filled = Callable[[], Callable[[], None]]


@pytest.fixture(params=["no bytes", "no inodes", "ENOSPC", "EDQUOT"])
def data_dir(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, Filled]]:
    """Yield a data directory, and the function that fills its disk."""
    if request.param in ("ENOSPC", "EDQUOT"):
        disk = RefusingDisk(monkeypatch)

        def refuse() -> Callable[[], None]:
            disk.error = getattr(errno, request.param)
            return lambda: setattr(disk, "error", 0)

        (tmp_path / "data").mkdir()
        yield tmp_path / "data", refuse
        return
    fill = take_all_bytes if request.param == "no bytes" else take_all_inodes
    with small_disk(
        tmp_path / "disk", mib=16, inodes=40 if fill is take_all_inodes else 0
    ) as disk_path:
        (disk_path / "data").mkdir()
        yield disk_path / "data", lambda: fill(disk_path)


async def test_whatever_makes_definitions_grow_is_refused_and_says_why_and_works_when_there_is_room(
    data_dir: tuple[Path, Filled],
) -> None:
    directory, fill = data_dir
    async with running(directory) as world:
        await prepare(world)
        before = state(world.catalog)
        free = fill()
        for name, made in GROWS.items():
            answer = await world.ask(made(named("full", name)))
            assert (name, answer.code, answer.result) == (name, NO_ROOM, {})
            assert "no room" in answer.text and str(directory) in answer.text
        assert state(world.catalog) == before and world.agree()
        free()
        for name, made in GROWS.items():
            assert (name, (await world.ask(made(named("again", name)))).code) == (name, 0)
        assert state(loaded(directory)) == state(world.catalog)


async def test_what_is_taken_away_on_a_full_disk_stays_away(data_dir: tuple[Path, Filled]) -> None:
    directory, fill = data_dir
    async with running(directory) as world:
        await prepare(world)
        fill()
        for name, request in SHRINKS.items():
            assert (name, (await world.ask(request)).code) == (name, 0)
        expected = state(world.catalog)
    assert state(loaded(directory)) == expected


async def test_what_is_there_is_declared_again_on_a_full_disk(
    data_dir: tuple[Path, Filled],
) -> None:
    directory, fill = data_dir
    async with running(directory) as world:
        await prepare(world)
        fill()
        assert (await world.ask(QueueDeclare("/", "there", True, False, False, {}))).code == 0
        assert (
            await world.ask(ExchangeDeclare("/", "there", "fanout", True, False, False, {}))
        ).code == 0


@pytest.mark.parametrize("boot", ["boot", "another", "toob"])
async def test_a_start_needs_no_room_and_so_does_the_one_after_it(
    data_dir: tuple[Path, Filled], boot: str
) -> None:
    directory, fill = data_dir
    async with running(directory) as world:
        await prepare(world)
        expected, version = state(world.catalog), world.catalog.version
    free = fill()
    files = {path.name for path in directory.iterdir()}
    for _ in range(3):
        catalog = loaded(directory, boot)
        assert state(catalog) == expected
        assert catalog.version > version, (
            "front doors of this boot may have seen the version before"
        )
        version = catalog.version
    assert {path.name for path in directory.iterdir()} - {"filled"} <= files
    free()
    assert state(loaded(directory, boot)) == expected


async def test_a_directory_without_room_set_aside_is_started_on_a_full_disk(
    data_dir: tuple[Path, Filled],
) -> None:
    """As one of an earlier version is: nothing can be changed, but all that is there is served."""
    directory, fill = data_dir
    async with running(directory) as world:
        await prepare(world)
        expected = state(world.catalog)
    for path in directory.glob("*.json"):
        path.with_name(path.name + ".new").unlink()
        shutil.copy(path, path.with_suffix(".copy"))
        path.with_suffix(".copy").replace(path)
    log = directory / "definitions.amqp"
    shutil.copy(log, log.with_suffix(".copy"))
    log.with_suffix(".copy").replace(log)
    free = fill()
    async with running(directory) as world:
        assert state(world.catalog) == expected
        assert (await world.ask(UserDelete("goes"))).code in (0, NO_ROOM)
        assert (await world.ask(GROWS["user"]("full"))).code == NO_ROOM
        assert state(world.catalog) == state(loaded(directory))
        free()
        for name, made in GROWS.items():
            assert (name, (await world.ask(made(named("again", name)))).code) == (name, 0)
        expected = state(world.catalog)
    assert state(loaded(directory)) == expected


@pytest.mark.parametrize("seed", range(12))
async def test_after_any_history_of_full_and_free_what_was_answered_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, disk = random.Random(seed), RefusingDisk(monkeypatch)
    names = [f"n{i}" for i in range(4)]
    for _life in range(4):
        async with running(tmp_path) as world:
            if _life == 0:
                await prepare(world)
            for _ in range(25):
                if rng.random() < 0.3:
                    disk.error = rng.choice([0, 0, errno.ENOSPC, errno.EDQUOT])
                made = rng.choice([GROWS[kind] for kind in GROWS if kind != "pause"])(
                    rng.choice(names)
                )
                removal = rng.choice([
                    QueueRemove("/", rng.choice(names), False, False),
                    ExchangeRemove("/", rng.choice(names), False), UserDelete(rng.choice(names)),
                    VhostDelete(rng.choice(names)),
                    ParameterDelete("/", "policy", rng.choice(names)),
                ])  # fmt: skip
                before = state(world.catalog)
                answer = await world.ask(made if rng.random() < 0.6 else removal)
                if answer.code:
                    assert state(world.catalog) == before, seed
            expected = state(world.catalog)
        assert state(loaded(tmp_path)) == expected, seed


def test_a_first_start_on_a_full_disk_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RefusingDisk(monkeypatch)
    disk.error = errno.ENOSPC
    with pytest.raises(DefinitionsError, match="definitions.amqp: No space left on device"):
        Definitions(tmp_path, "boot").load()


# -- what is missing is not taken for empty --------------------------------------------------------


def begun(directory: Path) -> Definitions:
    definitions = Definitions(directory, "b")
    load_or_begin(
        definitions,
        ControllerConfig(data_dir=str(directory), runtime_dir="", boot="b", shards=1, doors=1),
    )
    definitions.close()
    return definitions


FILES = ["definitions.amqp", "vhosts.json", "users.json", "permissions.json",
         "topic_permissions.json",
         "parameters.json"]  # fmt: skip


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_refused_by_name_and_nothing_is_changed(
    tmp_path: Path, file: str
) -> None:
    begun(tmp_path)
    (tmp_path / file).unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DefinitionsError, match=rf"{file} is missing.*put it back"):
        begun(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("file", FILES[1:])
def test_who_writes_an_empty_list_goes_on_without_what_was_lost(tmp_path: Path, file: str) -> None:
    begun(tmp_path)
    (tmp_path / file).write_text("[]")
    begun(tmp_path)


def test_all_definitions_missing_is_no_first_start(tmp_path: Path) -> None:
    begun(tmp_path)
    for file in FILES:
        (tmp_path / file).unlink()
    with pytest.raises(DefinitionsError, match="is missing"):
        begun(tmp_path)


def test_a_directory_of_an_earlier_version_may_lack_files_that_were_never_needed(
    tmp_path: Path,
) -> None:
    begun(tmp_path)
    for file in ("definitions.files", "topic_permissions.json", "parameters.json"):
        (tmp_path / file).unlink()
    begun(tmp_path)
    assert all((tmp_path / file).exists() for file in FILES)
    (tmp_path / "parameters.json").unlink()
    with pytest.raises(DefinitionsError, match=r"parameters\.json is missing"):
        begun(tmp_path)


def test_many_rows_at_once_and_large_ones_are_taken_where_there_is_room(tmp_path: Path) -> None:
    """What is set aside for small changes is no bound of what the disk has room for."""
    definitions = Definitions(tmp_path, "boot")
    definitions.load()
    try:
        for number in range(5_000):  # of one batch: the file is written behind the last
            assert definitions.lacks_room([UserPut(f"user-{number}", "x" * 100)]) == ""
        assert definitions.lacks_room([ParameterPut("/", "shards", "large", "x" * (3 << 20))]) == ""
    finally:
        definitions.close()
