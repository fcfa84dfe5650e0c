"""Batches leave whole and in order, however little the socket takes, or the call fails."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.reader.arrow import arrays_of, bits_of, schema_of
from shardmq.shardd.reader.buffers import Sender
from shardmq.shardd.reader.ipc import END, batch_head
from shardmq.shardd.store.files import OsFiles
from shardmq.shardd.store.format.columns import Columns
from shardmq.shardd.store.streams import StreamLog
from shardmq.shardd.store.streams.scan import Scan
from shardmq.shardd.wire.reader_protocol import LENGTH
from tests.reference.record import Record, encode_message

TIME_OUT_S = 60
NAMES = ("queue", "shard", "offset", "routing_key", "value", "headers")


def stream_of(directory: Path, bodies: list[bytes]) -> str:
    log = StreamLog(str(directory))
    log.recover()
    for body in bodies:
        log.append(Record((1,), (encode_message(body, b"", b"key"),), 1).encode())
    job = log.begin_sync()
    if job is not None:
        job.run()
        log.finish_sync(job)
    log.close()
    return str(directory)


def send_all(
    directory: str,
    rows: int,
    sock: socket.socket,
    pause_bytes: int = 1 << 30,
    timeout_ms: int = 10_000,
) -> int:
    """As parts. Bytes."""
    columns = Columns(bits_of(NAMES))
    arrays = arrays_of(NAMES, columns, "a queue", 1)
    head = batch_head(arrays.nodes, arrays.buffers)
    sender = Sender(arrays, head, sock.fileno(), False, timeout_ms, pause_bytes)
    scan = Scan(OsFiles(), directory, 0, rows, columns)
    sent = 0
    try:
        while scan.offset < rows:
            scan.fill(3, 100_000, sender)
            if columns.rows:
                columns.flush(sender)
            sent += sender.take_sent()
    finally:
        scan.close()
    return sent


def parts_of(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (size,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size + size
        assert at <= len(data)
        yield data[at - size : at]


@settings(max_examples=20)
@given(
    st.lists(st.sampled_from([0, 1, 7, 100, 5000, 70_000]), max_size=12),
    st.sampled_from([0, 6000, 1 << 30]),
    st.integers(0, 99),
)
def test_batches_leave_one_after_the_other_wherever_the_socket_cuts_them(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], pause_bytes: int, seed: int
) -> None:
    bodies = [random.Random(seed + at).randbytes(size) for at, size in enumerate(sizes)]
    directory = stream_of(tmp_path_factory.mktemp("sent"), bodies)
    here, there = socket.socketpair()
    received: list[bytes] = []

    def read() -> None:
        while data := there.recv(3001):
            received.append(data)

    with here, there:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        here.settimeout(TIME_OUT_S)
        reader = threading.Thread(target=read)
        reader.start()
        sent = send_all(directory, len(bodies), here, pause_bytes)
        here.shutdown(socket.SHUT_WR)
        reader.join(TIME_OUT_S)
    data = b"".join(received)
    assert sent == len(data)
    table = pa.ipc.open_stream(
        b"".join([schema_of(NAMES).serialize(), *parts_of(data), END])
    ).read_all()
    table.validate(full=True)
    assert table.column("value").to_pylist() == bodies
    assert table.column("offset").to_pylist() == list(range(len(bodies)))
    assert table.column("queue").to_pylist() == ["a queue"] * len(bodies)
    assert table.column("shard").to_pylist() == [1] * len(bodies)


def test_who_does_not_read_on_is_waited_for_so_long(tmp_path: Path) -> None:
    directory = stream_of(tmp_path / "sent", [bytes(1 << 20)] * 8)
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(TIME_OUT_S)
        with pytest.raises(TimeoutError):
            send_all(directory, 8, here, timeout_ms=1)


def test_who_has_hung_up_is_an_error(tmp_path: Path) -> None:
    directory = stream_of(tmp_path / "sent", [b"x"])
    here, there = socket.socketpair()
    there.close()
    with here, pytest.raises(BrokenPipeError):
        send_all(directory, 1, here)


def test_a_head_of_other_columns_is_refused() -> None:
    columns = Columns(bits_of(NAMES))
    arrays = arrays_of(NAMES, columns, "q", 1)
    with pytest.raises(ValueError, match="head"):
        Sender(arrays, batch_head(arrays.nodes, arrays.buffers + 1), 0, True, 0, 0)
