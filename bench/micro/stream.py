"""Measure the stream log alone: append, read from the start and at random places, find by time.

    PYTHONPATH=. python bench/micro/stream.py [--messages 2000000] [--data DIR] > table.md

Rates are per second of this process's CPU, user and system: the cost of the library, whatever else
the machine does. Records of 256 messages ("singly": of one) are made before the clock starts,
because the front door makes them in another process. A sync ends every 16 MiB. Reads come from the
page cache, since the data was written just before. "from the start" goes on where the last read
ended, with room for 256 KiB; "by tens" is a consumer with a prefetch of ten; "anywhere" reads 4 KiB
at any offset.
"""

from __future__ import annotations

import argparse
import os
import random
import struct
import tempfile
import time
from collections.abc import Callable

from shardmq.shardd.store.format import record
from shardmq.shardd.store.streams import StreamLog

SIZES = (16, 100, 1024, 16384)
BATCH_MESSAGES = 256
BYTES_MAX = 2 << 30
SYNC_EVERY_BYTES = 16 << 20
READ_BYTES = 256 << 10
RANDOM_READS = 20_000
SINGLE_MESSAGES = 20_000


def encode(body_bytes: int, count: int, timestamp: int) -> bytes:
    """Return a record of `count` messages (drawn in record.pyx)."""
    message = struct.pack("<IIBBB", body_bytes, 2, 0, 1, 107) + bytes(2) + bytes(body_bytes)
    rest = struct.pack("<QIIHBBI", timestamp, 0xFFFFFFFF, count, 1, 255, 1, 1) + message * count
    rest += bytes(-len(rest) % 8)
    return struct.pack("<II", 8 + len(rest), record.crc32c(rest)) + rest


def cpu_seconds(act: Callable[[], None]) -> float:
    begin = time.process_time()
    act()
    return time.process_time() - begin


def sync(log: StreamLog) -> None:
    job = log.begin_sync()
    if job is not None:
        job.run()
        log.finish_sync(job)


def append(log: StreamLog, body_bytes: int, messages: int, batch_messages: int) -> float:
    batches = [
        encode(body_bytes, batch_messages, 1000 + number)
        for number in range(messages // batch_messages)
    ]

    def act() -> None:
        unsynced = 0
        for batch in batches:
            log.append(batch)
            unsynced += len(batch)
            if unsynced > SYNC_EVERY_BYTES:
                sync(log)
                unsynced = 0
        sync(log)

    return cpu_seconds(act)


def read_from_start(log: StreamLog, bytes_max: int, stop: int) -> float:
    def act() -> None:
        offset = got = 0
        while offset < stop:
            found = log.read(offset, bytes_max)
            got += len(found.sizes)
            offset = found.next_offset
        assert got == offset

    return cpu_seconds(act)


def read_anywhere(log: StreamLog, count: int) -> float:
    places = [random.randrange(log.committed_offset) for _ in range(count)]

    def act() -> None:
        for place in places:
            assert log.read(place, 4096).runs[0] == place

    return cpu_seconds(act) / count


def find_anywhere(log: StreamLog, newest: int, count: int) -> float:
    times = [random.randrange(1000, newest) for _ in range(count)]

    def act() -> None:
        for one in times:
            log.find(one)

    return cpu_seconds(act) / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--data", default=None, help="directory on the disk to measure")
    options = parser.parse_args()
    print(f"Messages per CPU second; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print(
        "| body | messages | append | from the start | by tens | append singly"
        " | anywhere, us | find by time, us |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for size in SIZES:
        messages = (
            min(options.messages, BYTES_MAX // (size + 16)) // BATCH_MESSAGES * BATCH_MESSAGES
        )
        with tempfile.TemporaryDirectory(dir=options.data) as path:
            log = StreamLog(f"{path}/stream", segment_bytes=64 << 20)
            log.recover()
            appended = messages / append(log, size, messages, BATCH_MESSAGES)
            following = messages / read_from_start(log, READ_BYTES, messages)
            some = min(messages, 200_000)
            ten = some / read_from_start(log, 10 * (size + 13), some)
            reads = min(messages, RANDOM_READS)
            anywhere, found = (
                read_anywhere(log, reads) * 1e6,
                find_anywhere(log, 1000 + messages // BATCH_MESSAGES, reads) * 1e6,
            )
            single = min(messages, SINGLE_MESSAGES)
            singly = single / append(log, size, single, 1)
            log.close()
        rates = f"{appended:,.0f} | {following:,.0f} | {ten:,.0f} | {singly:,.0f}"
        rates += f" | {anywhere:.1f} | {found:.1f}"
        print(f"| {size} B | {messages:,} | {rates} |", flush=True)


if __name__ == "__main__":
    main()
