"""Read from the machine: CPU time and memory of a broker's processes, and facts beside figures.

A broker is a pid and all processes below that pid. This module neither starts nor measures a
workload.
"""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MB = 1_000_000
PROBE_SYNCS = 200
LISTENING = "0A"  # the state LISTEN in /proc/net/tcp


def tree(pid: int) -> list[int]:
    """Return the pid and the pids of all processes below it at this moment."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := stat_fields(int(entry.name))):
            children[int(fields[1])].append(int(entry.name))
    found = [pid]
    for parent in found:
        found.extend(children[parent])
    return found


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, [] when the process is gone."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_seconds(pids: list[int]) -> float:
    return sum(process_cpu_seconds(pid) for pid in pids)


def process_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process.

    The time is exact to the nanosecond where the kernel keeps it, otherwise it is in clock ticks.
    """
    try:
        exact = [
            int((task / "schedstat").read_text().split()[0])
            for task in (PROC / str(pid) / "task").iterdir()
        ]
    except OSError:
        exact = []
    if sum(exact):
        return sum(exact) / 1e9
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


@contextlib.contextmanager
def last_in_line(pids: list[int]) -> Iterator[str]:
    """Give the processes, and those they start, only the cores that nobody else wants.

    This is what `systemd-run -p CPUWeight=idle` does. Yields the name of the means: "cpu.idle", a
    control group, or "SCHED_IDLE" where no group can be made. SCHED_IDLE alone still leaves the
    processes a share where Linux divides the cores by session first.
    """
    for root in (one for one in CPU_GROUPS if (one / "cgroup.procs").exists()):
        group = root / f"bench-{os.getpid()}"
        try:
            group.mkdir()
            (group / "cpu.idle").write_text("1")
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        before = {pid: root / own_group(pid, root).lstrip("/") for pid in pids}
        try:
            for pid in pids:
                move(pid, group)
            yield "cpu.idle"
        finally:
            leave(group, before, before[pids[0]])
        return
    set_policy(pids, os.SCHED_IDLE)
    try:
        yield "SCHED_IDLE"
    finally:
        set_policy(pids, os.SCHED_OTHER)


def leave(group: Path, before: dict[int, Path], others: Path) -> None:
    """Move all processes back to their groups and remove the group.

    This is repeated until the group is empty, because a process may just have started another one.
    """
    give_up = time.monotonic() + LEAVE_S_MAX
    while True:
        for pid in map(int, (group / "cgroup.procs").read_text().split()):
            move(pid, before.get(pid, others))
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > give_up:
                raise
        time.sleep(0.01)


LEAVE_S_MAX = 10.0
# The folders of control groups version 1 and version 2.
CPU_GROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))


def own_group(pid: int, root: Path) -> str:
    """Return the path of a process's control group below this root."""
    for line in (PROC / str(pid) / "cgroup").read_text().splitlines():
        number, kinds, path = line.split(":", 2)
        if root.name in kinds.split(",") or (number == "0" and root == CPU_GROUPS[1]):
            return path
    return "/"


def move(pid: int, group: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        (group / "cgroup.procs").write_text(str(pid))


def set_policy(pids: list[int], policy: int) -> None:
    """Set the scheduling policy of all threads of processes; new threads inherit it."""
    for pid in pids:
        for task in (PROC / str(pid) / "task").glob("*"):
            with contextlib.suppress(OSError):  # the thread has ended
                os.sched_setscheduler(int(task.name), policy, os.sched_param(0))


def listener(port: int) -> int | None:
    """Return the pid of the process on this host that listens on a TCP port.

    If several processes have the socket, the oldest is returned: the others may have inherited it.
    """
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in (PROC / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    pids = (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())
    return min((pid for pid in pids if has_socket(pid, inodes)), key=started_at, default=None)


def has_socket(pid: int, inodes: set[str]) -> bool:
    try:
        return any(os.readlink(fd) in inodes for fd in (PROC / str(pid) / "fd").iterdir())
    except OSError:
        return False  # the process has ended or is another user's


def started_at(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


@dataclass(frozen=True, slots=True)
class Memory:
    """Sums over processes. RSS counts a page that two processes share twice, PSS counts it once."""

    rss_mb: float
    pss_mb: float | None


def rss_mb(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        try:
            total += int((PROC / str(pid) / "statm").read_text().split()[1]) * PAGE_BYTES
        except OSError:
            pass  # the process has ended since it was listed
    return total / MB


def memory(pids: list[int]) -> Memory:
    try:
        pss = sum(pss_kib(pid) for pid in pids) * 1024 / MB
    except OSError:
        pss = None  # the process is another user's or has just ended
    return Memory(rss_mb(pids), pss)


def pss_kib(pid: int) -> int:
    for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def load_average() -> float:
    return os.getloadavg()[0]


def facts() -> dict[str, str | int | float]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 0,
        "memory_mb": round(os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES / MB),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def cpu_model() -> str:
    for line in (PROC / "cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def syncs_per_s(directory: Path, body_bytes: int = 4096) -> float:
    """Return how many single-page writes, each followed by fdatasync, the disk does per second.

    The writes go into a preallocated file.
    """
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, PROBE_SYNCS * body_bytes)
        os.fsync(file.fileno())
        begun = time.perf_counter()
        for i in range(PROBE_SYNCS):
            os.pwrite(file.fileno(), b"x" * body_bytes, i * body_bytes)
            os.fdatasync(file.fileno())
        return PROBE_SYNCS / (time.perf_counter() - begun)
