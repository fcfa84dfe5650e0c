"""How long a broker takes from `kill -9` with many persistent messages until all of them are there again.

This broker is started anew here. A peer is by the one who started it (`peers.py` does): from the kill on it is asked
again and again, so its figure has the time its start-up script takes, as ours has Python's.
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
SHARED = ["--body", "100", "--persistent", "--durable", "--no-consume", "--prefix", "recovery", "--queues", str(QUEUES)]
SHARED += ["--keys", str(QUEUES)]
FILL_S_MAX = 900.0
START_S_MAX = 600.0
ASK_EACH_S = 0.02


def recovered_own(data_parent: Path | None, count: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="recovery-", dir=data_parent) as directory:
        own = scale.Broker(Path(directory), os.cpu_count() or 1)
        own.start()
        try:
            fill(own.target(), count)
            own.kill()
            begun = time.monotonic()
            own.start()
            return figures(counted(own.address, count), begun, count)
        finally:
            own.stop()


def recovered(target: Target, count: int) -> Figures:
    address = f"{urlsplit(target.url).hostname}:{port_of(target.url)}"
    fill(target, count)
    for pid in target.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    there_at = counted(address, count)
    again = Target(target.name, target.url, machine.listener(port_of(target.url)))
    measure(
        again, [*SHARED, "--messages", "1"], FILL_S_MAX
    )  # it deletes what it declares: nothing stays for the next run
    return figures(there_at, begun, count)


def fill(target: Target, count: int) -> None:
    measure(target, [*SHARED, "--messages", str(count), "--confirms", "20000", "--keep"], FILL_S_MAX)


def counted(address: str, count: int) -> float:
    """When all messages were there. Raises RunFailed when they are not."""
    give_up = time.monotonic() + START_S_MAX
    found = "no answer"
    while time.monotonic() < give_up:
        try:
            client = scale.Client(address)
            there = client.declare(NAMES, passive=True)
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
