"""Measure the segment store alone: append a message and read it back in one process.

    PYTHONPATH=. python bench/micro/store.py [--seconds 0.3] [--data DIR] > table.md

Messages come one at a time and in batches. Each round appends, reads back, compares the size and
settles. Records are made before the clock starts, because the front door makes them in another
process. No sync is requested, and messages that are settled early never reach the disk, as in a
broker whose consumers keep up.

The column "kept" leaves 64 MB unsettled behind, so that every byte is written out and read back
from its file: this is the most expensive way through the store. The figures of aurora-channel are
the ones that it publishes for send and receive, one message at a time, on a machine of its own.
They give an order of magnitude, not a comparison side by side.
"""

from __future__ import annotations

import argparse
import os
import struct
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Callable

from shardmq.shardd.store.format import record
from shardmq.shardd.store.segments import SegmentStore

SIZES = (40, 160, 512, 1024, 16384, 32768)
PUBLISHED_US = {40: "5.5", 1024: "7.7", 16384: "60", 32768: "100"}
BATCH_BYTES_MAX = 64 << 10
BATCH_MESSAGES_MAX = 256
KEPT_BYTES = 64 << 20
ROUNDS = 3
QUEUE = 1


def encode(body_bytes: int, count: int) -> bytes:
    """Return a record of `count` messages (drawn in record.pyx)."""
    message = struct.pack("<IIBBB", body_bytes, 2, 0, 1, 107) + bytes(2) + bytes(body_bytes)
    rest = struct.pack("<QIIHBBI", 1, 0xFFFFFFFF, count, 1, 255, 1, QUEUE) + message * count
    rest += bytes(-len(rest) % 8)
    return struct.pack("<II", 8 + len(rest), record.crc32c(rest)) + rest


def through_memory(store: SegmentStore, data: bytes) -> Callable[[], None]:
    def turn() -> None:
        (arrival,) = store.append(data)
        blob, sizes = store.read(arrival.entries, 1 << 30)
        assert len(sizes) == len(arrival.entries) and len(blob) < len(data)
        store.settle(QUEUE, arrival.entries, True)

    return turn


def through_files(store: SegmentStore, data: bytes) -> Callable[[], None]:
    """Return a turn that reads messages long after their append; the first turns only append."""
    waiting: deque[array[int]] = deque()
    behind = KEPT_BYTES // len(data)

    def turn() -> None:
        waiting.append(store.append(data)[0].entries)
        entries = waiting.popleft()
        store.read(entries, 1 << 30)
        store.settle(QUEUE, entries, True)

    waiting.extend(store.append(data)[0].entries for _ in range(behind))
    return turn


def microseconds(
    directory: str,
    data: bytes,
    count: int,
    seconds: float,
    way: Callable[[SegmentStore, bytes], Callable[[], None]],
) -> float:
    """Return the microseconds per message in the best round, because others share the machine."""
    best = float("inf")
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(dir=directory) as path:
            store = SegmentStore(path, sync=False)
            store.recover([QUEUE])
            turn = way(store, data)
            turns, begin = 0, time.perf_counter()
            while (took := time.perf_counter() - begin) < seconds:
                for _ in range(10):
                    turn()
                turns += 10
            best = min(best, took / turns / count * 1e6)
            store.close()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="of each round")
    parser.add_argument("--data", default=None, help="directory on the disk to measure")
    options = parser.parse_args()
    print(
        f"Append and read back, microseconds a message; {os.cpu_count()} cores,"
        f" load {os.getloadavg()[0]:.1f}\n"
    )
    print(
        "| body | one at a time | batch | in batches | in batches, kept"
        " | aurora-channel, published |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for size in SIZES:
        count = max(1, min(BATCH_MESSAGES_MAX, BATCH_BYTES_MAX // size))
        single = microseconds(options.data, encode(size, 1), 1, options.seconds, through_memory)
        batched = microseconds(
            options.data, encode(size, count), count, options.seconds, through_memory
        )
        kept = microseconds(
            options.data, encode(size, count), count, options.seconds, through_files
        )
        figures = (
            f"{single:.2f} | {count} | {batched:.3f} | {kept:.3f} | {PUBLISHED_US.get(size, '')}"
        )
        print(f"| {size} B | {figures} |", flush=True)


if __name__ == "__main__":
    main()
