"""Make a snapshot of a broker on one host: the definitions, and the files of each shard.

All goes into a directory of another name, which gets its own name when everything is on stable
storage. So a snapshot that fails, or is cut off, is never taken for a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Final, ParamSpec

from shardmq.broker.controller.peers.shard_links import ShardLinks, ShardSilent
from shardmq.broker.controller.stored.definitions import ENDED_NAME, Definitions
from shardmq.broker.controller.stored.installation import NAME as INSTALLATION
from shardmq.broker.model.catalog import Catalog
from shardmq.shardd.wire import messages as wire

# How long a shard may take for its files.
SHARD_S_MAX: Final = 3600.0
# The name of a snapshot until it is whole ends with this.
INCOMPLETE: Final = ".incomplete"
# The file by which the supervisor knows the shards of a data directory.
VERSION_NAME: Final = "VERSION"
# Inside the data directory snapshots lie in this folder only, which no start looks at.
INSIDE: Final = "snapshots"
DIRECTORY_MODE: Final = 0o750

P = ParamSpec("P")
Places = dict[tuple[str, str], int]  # the shards of the durable queues, by vhost and name


class NoSnapshot(Exception):
    """A snapshot cannot be made. The text says why, for the operator."""


class Snapshots:
    """The snapshots of one controller, one at a time.

    data_dir: that of the broker.
    moving: returns the names of queues that move between shards now.
    """

    def __init__(
        self,
        data_dir: str,
        catalog: Catalog,
        definitions: Definitions,
        shards: ShardLinks,
        moving: Callable[[], Collection[object]],
    ) -> None:
        self._data_dir = Path(data_dir)
        self._catalog = catalog
        self._definitions = definitions
        self._shards = shards
        self._moving = moving
        self._is_busy = False

    async def make(self, target: Path) -> None:
        """Make a snapshot in a directory that is empty or not there. Raises NoSnapshot."""
        if self._is_busy:
            raise NoSnapshot("another snapshot is being made")
        if self._moving():
            raise NoSnapshot("queues move between shards: try again when they have moved")
        self._is_busy = True
        try:
            await self._make(target)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise NoSnapshot(f"{where}{error.strerror or error}") from None
        finally:
            self._is_busy = False

    async def _make(self, target: Path) -> None:
        made: list[Path] = []
        try:
            await _in_thread(_begin, target, self._data_dir, made)
            (fresh,) = made
            await _in_thread(_copy_small, self._data_dir, fresh, VERSION_NAME, INSTALLATION)
            before = self._places()
            replies = [
                self._shards.request(
                    shard.number,
                    partial(wire.Snapshot, directory=f"{fresh}/shard-{shard.number:02d}"),
                    SHARD_S_MAX,
                )
                for shard in self._shards.shards
            ]
            await asyncio.wait(replies)
            for shard, reply in enumerate(replies):
                answer = _answer(reply)
                if isinstance(answer, wire.Refused):
                    raise NoSnapshot(f"shard {shard}: {answer.text}")
            # Behind the shards: a queue of which messages were taken is then known, unless somebody
            # has deleted it.
            write = self._definitions.copy_job(self._catalog, fresh)
            after = self._places()
            if self._moving() or any(after.get(name, at) != at for name, at in before.items()):
                raise NoSnapshot("a queue has moved between shards meanwhile: try again")
            await _in_thread(write)
            # Behind the definitions, since a stream is noted as ended before its queue goes.
            await _in_thread(_copy_small, self._data_dir, fresh, ENDED_NAME)
            await _in_thread(_give_name, fresh, target)
        except BaseException:
            for path in made:
                await _in_thread(partial(shutil.rmtree, path, ignore_errors=True))
            raise

    def _places(self) -> Places:
        return {
            (vhost.name, queue.name): queue.shard
            for vhost in self._catalog.vhosts.values()
            for queue in vhost.queues.values()
            if queue.durable
        }


async def _in_thread(work: Callable[P, None], *args: P.args, **named: P.kwargs) -> None:
    """Run work in a thread. Who cancels this waits until the work has ended, as often as he does.

    So nothing is removed beside a thread that still writes it or gives it its name.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **named))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        running.exception()  # it is of no interest any more
        raise cancelled
    running.result()


def _begin(target: Path, data_dir: Path, made: list[Path]) -> None:
    """Make the directory of a snapshot, and add it to `made`. Raises NoSnapshot or OSError."""
    fresh = _checked(target, data_dir)
    fresh.mkdir(mode=DIRECTORY_MODE)
    made.append(fresh)


def _checked(target: Path, data_dir: Path) -> Path:
    """Return the name of a target until it is whole. Raises NoSnapshot if it cannot be made."""
    if not target.is_absolute() or ".." in target.parts:
        raise NoSnapshot(f"{target} is no absolute path")
    if target == Path(target.anchor):
        raise NoSnapshot(f"{target} is not empty")
    parent, data = target.parent.resolve(), data_dir.resolve()
    if parent == data / INSIDE:
        with contextlib.suppress(FileExistsError):
            parent.mkdir(mode=DIRECTORY_MODE)
            _sync(data)
    elif parent.is_relative_to(data):
        raise NoSnapshot(f"{target} is in the data directory: take a name in {data / INSIDE}")
    fresh = target.with_name(f"{target.name}{INCOMPLETE}")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise NoSnapshot(f"{target} is no directory")
    if os.path.ismount(target):
        raise NoSnapshot(f"{target} is a mount point, which keeps its name: take a name below it")
    if target.is_dir() and any(target.iterdir()):
        raise NoSnapshot(f"{target} is not empty")
    if fresh.is_symlink() or fresh.exists():
        raise NoSnapshot(f"{fresh} is there, of a snapshot that was cut off: remove it")
    return fresh


def _answer(reply: asyncio.Future[object]) -> object:
    try:
        return reply.result()
    except ShardSilent as error:
        raise NoSnapshot(str(error)) from None


def _copy_small(data_dir: Path, fresh: Path, *names: str) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(data_dir / name, fresh / name)


def _give_name(fresh: Path, target: Path) -> None:
    """Sync what lies in the directory itself, then give it its name."""
    for path in (*(each for each in fresh.iterdir() if each.is_file()), fresh):
        _sync(path)
    fresh.rename(target)  # over an empty directory, if there is one
    _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
