"""A store of ten million messages, made and opened in processes of their own.

One process can be killed, the other measured.

python -m tests.torture.big_store fill DIR clean|kill      "kill": says "filled" and waits for it
python -m tests.torture.big_store open DIR                 JSON: messages, seconds, bytes of memory
added
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from pathlib import Path

from shardmq.shardd.store.segments import SegmentStore
from tests.reference.record import Record, encode_message
from tests.support.syncing import sync

MESSAGES = 10_000_000
BODY_BYTES = 100
QUEUES = range(1, 101)
BATCH_MESSAGES = 10_000
# A sync for so many batches, as publishers with confirms would cause.
SYNC_BATCHES = 20


def fill(directory: str, *, clean: bool) -> None:
    """Each message is a record of its own: the dearest to scan, and too many for indexes."""
    message = encode_message(bytes(BODY_BYTES), b"", b"key")
    batch = b"".join(
        Record((QUEUES[i % len(QUEUES)],), (message,)).encode() for i in range(BATCH_MESSAGES)
    )
    store = SegmentStore(directory)
    store.recover(QUEUES)
    live = {queue: array("Q") for queue in QUEUES}
    for number in range(MESSAGES // BATCH_MESSAGES):
        for arrival in store.append(batch):
            live[arrival.queue_id].extend(arrival.entries)
        if number % SYNC_BATCHES == 0:
            sync(store)
    sync(store)
    if clean:
        store.close(live)
    print("filled", flush=True)
    if not clean:
        sys.stdin.read()


def measure(directory: str) -> None:
    forget(directory)
    store = SegmentStore(directory)
    before = resident_bytes()
    begin = time.perf_counter()
    found = store.recover(QUEUES)
    seconds = time.perf_counter() - begin
    added = resident_bytes() - before
    messages = sum(len(arrival.entries) for arrival in found.values())
    print(json.dumps({"messages": messages, "seconds": seconds, "bytes": added}), flush=True)
    store.close({queue: arrival.entries for queue, arrival in found.items()})


def forget(directory: str) -> None:
    """So that files are read from the disk, as after a restart of the machine."""
    for path in Path(directory).iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


if __name__ == "__main__":
    command, target, *rest = sys.argv[1:]
    if command == "fill":
        fill(target, clean=rest == ["clean"])
    else:
        measure(target)
