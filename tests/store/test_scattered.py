"""Messages that are read in any order come in the order in which they were asked for."""

from __future__ import annotations

import random
from array import array

import pytest

from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.store.segments.windows import STRAY_BYTES_MAX, STRAY_GAP_BYTES, span
from tests.reference.record import Record, encode_message, split_messages
from tests.support.faulty_files import FaultyFiles

SIZES = (
    0,
    50,
    STRAY_BYTES_MAX // 2,
    STRAY_BYTES_MAX - 20,
    STRAY_BYTES_MAX,
    2 * STRAY_BYTES_MAX,
    20_000,
)


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


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_each_comes_whole_in_the_order_asked_for(seed: int, restarted: bool) -> None:
    files = FaultyFiles()
    store, entries, bodies = filled(files, seed)
    if restarted:  # then nothing is in memory, and nothing is checked
        store.close()
        store = SegmentStore("d", files=files, segment_bytes=32 << 10)
        store.recover((1,))
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


PIECE_BYTES = 256 << 10
WRITTEN_BYTES = 40 << 20


class CountingFiles(FaultyFiles):
    read_bytes = 0

    def read_into(self, handle: int, target: memoryview, position: int) -> int:
        got = super().read_into(handle, target, position)
        self.read_bytes += got
        return got

    def read_pieces(self, handle: int, size: int, positions: list[int]) -> list[bytes]:
        pieces = super().read_pieces(handle, size, positions)
        self.read_bytes += sum(map(len, pieces))
        return pieces


def read_side_by_side(queues: int) -> int:
    """Bytes read from files, when the queues of one store, filled in turn, are emptied in turn."""
    files = CountingFiles()
    store = SegmentStore("d", files=files, segment_bytes=16 << 20)
    store.recover(range(1, queues + 1))
    entries = [array("Q") for _ in range(queues)]
    message = encode_message(bytes(1000), b"", b"k")
    written = 0
    while written < WRITTEN_BYTES:
        for queue in range(queues):
            record = Record((queue + 1,), (message,) * 50).encode()
            (arrival,) = store.append(record)
            entries[queue] += arrival.entries
            written += len(record)
    job = store.begin_sync()
    assert job is not None
    job.run()
    store.finish_sync(job)
    files.read_bytes = 0
    while any(entries):
        for queue in range(queues):
            if entries[queue]:
                _, sizes = store.read(entries[queue][:1000], PIECE_BYTES)
                entries[queue] = entries[queue][len(sizes) :]
    return files.read_bytes


@pytest.mark.parametrize("queues", [3, 4])
def test_queues_emptied_side_by_side_do_not_each_read_their_segments(queues: int) -> None:
    alone = read_side_by_side(1)
    assert alone > WRITTEN_BYTES // 4, "most of it was still in memory"
    assert read_side_by_side(queues) < 1.4 * alone


def test_only_what_lies_close_is_asked_for_at_once() -> None:
    near = array("Q", [1 << 32 | at * STRAY_GAP_BYTES << 4 for at in range(10)])
    assert [span(near, 0, 10), span(near, 2, 3), span(near, 4, 6)] == [
        9 * STRAY_GAP_BYTES,
        0,
        STRAY_GAP_BYTES,
    ]
    far = array("Q", [near[0], near[9]])
    assert span(far, 0, 2) == 0
    assert span(array("Q", reversed(near)), 0, 10) == 0, "they were moved"
