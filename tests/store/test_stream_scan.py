"""A scan beside the writer gives what the log gives, as columns.

Segments may be sealed, damaged or let go meanwhile.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.reader.arrow import TYPES, arrays_of, bits_of, schema_of
from shardmq.shardd.reader.buffers import Sender
from shardmq.shardd.reader.ipc import END, batch_head
from shardmq.shardd.store.errors import Corrupt
from shardmq.shardd.store.files import OsFiles
from shardmq.shardd.store.format.columns import OFFSET, VALUE, Columns, Filter
from shardmq.shardd.store.streams import StreamLog
from shardmq.shardd.store.streams import scan as stream_scan
from shardmq.shardd.store.streams.queue_log import QueueLog, QueueRange
from shardmq.shardd.store.streams.scan import (
    PIECE_BYTES,
    Places,
    Scan,
    Truncated,
    find,
    segments_of,
)
from shardmq.shardd.store.streams.segment import HEADER_BYTES, file_name
from tests.reader.rows import KEYS, plain, random_values
from tests.reference import topic
from tests.reference.columns import encode_props, row
from tests.reference.record import Record, encode_message
from tests.support.syncing import sync

COLUMNS = [name for name in TYPES if name not in ("queue", "shard")]
T0 = 1_700_000_000_000
BATCH_ROWS_MAX = 12


OPEN: list[StreamLog] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_all_but(0)


def close_all_but(count: int) -> None:
    """Close the logs of earlier streams, so that 1,024 descriptors are enough for all examples."""
    while len(OPEN) > count:
        OPEN.pop(0).close()


class Stream:
    """A log of random messages, and the rows they are."""

    def __init__(self, directory: Path, seed: int, segment_bytes: int = 4096) -> None:
        self.rng = random.Random(seed)
        self.directory = str(directory)
        close_all_but(3)
        self.log = StreamLog(self.directory, segment_bytes=segment_bytes)
        OPEN.append(self.log)
        self.log.recover()
        self.rows: list[dict[str, object]] = []

    def append(self, count: int, body_bytes_max: int = 200) -> None:
        """Append a batch with many messages of one length.

        Its time is not before the times of earlier batches.
        """
        messages, timestamp = [], T0 + len(self.rows)
        like_the_one_before = False
        for _ in range(count):
            if not like_the_one_before:
                key, exchange, values = (
                    self.rng.choice(KEYS),
                    self.rng.choice((b"", b"ex")),
                    random_values(self.rng),
                )
                body_bytes = self.rng.randrange(body_bytes_max)
            body = self.rng.randbytes(body_bytes)
            like_the_one_before = self.rng.random() < 0.6
            messages.append(encode_message(body, exchange, key, encode_props(values)))
            self.rows.append(row(len(self.rows), timestamp, exchange, key, values, body))
        self.log.append(Record((1,), tuple(messages), timestamp).encode())

    def fill(self, batches: int) -> None:
        for _ in range(batches):
            self.append(self.rng.choice((1, 2, 5, BATCH_ROWS_MAX)))
            if self.rng.random() < 0.7:
                sync(self.log)
            if self.rng.random() < 0.1:
                self.log.seal()
        sync(self.log)

    def scan(
        self,
        start: int,
        stop: int,
        filter: Filter | None = None,
        places: Places | None = None,
        rows_max: int = 7,
        names: Sequence[str] = COLUMNS,
        files: OsFiles | None = None,
    ) -> list[dict[str, object]]:
        columns = Columns(bits_of(names), filter)
        arrays = arrays_of(names, columns, "q", 3)
        scan = Scan(files or OsFiles(), self.directory, start, stop, columns, places)
        pause_bytes = self.rng.choice((0, 3000, 1 << 20))
        with tempfile.TemporaryFile() as file:
            sender = Sender(
                arrays,
                batch_head(arrays.nodes, arrays.buffers),
                file.fileno(),
                True,
                0,
                pause_bytes,
            )
            if self.rng.random() < 0.5:
                assert scan.fill(rows_max, 4096) <= rows_max
            sent = 0
            try:
                while columns.rows or scan.offset < stop:
                    if columns.rows:
                        columns.flush(sender)
                    sent += sender.take_sent()
                    scan.fill(rows_max, 4096, sender)
            finally:
                scan.close()
            file.seek(0)
            data = file.read()
        assert len(data) == sent + sender.take_sent()
        return self.read(names, data, rows_max)

    def read(self, names: Sequence[str], data: bytes, rows_max: int) -> list[dict[str, object]]:
        """Return the rows of an answer that comes in chunks."""
        stream = b"".join([schema_of(names).serialize(), *chunks_of(data), END])
        batches = list(pa.ipc.open_stream(stream))
        assert all(0 < batch.num_rows <= rows_max for batch in batches)
        table = pa.Table.from_batches(batches, schema_of(names))
        table.validate(full=True)
        return plain(table)


def chunks_of(data: bytes) -> Iterator[bytes]:
    """Of HTTP's chunked coding."""
    while data:
        size, _, data = data.partition(b"\r\n")
        end = int(size, 16)
        assert data[end : end + 2] == b"\r\n"
        yield data[:end]
        data = data[end + 2 :]


