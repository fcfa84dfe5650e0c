"""Run the load generator once beside one broker and read the broker's CPU time and memory.

The generator prints `@start` and `@end` around the time that it measures, and `@hold` while its
load still stands. CPU time and memory are read at these marks, so they belong to the same seconds
as the rates.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine

LOAD = Path(__file__).parent / "load"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardmq"
GENERATOR = (LOAD if os.access(LOAD, os.W_OK) else CACHE) / "amqpload"
SETTLE_S = 1.0  # time from the full load to the reading of memory
SAMPLE_S = 0.05
END_S_MAX = 5.0  # time for an interrupted generator to end
REST_S = 1.5
REST_LOOKS_MAX = 10
OVERTIME_S_MAX = 180.0  # added to the seconds that a run is asked to take

Figures = dict[str, float]
Sent = tuple[float, float]


class RunFailed(Exception):
    """The generator or the broker did not do its work; the text is the generator's own."""


@dataclass(frozen=True, slots=True)
class Target:
    """A broker to measure. Without a pid there are rates and latencies, but no CPU and memory.

    pid: its topmost process. other_pids: those of other hosts whose work counts, too.
    http: HOST:PORT of the HTTP API, where it is known.
    follower_pids: the topmost processes of hosts that keep copies; their work is told apart.
    sent: returns how many bytes it has sent to them until now, and how many messages it has stored.
    options: what the generator is told besides the options of a scenario.
    """

    name: str
    url: str
    pid: int | None = None
    http: str = ""
    other_pids: tuple[int, ...] = ()
    follower_pids: tuple[int, ...] = ()
    sent: Callable[[], Sent] | None = None
    options: tuple[str, ...] = ()

    def processes(self) -> list[int]:
        pids = (self.pid, *self.other_pids) if self.pid else self.other_pids
        return [process for pid in pids for process in machine.tree(pid)]

    def followers(self) -> list[int]:
        return [process for pid in self.follower_pids for process in machine.tree(pid)]


@dataclass(slots=True)
class Readings:
    """The readings at the marks.

    `processes` is read once, because a broker starts no process in the middle of a run.
    """

    processes: list[int]
    before: machine.Memory
    followers: list[int] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)
    follower_cpu: dict[str, float] = field(default_factory=dict)
    held: machine.Memory | None = None
    rss_max_mb: float = 0.0


def build_generator() -> None:
    GENERATOR.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["make", "--silent", "-C", str(LOAD), f"OUT={GENERATOR}"], check=True)


def measure(
    target: Target, options: list[str], seconds: float, overtime_s: float = OVERTIME_S_MAX
) -> Figures:
    """Run the generator once and return the figures of the run.

    `seconds` is the time that the run is asked to take. Raises RunFailed when a message was lost,
    refused or damaged, or when the broker closed a connection.
    """
    processes = target.processes()
    readings = Readings(processes, machine.memory(processes), target.followers())
    before = at_rest(target.sent) if target.sent else None
    with watched(readings), started(target, options, seconds + overtime_s) as process:
        report = follow(process, readings)
    if report.get("error") or process.returncode:
        raise RunFailed(
            report.get("error") or f"the generator ended with status {process.returncode}"
        )
    found = figures(report, readings)
    if target.follower_pids and found.get("cpu_s"):
        of = readings.follower_cpu
        spent = (of["@end"] - of["@start"]) / len(target.follower_pids)
        found["follower_cpu"] = spent / found["cpu_s"]
    if target.sent and before is not None:
        found.update(wire(before, at_rest(target.sent)))
    return found


@contextmanager
def started(
    target: Target, options: list[str], seconds_max: float
) -> Iterator[subprocess.Popen[str]]:
    command = [str(GENERATOR), "--json", "--marks", *options, *target.options]
    # Other users can read a command line, and the URL holds the password.
    process = subprocess.Popen(
        command,
        env={**os.environ, "AMQPLOAD_URL": target.url},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    limits = [
        threading.Timer(
            seconds_max, process.terminate
        ),  # on SIGTERM the generator deletes its queues
        threading.Timer(seconds_max + END_S_MAX, process.kill),
    ]
    for limit in limits:
        limit.start()
    try:
        yield process
        process.wait()
    finally:
        for limit in limits:
            limit.cancel()
        process.terminate()
        try:
            process.communicate(timeout=END_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def follow(process: subprocess.Popen[str], readings: Readings) -> dict[str, Any]:
    """Read the generator's lines to the last one and return it: the report."""
    assert process.stdout and process.stdin
    for line in process.stdout:
        match line.strip():
            case "@start" | "@end" as mark:
                readings.cpu[mark] = machine.cpu_seconds(readings.processes)
                readings.follower_cpu[mark] = machine.cpu_seconds(readings.followers)
            case "@hold":
                time.sleep(SETTLE_S)
                readings.held = machine.memory(readings.processes)
                process.stdin.write("\n")
                process.stdin.flush()
            case text if text.startswith("{"):
                report: dict[str, Any] = json.loads(text)
                return report
    return {"error": "the generator ended without a report"}


@contextmanager
def watched(readings: Readings) -> Iterator[None]:
    """Keep the largest memory that the broker had at any time."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_S):
            readings.rss_max_mb = max(readings.rss_max_mb, machine.rss_mb(readings.processes))

    thread = threading.Thread(target=watch, daemon=True)
    if readings.processes:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if readings.processes:
            thread.join()


def figures(report: dict[str, Any], readings: Readings) -> Figures:
    """Return the flat list of numbers of a run, without those that could not be read."""
    names = ("rate", "published_per_s", "consumed_per_s", "bytes_per_s", "blocked_s")
    found: Figures = {name: report[name] for name in names}
    found["mb_per_s"] = report["bytes_per_s"] / machine.MB
    for source, name in (("confirm_us", "confirm"), ("latency_us", "latency")):
        for percentile, value in report.get(source, {}).items():
            if percentile != "count":
                found[f"{name}_{percentile}_us"] = value
    if readings.processes:
        found.update(cost(report, readings))
    return found


def cost(report: dict[str, Any], readings: Readings) -> Figures:
    spent = readings.cpu.get("@end", 0.0) - readings.cpu.get("@start", 0.0)
    found = {"cpu_s": spent, "cores": spent / report["seconds"], "rss_max_mb": readings.rss_max_mb}
    # Deliveries count; where nobody consumes, publishes or other operations do.
    moved_per_s = report["consumed_per_s"] or report["published_per_s"]
    if spent > 0 and moved_per_s:
        found["per_cpu_s"] = moved_per_s * report["seconds"] / spent
        found["cpu_us"] = 1e6 / found["per_cpu_s"]
    after = readings.held
    found["rss_added_mb"] = (
        after.rss_mb if after else readings.rss_max_mb
    ) - readings.before.rss_mb
    if after and after.pss_mb is not None and readings.before.pss_mb is not None:
        found["pss_added_mb"] = after.pss_mb - readings.before.pss_mb
    return found


def at_rest(sent: Callable[[], Sent]) -> Sent:
    """Return what was sent and stored as soon as it rests, as a broker tells its numbers late."""
    before = None
    for _ in range(REST_LOOKS_MAX):
        now = sent()
        if now == before:
            break
        before = now
        time.sleep(REST_S)
    return now


def wire(before: Sent, after: Sent) -> Figures:
    """Return the bytes sent to all followers of a message."""
    sent, stored = (b - a for a, b in zip(before, after, strict=True))
    return {"wire_bytes": sent / stored} if stored else {}
