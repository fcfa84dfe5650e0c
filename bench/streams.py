"""Measure streams through the whole broker: publish to a stream, then read it from the start.

    python bench/streams.py [--messages 2000000] [--body 100] [--prefetch 10000] [--runs 3]
        [--data DIR]

One connection publishes without confirms. Another reads and acknowledges half a prefetch at once.
The reader counts bytes, not messages, since all deliveries have the same length. Rates are messages
per CPU second of the named processes. They say what a reader costs, but little about how fast a
reader is served while others use the cores.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import machine
from brokers import own_broker
from scale import READ_BYTES, SILENCE_S_MAX, Client, Lost, shortstr

WRITE_MESSAGES = 2000
TAG = "reader"
ROLES = {
    "shard": "shardmq.shardd",
    "front door": "shardmq.broker.front_door",
    "controller": "shardmq.broker.controller",
}


class StreamClient(Client):
    def declare_stream(self, name: str) -> None:
        arguments = shortstr("x-queue-type") + b"S" + struct.pack(">I", 6) + b"stream"
        table = struct.pack(">I", len(arguments)) + arguments
        self.ask([self.method(50, 10, b"\0\0" + shortstr(name) + b"\2" + table)])

    def publish(self, name: str, body_bytes: int, messages: int) -> None:
        one = self.method(60, 40, b"\0\0" + shortstr("") + shortstr(name) + b"\0")
        one += struct.pack(">BHIHHQH", 2, 1, 14, 60, 0, body_bytes, 0) + b"\xce"
        one += struct.pack(">BHI", 3, 1, body_bytes) + bytes(body_bytes) + b"\xce"
        block = one * WRITE_MESSAGES
        for _ in range(messages // WRITE_MESSAGES):
            self._socket.sendall(block)
        give_up = time.monotonic() + SILENCE_S_MAX
        while self.declare([name], passive=True) < messages:
            if time.monotonic() > give_up:
                raise Lost(f"not all of {messages} messages are there")
            time.sleep(0.05)

    def read(self, name: str, body_bytes: int, messages: int, prefetch: int) -> None:
        """Read all messages of a stream from the start."""
        self.ask([self.method(60, 10, struct.pack(">IHB", 0, prefetch, 0))])
        offset = shortstr("x-stream-offset") + b"S" + struct.pack(">I", 5) + b"first"
        table = struct.pack(">I", len(offset)) + offset
        # The first deliveries may come together with consume-ok, so all bytes from here on count.
        self._socket.sendall(
            self.method(60, 20, b"\0\0" + shortstr(name) + shortstr(TAG) + b"\0" + table)
        )
        consume_ok = 8 + 4 + len(shortstr(TAG))
        deliver = 8 + 4 + 1 + len(TAG) + 9 + 1 + 1 + len(name)
        header = 8 + 14 + 4 + 1 + len("x-stream-offset") + 9
        each = deliver + header + 8 + body_bytes
        total = consume_ok + each * messages
        got, acked = len(self._got), 0
        while got < total:
            piece = self._socket.recv(READ_BYTES)
            if not piece:
                raise Lost("the broker hung up")
            got += len(piece)
            whole = (got - consume_ok) // each
            if whole - acked >= prefetch // 2 or got == total:
                acked = whole
                self._socket.sendall(self.method(60, 80, struct.pack(">QB", acked, 1)))
        if got != total:
            raise Lost(f"{got} bytes came, {total} were expected")


def roles(pid: int) -> dict[str, list[int]]:
    """Return the pids of the broker's processes by role."""
    found: dict[str, list[int]] = {role: [] for role in ROLES}
    for each in machine.tree(pid):
        words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
        for role, module in ROLES.items():
            if module.encode() in words:
                found[role].append(each)
    return found


def measured(pid: int, act: Callable[[], None]) -> dict[str, float]:
    """Return the CPU seconds of each role during `act`, and the time in seconds that `act` took."""
    who = roles(pid)
    before = {role: machine.cpu_seconds(pids) for role, pids in who.items()}
    begin = time.monotonic()
    act()
    took = time.monotonic() - begin
    return {role: machine.cpu_seconds(pids) - before[role] for role, pids in who.items()} | {
        "time": took
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--body", type=int, default=100)
    parser.add_argument("--prefetch", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--data", type=Path, default=None, help="directory on the disk to measure")
    options = parser.parse_args()
    messages = options.messages // WRITE_MESSAGES * WRITE_MESSAGES
    with own_broker(options.data) as target:
        assert target.pid is not None
        pid = target.pid
        client = StreamClient(target.url.rpartition("@")[2].rstrip("/"))
        client.declare_stream("stream")
        wrote = measured(pid, lambda: client.publish("stream", options.body, messages))
        show("publish", messages, [wrote])
        reads = []
        for _ in range(options.runs):
            reader = StreamClient(target.url.rpartition("@")[2].rstrip("/"))
            read = partial(reader.read, "stream", options.body, messages, options.prefetch)
            reads.append(measured(pid, read))
        show("read from the start", messages, reads)


def show(what: str, messages: int, runs: list[dict[str, float]]) -> None:
    shard, door = (statistics.median(run[role] for run in runs) for role in ("shard", "front door"))
    took = statistics.median(run["time"] for run in runs)
    print(
        f"{what}: {messages / shard:,.0f} messages per shard-CPU-second, "
        f"{messages / door:,.0f} per front-door-CPU-second, {messages / took:,.0f} a second",
        flush=True,
    )


if __name__ == "__main__":
    main()
