"""A broker whose disk can be made sick while it runs: `python -m tests.support.sick_broker FLAGS`.

What is wrong is said by files in the directory that SHARDMQ_TEST_FAULTS names, called shard-0.sync
(or write, read, allocate, open ...; shard-all.sync: of every shard): "hang" (until the file goes),
the name of an errno ("EIO"), or seconds that each call takes ("0.05").
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import sys
import time
from pathlib import Path

from shardmq.combined.__main__ import main as combined_main
from shardmq.shardd import disk_home
from shardmq.shardd.__main__ import main as shard_main
from shardmq.shardd.store.files import OsFiles
from shardmq.supervisor.__main__ import main as supervisor_main
from shardmq.supervisor.config import Settings
from shardmq.supervisor.plan import ChildPlan, Listening, children

VARIABLE = "SHARDMQ_TEST_FAULTS"
POLL_S = 0.01


class Disk:
    """The test's side."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def fault(self, call: str, what: str, shard: int | str = "all") -> None:
        new = self.directory / "new"
        new.write_text(what)
        new.replace(self.directory / f"shard-{shard}.{call}")

    def heal(self) -> None:
        for path in self.directory.iterdir():
            path.unlink()


class SickFiles(OsFiles):
    """The shard's side."""

    shard = 0

    def _suffer(self, call: str) -> None:
        for name in (f"shard-{self.shard}.{call}", f"shard-all.{call}"):
            path = Path(os.environ[VARIABLE]) / name
            what = ""
            with contextlib.suppress(OSError):
                what = path.read_text()
            if what == "hang":
                while path.exists():
                    time.sleep(POLL_S)
            elif what.startswith("E"):
                raise OSError(getattr(errno, what), f"{call} fails on purpose")
            elif what:
                time.sleep(float(what))

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> int:
        self._suffer("open")
        return super().open(path, create=create, read_only=read_only)

    def read_into(self, handle: int, target: memoryview, position: int) -> int:
        self._suffer("read")
        return super().read_into(handle, target, position)

    def read_pieces(self, handle: int, size: int, positions: list[int]) -> list[bytes]:
        self._suffer("read")
        return super().read_pieces(handle, size, positions)

    def write(self, handle: int, data: bytes | bytearray | memoryview, position: int) -> None:
        self._suffer("write")
        super().write(handle, data, position)

    def allocate(self, handle: int, size: int) -> None:
        self._suffer("allocate")
        super().allocate(handle, size)

    def sync(self, handle: int) -> None:
        self._suffer("sync")
        super().sync(handle)


def plan(
    settings: Settings, cores: int, runtime_dir: str, boot: str, listening: Listening
) -> list[ChildPlan]:
    made = children(settings, cores, runtime_dir, boot, listening)
    return [
        dataclasses.replace(each, module=__spec__.name) if each.kind == "shard" else each
        for each in made
    ]


if __name__ == "__main__":
    if sys.argv[-1].startswith("fd:"):  # settings come by a descriptor: this is a child
        at = int(sys.argv[-1].removeprefix("fd:"))
        section = json.loads(os.pread(at, 1 << 20, 0))
        combined = "front_door" in section
        SickFiles.shard = section["shard"]["shard"] if combined else section["shard"]
        disk_home.OsFiles = SickFiles  # type: ignore[misc]
        sys.exit(combined_main() if combined else shard_main())
    sys.exit(supervisor_main(planner=plan))
