"""Make a snapshot of a broker: the definitions, and the files of each shard.

`stored/snapshot_directory.py` has the directory that all goes into. In a cluster,
`nodes/cluster_snapshots.py` has each node make its part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, Final, ParamSpec, Protocol

from shardmq.broker.controller.peers.shard_links import ShardLinks, ShardSilent
from shardmq.broker.controller.stored import snapshot_directory
from shardmq.broker.controller.stored.definitions import ENDED_NAME, Definitions
from shardmq.broker.controller.stored.installation import NAME as INSTALLATION
from shardmq.broker.controller.stored.snapshot_directory import VERSION_NAME, NoSnapshot
from shardmq.broker.model.catalog import Catalog
from shardmq.shardd.wire import messages as wire

# How long a shard may take for its files.
SHARD_S_MAX: Final = 3600.0
P = ParamSpec("P")
Places = dict[tuple[str, str], int]  # the shards of the durable queues, by vhost and name


class InCluster(Protocol):
    """Makes the parts of a snapshot at the nodes of a cluster."""

    async def make(self, target: Path, snapshots: Snapshots) -> dict[str, Any]: ...


class Snapshots:
    """The snapshots of one controller, one at a time.

    data_dir: that of the broker.
    moving: returns the names of queues that move between shards now.
    cluster: makes them in a cluster; None on one host.
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
        self.cluster: InCluster | None = None

    async def make(self, target: Path) -> dict[str, Any]:
        """Make a snapshot in a directory that is empty or not there. Raises NoSnapshot.

        Returns what an answer says of it besides the directory.
        """
        if self._is_busy:
            raise NoSnapshot("another snapshot is being made")
        if self._moving():
            raise NoSnapshot("queues move between shards: try again when they have moved")
        self._is_busy = True
        try:
            if self.cluster is not None:
                return await self.cluster.make(target, self)
            await self._make(target)
            return {}
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise NoSnapshot(f"{where}{error.strerror or error}") from None
        finally:
            self._is_busy = False

    async def _make(self, target: Path) -> None:
        made: list[Path] = []
        try:
            await in_thread(snapshot_directory.begin, target, self._data_dir, made)
            (fresh,) = made
            await self._copy(fresh, VERSION_NAME)
            before = self.places()
            replies = [self.ask(shard.number, fresh) for shard in self._shards.shards]
            await asyncio.wait(replies)
            for shard, reply in enumerate(replies):
                look_at(shard, reply)
            await self.write_definitions(fresh, before)
            await in_thread(snapshot_directory.give_name, fresh, target)
        except BaseException:
            for path in made:
                await in_thread(snapshot_directory.remove, path)
            raise

    def ask(self, shard: int, fresh: Path) -> asyncio.Future[Any]:
        """Ask a shard for its files, in a directory at its node."""
        directory = f"{fresh}/shard-{shard:02d}"
        return self._shards.request(shard, partial(wire.Snapshot, directory=directory), SHARD_S_MAX)

    async def write_definitions(self, fresh: Path, before: Places) -> None:
        """Write the definitions to a directory, when the shards have written their files.

        before: the places of the queues before the shards were asked. Raises NoSnapshot, OSError.
        """
        # Behind the shards: a queue of which messages were taken is then known, unless somebody
        # has deleted it.
        write = self._definitions.copy_job(self._catalog, fresh)
        after = self.places()
        if self._moving() or any(after.get(name, at) != at for name, at in before.items()):
            raise NoSnapshot("a queue has moved between shards meanwhile: try again")
        await in_thread(write)
        # Behind the definitions, since a stream is noted as ended before its queue goes.
        await self._copy(fresh, ENDED_NAME, INSTALLATION)

    async def _copy(self, fresh: Path, *names: str) -> None:
        await in_thread(snapshot_directory.copy_small, self._data_dir, fresh, *names)

    def places(self) -> Places:
        """Return where the durable queues lie."""
        return {
            (vhost.name, queue.name): queue.shard
            for vhost in self._catalog.vhosts.values()
            for queue in vhost.queues.values()
            if queue.durable
        }


async def in_thread(work: Callable[P, None], *args: P.args, **named: P.kwargs) -> None:
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


def look_at(shard: int, reply: asyncio.Future[Any]) -> None:
    """Look at the answer of a shard. Raises NoSnapshot unless its files are there."""
    try:
        answer = reply.result()
    except ShardSilent as error:
        raise NoSnapshot(str(error)) from None
    if isinstance(answer, wire.Refused):
        raise NoSnapshot(f"shard {shard}: {answer.text}")
