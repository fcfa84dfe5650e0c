"""Measure the time from `kill -9` with many persistent messages until all of them are back.

This broker is started again by this module. A peer is started again by the program that started the
peer (`peers.py` does this). The peer is asked repeatedly from the kill on, so the figure contains
the time of the peer's start-up script, as this broker's figure contains the start of Python.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import machine
import scale
from brokers import port_of
from generator import Figures, RunFailed, Target, measure

QUEUES = 10
NAMES = [f"recovery-{i}" for i in range(QUEUES)]
SHARED = [
    "--body",
    "100",
    "--persistent",
    "--durable",
    "--no-consume",
    "--prefix",
    "recovery",
    "--queues",
    str(QUEUES),
]
SHARED += ["--keys", str(QUEUES)]
FILL_S_MAX = 900.0
START_S_MAX = 600.0
ASK_EACH_S = 0.02
STARTED_S = 2.0  # after this time a broker has its own memory


def recovered_own(data_parent: Path | None, count: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="recovery-", dir=data_parent) as directory:
        own = scale.Broker(Path(directory), os.cpu_count() or 1)
        own.start()
        try:
            fill(own.target(), count)
            own.kill()
            begun = time.monotonic()
            own.start()
            return figures(counted(own.address, NAMES, count), begun, count)
        finally:
            own.stop()


def recovered(target: Target, count: int) -> Figures:
    fill(target, count)
    begun = killed(target)
    there_at = counted(address_of(target), NAMES, count)
    # This run deletes what it declares, so nothing stays for the next run.
    measure(as_it_is(target), [*SHARED, "--messages", "1"], FILL_S_MAX)
    return figures(there_at, begun, count)


def anew(target: Target) -> Target:
    """Return a restarted, empty peer, so that the memory of the messages is measured from there."""
    give_up = killed(target) + START_S_MAX
    counted(address_of(target), [], 0)
    while True:
        try:
            # A peer may answer before it can work. After one message it has all its own memory.
            measure(as_it_is(target), ["--messages", "1"], FILL_S_MAX)
            break
        except RunFailed:
            if time.monotonic() > give_up:
                raise
            time.sleep(ASK_EACH_S)
    time.sleep(STARTED_S)
    return as_it_is(target)


def killed(target: Target) -> float:
    """Kill all processes of a broker and return the time."""
    for pid in target.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def address_of(target: Target) -> str:
    return f"{urlsplit(target.url).hostname}:{port_of(target.url)}"


def as_it_is(target: Target) -> Target:
    """Return the target with the pid of the process that listens now, which a restart changes."""
    return Target(target.name, target.url, machine.listener(port_of(target.url)))


def fill(target: Target, count: int) -> None:
    measure(
        target, [*SHARED, "--messages", str(count), "--confirms", "20000", "--keep"], FILL_S_MAX
    )


def counted(address: str, queues: list[str], count: int) -> float:
    """Return the time at which all messages of these queues were there.

    Raises RunFailed when that takes too long.
    """
    give_up = time.monotonic() + START_S_MAX
    found = "no answer"
    while time.monotonic() < give_up:
        try:
            client = scale.Client(address)
            there = client.declare(queues, passive=True)
            client.close()
        except (OSError, scale.Lost) as error:
            found = str(error)
        else:
            if there == count:
                return time.monotonic()
            found = f"{there:,} of {count:,} messages"
        time.sleep(ASK_EACH_S)
    raise RunFailed(f"{START_S_MAX:.0f} s after the kill: {found}")


def figures(there_at: float, begun: float, count: int) -> Figures:
    seconds = there_at - begun
    return {"start_s": seconds, "recovered_per_s": count / seconds}
