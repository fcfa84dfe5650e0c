"""The facts that only a node itself can tell: its processes with memory and files, listeners."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.memory import MemoryWatch
from shardmq.supervisor.logs import KEPT

# Fields that the supervisor writes. `status` and `last_end` are texts for people.
# `front_door` is the number of the front door in the process, which may be a shard, too.
SHOWN: Final = (
    "name", "kind", "index", "front_door", "pid", "state", "status", "restarts", "last_end",
    "started_at",
)  # fmt: skip
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class NodeFacts(msgspec.Struct, frozen=True):
    """The facts about one node at one moment.

    processes: a row for the supervisor and each of its children.
    listeners: the addresses by protocol.
    """

    processes: list[dict[str, Any]]
    listeners: dict[str, list[str]]
    pid: int
    cores: int | None
    memory_bytes: int
    memory_limit_bytes: int
    memory_alarm: str
    pids_max: int
    run_queue: int
    data_dir: str
    log_files: list[str]


def facts_of(config: ControllerConfig, memory: MemoryWatch) -> NodeFacts:
    """Return the facts about this node."""
    found = status(config.runtime_dir)
    return NodeFacts(
        processes=process_rows(found),
        listeners=found.get("listeners", {}),
        pid=os.getpid(),
        cores=os.cpu_count(),
        memory_bytes=memory.used_bytes,
        memory_limit_bytes=memory.limit_bytes,
        memory_alarm=memory.alarm,
        pids_max=int(Path("/proc/sys/kernel/pid_max").read_text()),
        # The threads of this host that run or wait for a core.
        run_queue=int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]),
        data_dir=os.path.abspath(config.data_dir),
        # The last lines of each process. The whole log goes to the journal or to standard error.
        log_files=sorted(
            str(path) for path in Path(config.runtime_dir).absolute().glob(f"{KEPT}*")
        ),
    )


def status(runtime_dir: str) -> dict[str, Any]:
    """Return the supervisor's status.json; {} without a supervisor."""
    try:
        found = json.loads((Path(runtime_dir) / "status.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {"children": found}


def rss_bytes(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def open_files(pid: int) -> tuple[int | None, int | None]:
    """Return how many files a process has open, and how many it may open."""
    try:
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        limit = next(line.split()[3] for line in limits if line.startswith("Max open files"))
        return len(os.listdir(f"/proc/{pid}/fd")), int(limit) if limit.isdigit() else None
    except (OSError, StopIteration):
        return None, None


def process_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each process in a status.json."""
    now, shown = time.time(), []
    # The supervisor is no child of its own, but its pid is what stops the broker by hand.
    supervisor = {
        "name": "supervisor",
        "kind": "supervisor",
        "index": 0,
        "state": "ready",
        "restarts": 0,
        "pid": found.get("pid"),
        "started_at": found.get("started_at"),
    }
    for child in [supervisor, *found.get("children", [])] if found else []:
        row = {name: child.get(name) for name in SHOWN}
        if row["started_at"]:
            row["uptime"] = round(max(0.0, now - row["started_at"]), 3)
        if row["pid"]:
            row["rss_bytes"] = rss_bytes(row["pid"])
            row["fd_used"], row["fd_total"] = open_files(row["pid"])
        shown.append(row)
    return shown
