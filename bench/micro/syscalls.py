"""Count the system calls that each process of a broker makes for a message.

    python bench/micro/syscalls.py                                  # 100, 1,000, 5,000 messages/s
    python bench/micro/syscalls.py --rate 2000 --seconds 5 -- --ack-every 1 --prefetch 100

One client publishes, one consumes, and each message is a write of its own. strace counts; the
broker runs slower under it, but the counts hardly depend on that, nor on the load of the machine.
What stands behind `--` goes to the generator.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from brokers import own_broker
from generator import Target, build_generator, started

RATES = (100, 1000, 5000)
# The generator publishes for this long before and behind the time that is counted.
MARGIN_S = 1.0
# Fewer calls than this a message are left out, but counted in the sum.
SHOWN_MIN = 0.01
# A row of strace's summary: the number of calls stands before the errors, if there were any.
ROW = re.compile(r"^\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)\s+(?:\d+\s+)?(\w+)$", re.MULTILINE)
MODULES = {"shardmq.shardd": "shard", "shardmq.broker.front_door": "front door"}


def watched(target: Target) -> dict[str, int]:
    """Return the shards and front doors of a broker: pid by name."""
    found = {}
    for pid in target.processes():
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        for module, name in MODULES.items():
            if module in words:
                found[f"{name} {pid}"] = pid
    return found


def count(target: Target, rate: int, seconds: float, more: list[str]) -> None:
    """Run the generator at a rate and print the calls of each process, and its CPU time."""
    length = seconds + 2 * MARGIN_S
    options = f"--body 16 --batch 1 --rate {rate} --seconds {length} --warmup 0.1".split()
    processes = watched(target)
    with tempfile.TemporaryDirectory() as directory, started(target, options + more, 60) as load:
        time.sleep(MARGIN_S)
        tracers = [(name, Path(directory) / str(pid), pid) for name, pid in processes.items()]
        running = [
            subprocess.Popen(["strace", "-qq", "-c", "-f", "-o", str(out), "-p", str(pid)])
            for _, out, pid in tracers
        ]
        time.sleep(seconds)
        for tracer in running:
            tracer.send_signal(signal.SIGINT)
        for tracer in running:
            tracer.wait()
        assert load.stdout is not None
        load.stdout.read()
        for name, out, _ in tracers:
            calls = {call: int(number) for number, call in ROW.findall(out.read_text())}
            calls.pop("total", None)
            messages = rate * seconds
            if sum(calls.values()) < SHOWN_MIN * messages:
                continue
            shown = ", ".join(
                f"{call} {number / messages:.2f}"
                for call, number in sorted(calls.items(), key=lambda item: -item[1])
                if number >= SHOWN_MIN * messages
            )
            print(f"{rate}/s, {name}: {sum(calls.values()) / messages:.2f} a message: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rate", type=int, action="append", help="messages/s, several times")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("options", nargs="*", help="options of the generator")
    arguments = parser.parse_args()
    build_generator()
    with own_broker(None) as target:
        time.sleep(1)
        for rate in arguments.rate or RATES:
            count(target, rate, arguments.seconds, arguments.options)


if __name__ == "__main__":
    main()
