"""Stream directories that stay in the repository, one for each format, and their contents.

    python -m tests.support.golden_stream v1 DIR      makes one with the present program

Never made anew for an old format: they are files of users who have not upgraded yet.
"""

from __future__ import annotations

import json
import os
import sys
from array import array

from shardmq.shardd.store.streams import StreamLog, filter_of
from tests.reference.record import Record, encode_message
from tests.support.golden_store import FixedSalts
from tests.support.syncing import sync

SEGMENT_BYTES = 4096
VALUES = (b"", b"north", b"south")


def batch(number: int) -> Record:
    """Of three messages, one for each of VALUES."""
    messages = tuple(
        encode_message(b"%03d" % number * 60, b"ex", b"key.%d.%d" % (number, part))
        for part in range(3)
    )
    return Record((7,), messages, 1_700_000_000_000 + number)


def make_v1(directory: str) -> dict[str, object]:
    """Make sealed segments, one of them without an index as after a crash.

    The oldest are let go of, and positions have names.
    """
    log = StreamLog(directory, files=FixedSalts(), segment_bytes=SEGMENT_BYTES)
    log.recover()
    for number in range(30):
        log.append(
            batch(number).encode(),
            array("I", [filter_of(value) if value else 0 for value in VALUES]),
        )
        sync(log)
    gone = log.retain(0, max_bytes=4 * SEGMENT_BYTES)
    assert gone and log.stats()["segments"] == 4
    log.positions.set(b"audit", 70)
    log.positions.set(b"audit", 72)
    log.positions.set(b"gone", 1)
    log.positions.forget(b"gone")
    sync(log)
    return {"first": log.first_offset, "next": log.next_offset, "positions": {"audit": 72}}


MAKERS = {"v1": make_v1}

if __name__ == "__main__":
    version, target = sys.argv[1:]
    expected = MAKERS[version](target)
    with open(os.path.join(target, "expected.json"), "w", encoding="utf-8") as file:
        json.dump(expected, file, indent=1)
        file.write("\n")
