"""Messages read in no order are those that were asked for, in the order in which they were asked for."""

from __future__ import annotations

import random
from array import array

import pytest

from shardd.store import SegmentStore
from shardd.store.reading import STRAY_BYTES_MAX
from tests.reference.record import Record, encode_message, split_messages
from tests.support.faulty_files import FaultyFiles

SIZES = (0, 50, STRAY_BYTES_MAX // 2, STRAY_BYTES_MAX - 20, STRAY_BYTES_MAX, 2 * STRAY_BYTES_MAX)


def filled(files: FaultyFiles, seed: int) -> tuple[SegmentStore, array[int], list[bytes]]:
    pick = random.Random(seed)
    store = SegmentStore("d", files=files, segment_bytes=32 << 10)
    store.recover((1,))
    bodies = [b"%d:" % i + bytes(pick.choice(SIZES)) for i in range(600)]
    entries = array("Q")
    for body in bodies:
        for arrival in store.append(Record((1,), (encode_message(body, b"", b"k"),)).encode()):
            entries += arrival.entries
    job = store.begin_sync()
    assert job is not None
    job.run()
    store.finish_sync(job)
    return store, entries, bodies


@pytest.mark.parametrize("seed", range(5))
def test_each_comes_whole_in_the_order_asked_for(seed: int) -> None:
    store, entries, bodies = filled(FaultyFiles(), seed)
    order = list(range(len(entries)))
    random.Random(seed).shuffle(order)
    at = 0
    while at < len(order):
        wanted = order[at : at + 100]
        blob, sizes = store.read(array("Q", [entries[i] for i in wanted]), 64 << 10)
        there = wanted[: len(sizes)]
        assert split_messages(blob) == [encode_message(bodies[i], b"", b"k") for i in there]
        assert list(sizes) == [len(bodies[i]) for i in there]
        at += len(sizes)
