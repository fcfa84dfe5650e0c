"""The memory that the broker's processes hold, and the alarm when it is too much.

Only memory that the kernel cannot take back counts. Pages of files (segments, code) do not: they go
when others need them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

LOW_ON_MEMORY = "low on memory"
# An alarm ends below this part of the limit, so that it does not come and go with every message.
OVER_BELOW = 0.95
COUNTED = ("RssAnon:", "RssShmem:")
CGROUPS = Path("/sys/fs/cgroup")

log = logging.getLogger(__name__)


class MemoryWatch:
    """The alarm of the broker; `alarm` is "" while there is enough memory."""

    def __init__(self) -> None:
        self.used_bytes = self.limit_bytes = 0
        self.alarm = ""

    def look(self, pids: Iterable[int], watermark: float, absolute_bytes: int) -> None:
        """Measure these processes, and begin or end the alarm; see `limit_bytes`."""
        self.used_bytes = used_bytes(pids)
        self.limit_bytes = limit_bytes(watermark, absolute_bytes)
        before, self.alarm = self.alarm, alarm(self.used_bytes, self.limit_bytes, self.alarm)
        if self.alarm != before:
            used, limit = self.used_bytes >> 20, self.limit_bytes >> 20
            log.warning(
                "memory: %d MiB in use, %d allowed: %s", used, limit, self.alarm or "enough again"
            )


def limit_bytes(watermark: float, absolute_bytes: int) -> int:
    """Return the limit of all processes together; 0 for none.

    `absolute_bytes` counts if it is not 0, else `watermark`, which is a part of `total_bytes`.
    """
    return absolute_bytes or int(watermark * total_bytes())


def alarm(used_bytes: int, limit: int, before: str) -> str:
    if limit and used_bytes > limit * (OVER_BELOW if before else 1):
        return LOW_ON_MEMORY
    return ""


def total_bytes() -> int:
    """Return the memory of the machine, or what our control groups may use if that is less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for group in [line[3:].lstrip("/") for line in lines if line.startswith("0::")][:1]:
        for folder in (CGROUPS / group, *(CGROUPS / group).parents):
            try:
                text = (folder / "memory.max").read_text().strip()
            except OSError:
                continue
            if text.isdigit():
                found.append(int(text))
    return min(found)


def used_bytes(pids: Iterable[int]) -> int:
    """Return the memory of these processes together; one that is gone has none."""
    kib = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            kib += sum(int(line.split()[1]) for line in lines if line.startswith(COUNTED))
    return kib << 10


Stamp = tuple[int, ...]


def status_stamp(runtime_dir: str) -> Stamp:
    """Return what tells a status.json of the supervisor from the one before; () without one.

    The supervisor puts a new file in the place of the one before.
    """
    try:
        about = os.stat(f"{runtime_dir}/status.json")
    except OSError:
        return ()
    return about.st_ino, about.st_size, about.st_mtime_ns


def pids(runtime_dir: str) -> list[int]:
    """Return the ids of all processes of the broker; without a supervisor, our own."""
    try:
        return _pids(runtime_dir, status_stamp(runtime_dir))
    except (OSError, ValueError, KeyError, TypeError):
        return [os.getpid()]


@lru_cache(1)
def _pids(runtime_dir: str, stamp: Stamp) -> list[int]:
    """Return the ids in status.json, which is read again after a change, or after an error."""
    found = json.loads((Path(runtime_dir) / "status.json").read_bytes())
    known = [int(found["pid"]), *(int(child["pid"]) for child in found["children"])]
    return [pid for pid in known if pid]