@given(st.integers(0, 2**32 - 1))
def test_any_range_holds_the_rows_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    stream = Stream(tmp_path_factory.mktemp("scan"), seed)
    stream.fill(stream.rng.randrange(1, 25))
    places = Places()
    for _ in range(4):
        start, stop = sorted(stream.rng.randrange(len(stream.rows) + 1) for _ in range(2))
        assert (
            stream.scan(start, stop, places=places, rows_max=stream.rng.randrange(1, 9))
            == stream.rows[start:stop]
        )


@given(st.integers(0, 2**32 - 1), st.sets(st.sampled_from(tuple(TYPES)), min_size=1))
def test_any_choice_of_columns_holds_what_all_of_them_hold(
    tmp_path_factory: pytest.TempPathFactory, seed: int, chosen: set[str]
) -> None:
    """However small the window that is read of a file at once, by compiled code or by none."""
    stream = Stream(
        tmp_path_factory.mktemp("scan"), seed, random.Random(seed).choice((4096, 1 << 20))
    )
    stream.fill(12)
    rng, said = stream.rng, {"queue": "q", "shard": 3}
    names = rng.sample(sorted(chosen), len(chosen))
    plain_names = [name for name in names if name in ("offset", "timestamp", "value")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_scan, "WINDOW_BYTES", rng.choice((64, 300, 2000, 1 << 20)))
        patch.setattr(stream_scan, "PIECE_BYTES", rng.choice((64, 300, 2000, 128 << 10)))
        for columns in (names, plain_names):
            start, stop = sorted(rng.randrange(len(stream.rows) + 1) for _ in range(2))
            expected = [
                {name: (said | row)[name] for name in columns} for row in stream.rows[start:stop]
            ]
            if columns:
                files = rng.choice((OsFiles, Undescribed, Unreadable))()
                assert (
                    stream.scan(
                        start, stop, rows_max=rng.randrange(1, 20), names=columns, files=files
                    )
                    == expected
                )


class Undescribed(OsFiles):
    """Files that are no descriptors."""

    def descriptor(self, handle: int) -> int:
        return -1


class Unreadable(OsFiles):
    """Whatever compiled code reads by itself fails."""

    def __init__(self) -> None:
        super().__init__()
        self.end, other = os.pipe()  # which has no positions
        os.close(other)

    def descriptor(self, handle: int) -> int:
        return self.end

    def __del__(self) -> None:
        os.close(self.end)


def test_a_file_that_ends_before_its_time_is_corrupt(tmp_path: Path) -> None:
    stream = Stream(tmp_path, 5, segment_bytes=1 << 20)
    for _ in range(20):
        stream.append(BATCH_ROWS_MAX)
    sync(stream.log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_scan, "WINDOW_BYTES", 4096)
        columns = Columns(OFFSET)
        scan = Scan(OsFiles(), stream.directory, 0, len(stream.rows), columns)
        assert scan.fill(1, 1 << 20) == 1
        os.truncate(Path(stream.directory) / file_name("log", 0), 4096)
        with pytest.raises(Corrupt):
            while scan.fill(1, 1 << 20):
                pass
        scan.close()


@given(
    st.integers(0, 2**32 - 1), st.lists(st.sampled_from(("a", "b", "*", "#", "", "c")), max_size=4)
)
def test_a_filter_lets_through_what_meets_all_of_it(
    tmp_path_factory: pytest.TempPathFactory, seed: int, words: list[str]
) -> None:
    stream = Stream(tmp_path_factory.mktemp("scan"), seed)
    stream.fill(8)
    pattern, rng = ".".join(words), stream.rng
    key = rng.choice((None, None, *KEYS[:4]))
    exchange = rng.choice((None, b"", b"ex"))
    since, until = sorted(T0 + rng.randrange(len(stream.rows) + 2) for _ in range(2))

    def passes(row: dict[str, object]) -> bool:
        said = str(row["routing_key"])
        return (
            topic.matches(topic.words(pattern), topic.words(said))
            and (key is None or key.decode() == said)
            and (exchange is None or exchange.decode() == row["exchange"])
            and since * 1000 <= int(str(row["timestamp"])) < until * 1000
        )

    filter = Filter(pattern.encode(), key, exchange, since, until)
    assert stream.scan(0, len(stream.rows), filter) == [row for row in stream.rows if passes(row)]


