"""Store directories that stay in the repository, one for each format there ever was, and what is to be found in them.

    python -m tests.support.golden_store DIR      makes one with the present program

Never made anew for an old format: they are files of users who have not upgraded yet.
"""

from __future__ import annotations

import json
import os
import sys
from array import array

from shardd.store import OsFiles, SegmentStore
from tests.reference.record import Record, encode_message

SEGMENT_BYTES = 4096
QUEUES = (7, 8)


class FixedSalts(OsFiles):
    """The same directory, byte for byte, each time it is made."""

    def __init__(self) -> None:
        self.next = 0x51A7

    def salt(self) -> int:
        self.next += 1
        return self.next


def record(number: int) -> bytes:
    """Of two messages each; every third to both queues, every fourth with a ttl, every fifth with a priority."""
    messages = tuple(
        encode_message(b"%03d" % number * 60, b"ex", b"key.%d.%d" % (number, part), b"\x80\0\x0atext/plain")
        for part in range(2)
    )
    queues = QUEUES if number % 3 == 0 else (QUEUES[number % 2],)
    ttl = 60_000 if number % 4 == 0 else 0xFFFFFFFF
    priority = number % 10 if number % 5 == 0 else 255
    return Record(queues, messages, 1_700_000_000_000 + number, ttl, priority).encode()


def make(directory: str) -> dict[str, list[int]]:
    """The live entries of each queue. Two segments; the first with acks and both with an index; a clean stop."""
    store = SegmentStore(directory, files=FixedSalts(), segment_bytes=SEGMENT_BYTES, spare_segments=0)
    store.recover(QUEUES)
    live = {queue: array("Q") for queue in QUEUES}
    for number in range(16):
        for arrival in store.append(record(number)):
            live[arrival.queue_id].extend(arrival.entries)
    store.flush()
    for queue in QUEUES:
        store.settle(queue, live[queue][1:4], True)
        del live[queue][1:4]
        live[queue][0] |= 1
    store.close(live)
    return {str(queue): entries.tolist() for queue, entries in live.items()}


if __name__ == "__main__":
    expected = make(sys.argv[1])
    with open(os.path.join(sys.argv[1], "expected.json"), "w", encoding="utf-8") as file:
        json.dump(expected, file, indent=1)
        file.write("\n")
