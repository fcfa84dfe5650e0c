"""Followers get what a leader has compressed, and take nothing else for it."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import lz4.block
import msgspec
import pytest
import zstandard

from shardmq.cluster import compression, frames, leading, rules, sending
from shardmq.cluster.compression import (
    COMPRESSED_FROM_BYTES,
    DECOMPRESSED_BYTES_MAX,
    BadCompression,
)
from shardmq.cluster.operations import Kind, Operation
from shardmq.cluster.rules import Held, Position
from tests.cluster.copies_world import CopiesNode, CopiesWorld

METHODS = list(compression.MODULES)
ROUNDS = 60
ZEROS_BYTES = 64 << 20


@pytest.fixture
async def world() -> AsyncIterator[CopiesWorld]:
    made = CopiesWorld()
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def some_data(rng: random.Random, size: int) -> bytes:
    """Return bytes that can be compressed well, a little, or not at all."""
    words = [rng.randbytes(8) for _ in range(rng.choice((2, 50, 10_000)))]
    return b"".join(rng.choices(words, k=size // 8 + 1))[:size]


def some_message(rng: random.Random) -> frames.Data:
    session, size = rng.randrange(1 << 40), rng.choice((0, 10, 2000, 60_000))
    if rng.random() < 0.3:
        return frames.Piece(session, "d/f", rng.randrange(1 << 40), some_data(rng, size))
    changes = [
        Operation(rng.choice(list(Kind)), f"d/{number}", rng.randrange(1 << 40), data, "e")
        for number in range(rng.randrange(1, 20))
        for data in (some_data(rng, rng.randrange(size + 1)),)
    ]
    return frames.Operations(session, Position(3, rng.randrange(1 << 40)), changes)


def body(message: frames.Sent) -> bytes:
    return frames.encode(message)[4:]


class FormerHello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """The hello of a release that compresses nothing."""

    session: int
    node: str
    life: int
    held: Held
    position: Position | None
    term: int


def some_compressed(method: str, size: int = 5000) -> frames.Compressed:
    found = frames.compressed(frames.Piece(7, "f", 0, b"x" * size), method)
    assert found is not None
    return found


# -- frames ----------------------------------------------------------------------------------------


def test_what_is_compressed_is_the_same_behind_it(method: str) -> None:
    rng = random.Random(method)
    compressed = 0
    for _ in range(ROUNDS):
        message = some_message(rng)
        found = frames.compressed(message, method)
        if found is not None:
            compressed += 1
            assert len(body(found)) < len(body(message))
        assert frames.from_leader(body(found or message)) == message
    assert ROUNDS / 4 < compressed < ROUNDS


def test_what_is_small_large_or_random_stays_as_it_is(method: str) -> None:
    for data in (
        b"x" * (COMPRESSED_FROM_BYTES // 2),
        b"x" * (DECOMPRESSED_BYTES_MAX + 1),
        random.Random(1).randbytes(100_000),
    ):
        assert frames.compressed(frames.Piece(7, "f", 0, data), method) is None


def test_the_session_of_a_compressed_message_is_the_one_outside(method: str) -> None:
    """Thus followers at the same place get the same bytes."""
    found = msgspec.structs.replace(some_compressed(method), session=99)
    assert frames.from_leader(body(found)).session == 99


def bombs() -> Iterator[frames.Compressed]:
    """Yield messages that say to be of a size, and are not."""
    zeros = bytes(ZEROS_BYTES)
    with_size = zstandard.ZstdCompressor(1).compress(zeros)
    without = zstandard.ZstdCompressor(1, write_content_size=False).compress(zeros)
    block = lz4.block.compress(zeros, store_size=False)
    for size in (2000, DECOMPRESSED_BYTES_MAX, ZEROS_BYTES, 1 << 60, 0, -1):
        yield frames.Compressed(7, "zstd", size, with_size)
        yield frames.Compressed(7, "zstd", size, without)
        yield frames.Compressed(7, "lz4", size, block)


def test_a_bomb_is_refused_and_takes_no_memory() -> None:
    for bomb in list(bombs()):
        data = body(bomb)
        tracemalloc.start()
        try:
            with pytest.raises(BadCompression):
                frames.from_leader(data)
            assert tracemalloc.get_traced_memory()[1] < DECOMPRESSED_BYTES_MAX + 2 * len(data)
        finally:
            tracemalloc.stop()


def test_garbage_is_refused(method: str) -> None:
    rng = random.Random(method)
    good = some_compressed(method)
    for _ in range(500):
        data = bytearray(good.data)
        match rng.randrange(4):
            case 0:
                data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
            case 1:
                del data[rng.randrange(len(data)) :]
            case 2:
                data += rng.randbytes(rng.randrange(1, 9))
            case 3:
                data = bytearray(rng.randbytes(rng.randrange(200)))
        try:
            found = frames.from_leader(body(msgspec.structs.replace(good, data=bytes(data))))
        except BadCompression:
            continue
        assert isinstance(found, frames.Data)  # a bit of the contents, which TLS would notice
    with pytest.raises(BadCompression, match="'snappy' is not known"):
        frames.from_leader(body(msgspec.structs.replace(good, method="snappy")))


def test_a_frame_that_is_none_is_refused() -> None:
    piece = frames.Piece(7, "name", 0, b"")
    for data in (b"", b"\xc1", body(piece)[:-1], body(piece).replace(b"name", b"na\xffe")):
        for read in (frames.from_leader, frames.from_follower):
            with pytest.raises(frames.BadFrame):
                read(data)


def test_nothing_but_data_is_taken_in_compressed_form(method: str) -> None:
    """Else a message could be compressed again and again."""
    inner = body(some_compressed(method, 500_000))
    found = frames.Compressed(7, method, len(inner), compression.compress(method, inner))
    with pytest.raises(BadCompression):
        frames.from_leader(body(found))


def test_releases_without_compression_are_understood_and_understand() -> None:
    hello = rules.Hello(1, "n", 2, Held("s", "c", True), Position(3, 4), 3)
    without = FormerHello(*msgspec.structs.astuple(hello)[:-1])
    assert frames.from_follower(msgspec.msgpack.encode(without)) == hello
    assert hello.methods == []
    now = msgspec.structs.replace(hello, methods=["lz4"])
    assert frames.from_follower(body(now)) == now
    former = msgspec.msgpack.Decoder(FormerHello | rules.Ack)
    assert former.decode(body(now)) == without


def test_a_library_that_is_not_installed_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "MODULES", {"lz4": "no_such", "zstd": "zstandard"})
    assert compression.methods.__wrapped__() == ["zstd"]


# -- leaders and followers -------------------------------------------------------------------------


class Sent:
    """Notes which nodes were sent compressed data, and which were sent plain data."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compressed: set[str] = set()
        self.plain: set[str] = set()
        send = sending.Session.send

        def noted(session: sending.Session, message: frames.FromLeader) -> int:
            if isinstance(message, frames.Compressed):
                self.compressed.add(session.node)
            elif isinstance(message, frames.Data):
                self.plain.add(session.node)
            return send(session, message)

        monkeypatch.setattr(sending.Session, "send", noted)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(monkeypatch)