@given(st.integers(0, 2**32 - 1))
def test_the_offset_for_a_time_is_the_logs(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    stream = Stream(tmp_path_factory.mktemp("scan"), seed)
    stream.fill(12)
    stream.log.retain(0, max_messages=stream.rng.randrange(1, len(stream.rows) + 1))
    for timestamp in (
        0,
        T0 - 1,
        *(T0 + stream.rng.randrange(len(stream.rows) + 2) for _ in range(5)),
        T0 * 2,
    ):
        found = find(OsFiles(), stream.directory, timestamp, stream.log.committed_offset)
        assert found == stream.log.find(timestamp), timestamp - T0


@pytest.mark.parametrize("kept", [0, 4096, 9000, 300_000])
def test_a_file_that_ends_within_a_chunk_is_corrupt_behind_what_is_there(
    tmp_path: Path, kept: int
) -> None:
    stream = Stream(tmp_path, 6, segment_bytes=1 << 20)
    for _ in range(300):
        stream.append(BATCH_ROWS_MAX)
    sync(stream.log)
    columns = Columns(OFFSET)
    scan = Scan(OsFiles(), stream.directory, 0, len(stream.rows), columns)
    rows = scan.fill(1, 1 << 20)
    os.truncate(Path(stream.directory) / file_name("log", 0), kept)
    with pytest.raises(Corrupt):
        while got := scan.fill(10, 1 << 20):
            assert columns.first_offset == rows
            rows += got
    scan.close()
    assert rows < len(stream.rows)


def test_a_scan_reads_all_of_a_segment_that_is_sealed_under_it(tmp_path: Path) -> None:
    """The segment was longer before.

    One read of a scan may end within the header of a chunk near the end.
    """
    for ahead in range(0, 128, 8):
        stream = Stream(tmp_path / str(ahead), 6, segment_bytes=1 << 18)
        path = Path(stream.directory) / file_name("log", 0)

        def append(body_bytes: int, stream: Stream = stream) -> None:
            message = encode_message(bytes(body_bytes), b"", b"k", encode_props({}))
            stream.log.append(Record((1,), (message,), T0).encode())
            sync(stream.log)

        append(0)
        chunk_bytes = int.from_bytes(path.read_bytes()[HEADER_BYTES:][:4], "little")
        end, count = HEADER_BYTES + chunk_bytes, 1
        while (left := HEADER_BYTES + PIECE_BYTES - ahead - end) > 0:
            body_bytes = left - chunk_bytes if left < 4096 else 1024
            append(body_bytes)
            end, count = end + chunk_bytes + (body_bytes + 7) // 8 * 8, count + 1
        for _ in range(3):
            append(16)
        scan = Scan(OsFiles(), stream.directory, 0, count + 3, Columns(OFFSET))
        rows = scan.fill(1, 1 << 20)
        stream.log.seal()
        while got := scan.fill(100, 1 << 20):
            rows += got
        scan.close()
        assert rows == count + 3


def test_what_retention_took_is_truncated_with_what_is_left(tmp_path: Path) -> None:
    stream = Stream(tmp_path, 1)
    stream.fill(60)
    places = Places()
    stream.scan(0, 3, places=places)
    stream.log.retain(0, max_bytes=8192)
    first = stream.log.first_offset
    assert first > 3
    with pytest.raises(Truncated) as gone:
        stream.scan(3, first, places=places)
    assert gone.value.first == first
    assert stream.scan(first, len(stream.rows), places=places) == stream.rows[first:]


def test_a_segment_taken_away_under_a_scan_is_read_to_its_end_and_the_next_is_truncated(
    tmp_path: Path,
) -> None:
    stream = Stream(tmp_path, 2)
    stream.fill(60)
    columns = Columns(OFFSET)
    scan = Scan(OsFiles(), stream.directory, 0, len(stream.rows), columns)
    seen, ended = scan.fill(1, 1 << 20), segments_of(OsFiles(), stream.directory)[1]
    stream.log.retain(0, max_bytes=8192)
    with pytest.raises(Truncated) as gone:
        while got := scan.fill(1, 1 << 20):
            seen += got
    scan.close()
    assert gone.value.offset == seen == ended < stream.log.first_offset


@given(st.integers(0, 2**32 - 1))
def test_damage_costs_its_own_chunks_only(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Whatever columns are read."""
    stream = Stream(tmp_path_factory.mktemp("scan"), seed)
    stream.fill(20)
    firsts = segments_of(OsFiles(), stream.directory)
    path = Path(stream.directory) / file_name("log", stream.rng.choice(firsts))
    data = bytearray(path.read_bytes())
    at = stream.rng.randrange(64, len(data))
    data[at] ^= 1 << stream.rng.randrange(8)
    path.write_bytes(data)
    names = stream.rng.choice((COLUMNS, ["offset", "value"]))
    found = stream.scan(0, len(stream.rows), names=names)
    expected: list[dict[str, object]] = []
    offset = 0
    while offset < stream.log.committed_offset:
        read = stream.log.read(offset, 1 << 20)
        for first, count in zip(read.runs[::2], read.runs[1::2], strict=True):
            expected += [
                {name: row[name] for name in names} for row in stream.rows[first : first + count]
            ]
        offset = read.next_offset
    assert found == expected
    assert len(found) >= len(stream.rows) - BATCH_ROWS_MAX


@pytest.mark.parametrize("seed", range(20))
def test_the_gaps_that_damage_leaves_are_told_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Whatever is filtered, and wherever it begins."""
    stream = Stream(tmp_path_factory.mktemp("scan"), seed)
    stream.fill(20)
    count = stream.log.committed_offset
    there = [
        (filtered, start)
        for filtered in (False, True)
        for start in (0, stream.rng.randrange(count))
    ]
    for filtered, start in there:
        assert gaps(stream, start, count, filtered) == []
    path = Path(stream.directory) / file_name(
        "log", stream.rng.choice(segments_of(OsFiles(), stream.directory))
    )
    data = bytearray(path.read_bytes())
    data[stream.rng.randrange(64, len(data))] ^= 1 << stream.rng.randrange(8)
    path.write_bytes(data)
    offset, found = 0, []
    while offset < count:
        read = stream.log.read(offset, 1 << 20)
        for first, n in zip(read.runs[::2], read.runs[1::2], strict=True):
            found += range(first, first + n)
        offset = read.next_offset
    for filtered, start in there:
        told = [
            one
            for first, stop in gaps(stream, start, count, filtered)
            for one in range(first, stop)
        ]
        lost = sorted(set(range(start, count)) - set(found))
        assert told == lost, seed


def gaps(stream: Stream, start: int, stop: int, filtered: bool) -> list[tuple[int, int]]:
    columns = Columns(OFFSET, Filter(since=1 << 60) if filtered else None)
    scan = Scan(OsFiles(), stream.directory, start, stop, columns)
    try:
        while scan.fill(1000, 1 << 20):
            pass
        return scan.gaps
    finally:
        scan.close()


def test_others_are_told_of_what_is_on_stable_storage_and_of_nothing_else(tmp_path: Path) -> None:
    told: list[tuple[int, int, int]] = []

    class Told:
        def put(self, queue: int, first: int, next: int) -> None:
            told.append((queue, first, next))

        def remove(self, queue: int) -> None:
            told.append((queue, -1, -1))

    batch = Record((7,), (encode_message(bytes(1000)),) * 3, T0).encode()
    log = StreamLog(str(tmp_path / "stream"), segment_bytes=4096, published=QueueRange(Told(), 7))
    log.recover()
    QueueLog(log).append_records(memoryview(batch), 7, True)
    log.flush()
    job = log.begin_sync()
    assert job is not None
    QueueLog(log).append_records(memoryview(batch), 7, True)
    job.run()
    assert set(told) == {(7, 0, 0)}
    log.finish_sync(job)
    assert told[-1] == (7, 0, 3)
    sync(log)
    assert told[-1] == (7, 0, 6)
    log.retain(0, max_messages=1)
    assert told[-1] == (7, log.first_offset, 6) and log.first_offset > 0
    log.truncate()
    assert told[-1] == (7, 6, 6)
    log.delete_all()
    assert told[-1] == (7, -1, -1)


def test_a_message_larger_than_a_window_is_one_batch(tmp_path: Path) -> None:
    stream = Stream(tmp_path, 3, segment_bytes=1 << 20)
    stream.append(2)
    stream.log.append(Record((1,), (encode_message(b"x" * 3_000_000),), T0).encode())
    stream.append(1)
    sync(stream.log)
    columns = Columns(OFFSET | VALUE)
    scan = Scan(OsFiles(), stream.directory, 0, 4, columns)
    assert [scan.fill(10, 4096) for _ in range(4)] == [2, 1, 1, 0]
    scan.close()
