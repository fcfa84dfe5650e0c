"""The facts that only a node itself can tell: processes, memory, listeners, how etcd answers."""

from __future__ import annotations

import json
import os
import time
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.memory import MemoryWatch
from shardmq.broker.shared.certificates import expires_at
from shardmq.supervisor.logs import KEPT

# Fields that the supervisor writes. `status` and `last_end` are texts for people.
# `front_door` is the number of the front door in the process, which may be a shard, too.
SHOWN: Final = (
    "name", "kind", "index", "front_door", "pid", "state", "status", "restarts", "last_end",
    "started_at",
)  # fmt: skip
READY: Final = "ready"  # the state of a process
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
CERTIFICATES_MAX: Final = 256  # of which the expiry is kept in memory
ETCD_HEARD_EACH_S: Final = 6.0  # at the latest, while etcd answers: a silent watch asks anew
# When a node has not heard etcd for so long, there is an alarm.
ETCD_SILENT_S_MAX: Final = 12.0
ETCD_AWAY: Final = "etcd does not answer"


class Certificate(msgspec.Struct, frozen=True):
    """A file with a certificate, and when it expires, in seconds since the epoch.

    With an `error` the file cannot be read.
    """

    path: str
    expires_at: float
    error: str = ""


class NodeFacts(msgspec.Struct, frozen=True):
    """The facts about one node at one moment.

    processes: a row for the supervisor and each of its children.
    listeners: the addresses by protocol.
    version: that of the program.
    certificates: those of the listeners.
    etcd_silent_s: the seconds since etcd has answered; None without a cluster.
    disk_free_bytes: -1 if it is not known, or is told by shards of the node.
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
    version: str = ""
    certificates: list[Certificate] = []
    etcd_silent_s: float | None = None
    disk_free_bytes: int = -1

    @property
    def alarms(self) -> list[str]:
        """The alarms of the node that are not of one of its shards."""
        is_away = self.etcd_silent_s is not None and self.etcd_silent_s > ETCD_SILENT_S_MAX
        return [alarm for alarm in (self.memory_alarm, ETCD_AWAY if is_away else "") if alarm]


def facts_of(
    config: ControllerConfig,
    memory: MemoryWatch,
    etcd_silent_s: float | None = None,
    disk_free_bytes: int = -1,
) -> NodeFacts:
    """Return the facts about this node."""
    found, cluster = status(config.runtime_dir), config.cluster
    for_nodes = {} if cluster is None else {"cluster": [f"{cluster.host}:{cluster.port}"]}
    return NodeFacts(
        processes=process_rows(found),
        listeners=found.get("listeners", {}) | for_nodes,
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
        version=product_version(),
        certificates=certificates_of(config),
        etcd_silent_s=etcd_silent_s,
        disk_free_bytes=disk_free_bytes,
    )


class OwnShard(NamedTuple):
    """A shard of this node, by what its process has told the supervisor."""

    number: int
    ready: bool
    alarm: str


def own_shards(found: dict[str, Any]) -> dict[int, OwnShard]:
    """Return the shards of which a status.json has processes, those that only copy included."""
    shards = [child for child in found.get("children", []) if child.get("kind") == "shard"]
    return {
        child["index"]: OwnShard(
            child["index"],
            child.get("state") == READY and bool(child.get("info", {}).get("serves")),
            child.get("info", {}).get("alarm", ""),
        )
        for child in shards
    }


def own_doors(found: dict[str, Any]) -> int:
    """Return how many front doors of a status.json serve."""
    children = found.get("children", [])
    return sum(
        child.get("front_door") is not None and child.get("state") == READY for child in children
    )


@cache
def product_version() -> str:
    try:
        return version_of("shardmq")
    except PackageNotFoundError:
        return "0"


def certificates_of(config: ControllerConfig) -> list[Certificate]:
    """Return the certificates in the files of the settings, as they are now."""
    tls, found = config.tls, []
    for path in [] if tls is None else dict.fromkeys([tls.cert, *(one.cert for one in tls.sni)]):
        try:
            stat = os.stat(path)
            found.append(Certificate(path, _expires_at(path, stat.st_mtime_ns, stat.st_size)))
        except (OSError, ValueError) as error:
            found.append(Certificate(path, 0.0, str(error)))
    return found


@lru_cache(CERTIFICATES_MAX)
def _expires_at(path: str, written_ns: int, size: int) -> float:
    """Return when the certificate of a file expires, which is read again after a change."""
    return expires_at(path)


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