def write_some(rng: random.Random, node: CopiesNode, leader: leading.LeaderOfCopies) -> None:
    """Write files through the leader, in a thread that is not that of its loop."""
    files = leader.replicated
    files.make_directory(f"{node.root}/d")
    for _ in range(12):
        handle = files.open(f"{node.root}/d/{rng.randrange(4)}", create=True)
        for _ in range(rng.randrange(1, 4)):
            data = some_data(rng, rng.choice((20, 3000, 200_000)))
            files.write(handle, data, rng.randrange(1 << 20))
        files.sync(handle)
        files.close(handle)
    files.sync_directory(f"{node.root}/d")


def content(node: CopiesNode) -> dict[str, bytes]:
    root = Path(node.root)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("?")
            if path.is_file()}  # fmt: skip


async def test_each_follower_gets_what_it_understands(
    world: CopiesWorld, tmp_path: Path, sent: Sent, method: str
) -> None:
    """A comparison first, and then the operations."""
    world.compression = method
    a, b, c = (world.node(name, tmp_path / name) for name in "abc")
    c.methods = []
    rng = random.Random(method)
    a.start()
    leader = await world.leader("a")
    await asyncio.to_thread(write_some, rng, a, leader)
    for node in (b, c):
        node.start()
    await world.in_sync("a", "b", "c")
    assert sent.compressed == {"b"}
    assert leader.sender.sent_bytes < leader.sender.plain_bytes
    sent.compressed.clear()
    await asyncio.to_thread(write_some, rng, a, leader)
    assert sent.compressed == {"b"} and "c" in sent.plain
    assert content(a) == content(b) == content(c)


async def test_followers_at_the_same_place_share_the_work(
    world: CopiesWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work: list[frames.Data] = []
    compressed = frames.compressed

    def noted(message: frames.Data, method: str) -> frames.Compressed | None:
        work.append(message)
        return compressed(message, method)

    monkeypatch.setattr(frames, "compressed", noted)
    world.compression = "lz4"
    nodes = [world.node(name, tmp_path / name) for name in "abc"]
    for node in nodes:
        node.start()
        await world.leader()
    await world.in_sync("a", "b", "c")
    leader = await world.leader("a")
    await asyncio.to_thread(write_some, random.Random(2), nodes[0], leader)
    batches = [(each.at, len(each.operations)) for each in work if hasattr(each, "operations")]
    assert len(batches) == len(set(batches))
    assert content(nodes[0]) == content(nodes[1]) == content(nodes[2])


async def test_a_follower_that_cannot_decompress_gets_plain_data(
    world: CopiesWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: Sent
) -> None:
    def broken(method: str, data: bytes) -> bytes:
        return b"no frame"

    monkeypatch.setattr(compression, "compress", broken)
    world.compression = "zstd"
    a, b = (world.node(name, tmp_path / name) for name in "ab")
    a.start()
    leader = await world.leader("a")
    await asyncio.to_thread(write_some, random.Random(3), a, leader)
    b.start()
    await world.in_sync("a", "b")
    assert sent.compressed == {"b"}
    await asyncio.to_thread(write_some, random.Random(4), a, leader)
    assert content(a) == content(b)


async def test_without_the_setting_nothing_is_compressed(
    world: CopiesWorld, tmp_path: Path, sent: Sent
) -> None:
    a, b = (world.node(name, tmp_path / name) for name in "ab")
    a.start()
    leader = await world.leader("a")
    b.start()
    await world.in_sync("a", "b")
    await asyncio.to_thread(write_some, random.Random(5), a, leader)
    assert not sent.compressed
    assert leader.sender.sent_bytes == leader.sender.plain_bytes > 0
    assert content(a) == content(b)
