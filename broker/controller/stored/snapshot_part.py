"""The part of a snapshot that one node of a cluster makes, on its own disk.

The leader of the cluster says what is to be done, step by step. The shards of the node write their
files into the part by themselves. All methods wait for the disk, so they run in a thread, one at a
time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Final

import msgspec

from shardmq.broker.controller.stored import snapshot_directory
from shardmq.broker.controller.stored.definitions import is_of_definitions
from shardmq.broker.controller.stored.snapshot_directory import INCOMPLETE, VERSION_NAME, NoSnapshot
from shardmq.cluster.membership import (
    IDENTITY_BYTES,
    NoPlace,
    Origin,
    read_place,
    write_place,
)

# Names of nodes that are names of directories as they are.
PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9@._-]{0,199}")
SHARD: Final = re.compile(r"shard-([0-9]{2,})")


def folder_of(node: str, number: int) -> str:
    """Return the name of a node's part in the directory of a snapshot."""
    return node if PLAIN_NAME.fullmatch(node) else f"node-{number}"


class OwnPart:
    """The part of one snapshot at this node, from the first look to its name.

    data_dir: that of the node; `cluster` and `node` are their names, and `number` is the node's.
    is_named: the part is whole, and has its name.
    """

    def __init__(self, data_dir: str, cluster: str, node: str, number: int) -> None:
        self._data_dir = Path(data_dir)
        self._cluster, self._node = cluster, node
        self._folder = folder_of(node, number)
        self._target: Path | None = None
        self._was_there = False  # the directory that the part is made in
        self._made: list[Path] = []
        self.is_named = False

    @property
    def path(self) -> Path:
        """The directory of the part by its present name. Call `begin` before."""
        assert self._made, "the part has begun"
        return self._made[0]

    def look(self, target: Path) -> None:
        """Look whether a part can be made in a directory. Raises NoSnapshot or OSError."""
        snapshot_directory.check(target, self._data_dir)
        self._was_there = target.exists()

    def begin(self, target: Path) -> None:
        """Make the directory of the part. Raises OSError."""
        self._target = target
        snapshot_directory.begin_part(target, self._folder, self._made)

    def create(self, name: str, mode: int) -> int:
        """Return a descriptor of a new file of the definitions. Raises NoSnapshot or OSError."""
        if "/" in name or not is_of_definitions(name):
            raise NoSnapshot(f"{name} is no file of definitions")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(self.path / name, flags, mode & 0o777)

    def finish(self, origin: Origin) -> None:
        """Write what says which snapshot this is part of. Raises NoSnapshot or OSError."""
        part = origin.parts[self._node]
        found = {
            int(name[1])
            for path in self.path.iterdir()
            if (name := SHARD.fullmatch(path.name)) is not None
        }
        if found != part.shards.keys():
            raise NoSnapshot(
                f"the part has the shards {sorted(found)}, and not {sorted(part.shards)}"
            )
        try:
            place = read_place(self._data_dir, self._cluster, self._node)
        except NoPlace as error:
            raise NoSnapshot(str(error)) from None
        # With an identity of its own the part cannot take the place of the node that made it.
        place = msgspec.structs.replace(
            place,
            identity=os.urandom(IDENTITY_BYTES).hex(),
            number=part.number,
            shards=sorted(part.shards),
            origin=origin,
        )
        version = json.loads((self._data_dir / VERSION_NAME).read_bytes())
        version["shards"] = sorted(part.shards)
        (self.path / VERSION_NAME).write_text(f"{json.dumps(version)}\n")
        write_place(self.path, place)
        snapshot_directory.sync(self.path)

    def give_name(self) -> None:
        """Give the part its name; then it stays. Raises OSError."""
        assert self._target is not None
        named = self._target / self._folder
        self.path.rename(named)
        self._made[0] = named
        self.is_named = True
        snapshot_directory.sync_names(self._target)

    def remove(self) -> None:
        """Remove what there is of the part, as far as possible, and the directory made for it.

        A shard may still write to the part. It finds no directory of this name any more, and does
        not make it again.
        """
        while self._made:
            path = self._made.pop()
            gone = path.with_name(f"gone.{self._folder}{INCOMPLETE}")
            with contextlib.suppress(OSError):
                path.rename(gone)
                path = gone
            shutil.rmtree(path, ignore_errors=True)
        if self._target is not None and not self._was_there:
            with contextlib.suppress(OSError):
                self._target.rmdir()
