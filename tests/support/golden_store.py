"""Store directories that stay in the repository, one for each format, and their contents.

    python -m tests.support.golden_store v1|v2 DIR      makes one with the present program

Never made anew for an old format: they are files of users who have not upgraded yet.
"""

from __future__ import annotations

import json
import os
import sys
from array import array

from shardmq.shardd.store.files import OsFiles
from shardmq.shardd.store.segments import SegmentStore
from tests.reference.record import Record, encode_message

SEGMENT_BYTES = 4096
QUEUES = (7, 8)


class FixedSalts(OsFiles):
    """The same directory, byte for byte, each time it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.next = 0x51A7

    def salt(self) -> int:
        self.next += 1
        return self.next


def record(number: int) -> bytes:
    """Return a record of two messages.

    Every third goes to both queues, every fourth has a ttl, every fifth a priority.
    """
    messages = tuple(
        encode_message(
            b"%03d" % number * 60, b"ex", b"key.%d.%d" % (number, part), b"\x80\0\x0atext/plain"
        )
        for part in range(2)
    )
    queues = QUEUES if number % 3 == 0 else (QUEUES[number % 2],)
    ttl = 60_000 if number % 4 == 0 else 0xFFFFFFFF
    priority = number % 10 if number % 5 == 0 else 255
    return Record(queues, messages, 1_700_000_000_000 + number, ttl, priority).encode()


def make_v1(directory: str) -> dict[str, list[int]]:
    """Make a store of two segments and stop it cleanly; return the live entries of each queue.

    The first segment has acks, and both have an index.
    """
    store, live = filled(directory, 16)
    for queue in QUEUES:
        store.settle(queue, live[queue][1:4], True)
        del live[queue][1:4]
        live[queue][0] |= 1
    store.close(live)
    return {str(queue): entries.tolist() for queue, entries in live.items()}


def make_v2(directory: str) -> dict[str, list[int]]:
    """Make five segments, three of them merged, and acks of the merged ones.

    One merged segment is still there, as after a power cut.
    """
    store, live = filled(directory, 40)
    for queue in QUEUES:
        store.settle(queue, array("Q", [entry for entry in live[queue] if left_out(entry)]), True)
        live[queue] = array("Q", [entry for entry in live[queue] if not left_out(entry)])
        live[queue][1] |= 1
    store.flush()
    with open(f"{directory}/msgs.0000000002", "rb") as file:
        replaced = file.read()
    assert store.compact() == 2
    store.settle(7, live[7][:1], True)
    del live[7][:1]
    expected = {
        str(queue): store._segments.on_disk(entries).tolist() for queue, entries in live.items()
    }
    store.close(live)
    with open(f"{directory}/msgs.0000000002", "wb") as file:
        file.write(replaced)
    return expected


def filled(directory: str, records: int) -> tuple[SegmentStore, dict[int, array[int]]]:
    store = SegmentStore(
        directory, files=FixedSalts(), segment_bytes=SEGMENT_BYTES, spare_segments=0
    )
    store.recover(QUEUES)
    live = {queue: array("Q") for queue in QUEUES}
    for number in range(records):
        for arrival in store.append(record(number)):
            live[arrival.queue_id].extend(arrival.entries)
    job = store.begin_sync()
    assert job is not None
    job.run()
    store.finish_sync(job)
    return store, live


def left_out(entry: int) -> bool:
    return entry >> 32 < 4 and entry >> 4 & 0xFFFFFFF > 600


MAKERS = {"v1": make_v1, "v2": make_v2}

if __name__ == "__main__":
    version, target = sys.argv[1:]
    expected = MAKERS[version](target)
    with open(os.path.join(target, "expected.json"), "w", encoding="utf-8") as file:
        json.dump(expected, file, indent=1)
        file.write("\n")
