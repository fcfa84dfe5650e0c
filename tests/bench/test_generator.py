"""The load generator counts frames that it did not make itself.

The tests compile it, and need no broker.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LOAD = Path(__file__).parents[2] / "bench" / "load"

pytestmark = pytest.mark.skipif(
    not (shutil.which("cc") and shutil.which("make")), reason="needs make and a C compiler"
)


@pytest.fixture(scope="module")
def generator() -> Path:
    subprocess.run(["make", "--silent", "-C", str(LOAD)], check=True)
    return LOAD / "amqpload"


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def delivery(tag: int, body: bytes, piece_bytes: int, consumer_tag: bytes = b"c0") -> bytes:
    method = (
        struct.pack(">HHB", 60, 60, len(consumer_tag))
        + consumer_tag
        + struct.pack(">QB", tag, 0)
        + b"\0\x01q"
    )
    pieces = [body[at : at + piece_bytes] for at in range(0, len(body), piece_bytes)]
    header = struct.pack(">HHQH", 60, 0, len(body), 0)
    return (
        frame(1, 1, method) + frame(2, 1, header) + b"".join(frame(3, 1, piece) for piece in pieces)
    )


HEARTBEAT = frame(8, 0, b"")
OTHER_METHOD = frame(1, 0, struct.pack(">HH", 10, 61))


def scan(
    generator: Path, directory: Path, stream: bytes, piece_bytes: int = 65536
) -> tuple[int, dict[str, Any]]:
    (directory / "stream").write_bytes(stream)
    command = [
        str(generator),
        "--scan-piece",
        str(piece_bytes),
        "--scan-file",
        str(directory / "stream"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout)


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    bodies=st.lists(st.integers(0, 300), max_size=20),
    body_piece=st.integers(1, 200),
    read_piece=st.integers(1, 500),
    between=st.sampled_from([b"", HEARTBEAT, OTHER_METHOD]),
)
def test_every_delivery_is_counted_however_frames_and_reads_are_cut(
    generator: Path,
    tmp_path: Path,
    bodies: list[int],
    body_piece: int,
    read_piece: int,
    between: bytes,
) -> None:
    stream = b"".join(
        delivery(tag, b"x" * size, body_piece) + between for tag, size in enumerate(bodies, 1)
    )
    status, seen = scan(generator, tmp_path, stream, read_piece)
    assert status == 0
    assert seen == {
        "messages": len(bodies),
        "bytes": sum(bodies),
        "methods": len(bodies) if between == OTHER_METHOD else 0,
        "acks_due": len(bodies) // 2,
        "last_tag": len(bodies),
        "kept": 0,
        "error": "",
    }


def test_a_frame_that_is_not_whole_is_kept_for_the_next_read(
    generator: Path, tmp_path: Path
) -> None:
    stream = delivery(1, b"x" * 16, 16) + delivery(2, b"x" * 16, 16)
    status, seen = scan(generator, tmp_path, stream[:-1])
    assert (status, seen["messages"], seen["kept"]) == (0, 1, 16 + 8 - 1)


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (delivery(1, b"x", 9)[:-1] + b"\0", "frame end octet missing"),
        (struct.pack(">BHI", 3, 1, 1 << 30) + b"\0" * 8, "frame longer than agreed"),
        (frame(9, 0, b""), "unknown frame type"),
        (frame(3, 1, b"body"), "body frame out of place"),
        (frame(2, 1, struct.pack(">HHQH", 60, 0, 1, 0)), "content header out of place"),
        (
            delivery(1, b"xy", 1)[:-9] + delivery(2, b"x", 1),
            "basic.deliver before the end of the message before it",
        ),
        (frame(1, 1, struct.pack(">HHB", 60, 60, 200)), "basic.deliver cut short"),
        (frame(1, 1, b"\0\0"), "method frame without a method"),
    ],
)
def test_a_broken_stream_is_named_and_is_a_failure(
    generator: Path, tmp_path: Path, stream: bytes, error: str
) -> None:
    status, seen = scan(generator, tmp_path, stream)
    assert (status, seen["error"]) == (1, error)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--url", "http://x"],
        ["--url", "amqp://x", "--batch", "0"],
        ["--url", "amqp://x", "--body", "15", "--check"],
        ["--url", "amqp://x", "--keys", "2"],
        ["--url", "amqp://x", "--prefetch", "10", "--ack-every", "11"],
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_opened(
    generator: Path, words: list[str]
) -> None:
    assert (
        subprocess.run([str(generator), *words], capture_output=True, check=False).returncode == 2
    )


def test_a_broker_that_is_not_there_is_a_failure_with_a_reason(generator: Path) -> None:
    command = [str(generator), "--url", "amqp://127.0.0.1:0/", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"].startswith("cannot connect to 127.0.0.1:0")
