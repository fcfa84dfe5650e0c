"""A reader at a node that follows gives what the leader has committed, or nothing."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pyarrow as pa
import pytest

from shardmq.cluster.rules import Held
from shardmq.shardd.directories import shard_directory, stream_directory, vhost_directory
from shardmq.shardd.reader import scanning
from shardmq.shardd.reader.pace import Pacer
from shardmq.shardd.reader.scanning import Refused, Scanning, Streams
from shardmq.shardd.store.errors import Corrupt
from shardmq.shardd.store.files import Files, OsFiles
from shardmq.shardd.store.streams import StreamLog
from shardmq.shardd.wire.board import Board, path_of
from shardmq.shardd.wire.reader_protocol import LENGTH, NO_COPY, Scan
from tests.cluster.copies_world import CopiesNode, CopiesWorld
from tests.reference.record import Record as Message
from tests.reference.record import encode_message

SHARD, QUEUE = 3, 7
COLUMNS = ["offset", "value"]
SEGMENT_BYTES = 4096
PATIENCE_S = 30.0
WHOLE = Held(store="s", copy="name", is_whole=True, term=4)


class Node:
    """A node that follows: the copy of a shard, and the note beside it of what it is."""

    def __init__(self, root: Path, shards: tuple[int, ...] = ()) -> None:
        self.runtime = root / "run"
        self.runtime.mkdir(parents=True, exist_ok=True)
        data = str(root if SHARD in shards else root / "copies")
        self.streams = Streams(str(root), str(self.runtime), shards)
        self.shard = Path(shard_directory(data, SHARD))
        self.stream = Path(stream_directory(vhost_directory(str(self.shard), "/"), QUEUE))

    def hold(self, held: Held) -> None:
        said = {name: getattr(held, name) for name in held.__struct_fields__}
        self.shard.with_name(f"{self.shard.name}.copy").write_text(json.dumps(said))

    def log(self, files: Files | None = None) -> StreamLog:
        return StreamLog(str(self.stream), files=files, segment_bytes=SEGMENT_BYTES)

    def scanning(
        self, stop: int, first: int = 0, start: int | None = None, copy: str = "name"
    ) -> Scanning:
        at = first if start is None else start
        there = (first, stop)
        return Scanning(
            self.streams, Scan("/", SHARD, QUEUE, "q", 0, COLUMNS, at, stop, there=there, copy=copy)
        )


def append(log: StreamLog, bodies: list[bytes]) -> None:
    log.append(Message((1,), tuple(encode_message(body, b"", b"k") for body in bodies), 1).encode())


def commit(log: StreamLog) -> None:
    if (job := log.begin_sync()) is not None:
        job.run()
        log.finish_sync(job)


class CutOff(Exception):
    """A scan was cut off behind these bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(f"behind {len(data)} bytes")
        self.data = data


def run(scan: Scanning) -> bytes:
    """Return what a scan sends that has begun, in the parts for a proxy; close it at its end.

    Raises CutOff.
    """
    mine, theirs = socket.socketpair()
    mine.settimeout(PATIENCE_S)
    theirs.settimeout(PATIENCE_S)
    found: list[bytes] = []

    def take() -> None:
        found.extend(iter(lambda: theirs.recv(1 << 20), b""))

    taking = threading.Thread(target=take)
    with theirs:
        taking.start()
        try:
            with mine:
                scan.run(mine, False, Pacer(0))
        except Corrupt as error:
            taking.join(PATIENCE_S)
            raise CutOff(b"".join(found)) from error
        finally:
            taking.join(PATIENCE_S)
            scan.close()
    return b"".join(found)


def sent(scan: Scanning) -> bytes:
    """Return the IPC stream of a scan that ends well."""
    body, data, at = scan.begin().begin, run(scan), 0
    while at < len(data):
        (size,) = LENGTH.unpack_from(data, at)
        body, at = body + data[at + LENGTH.size : at + LENGTH.size + size], at + LENGTH.size + size
    return body


def rows(body: bytes) -> list[tuple[int, bytes]]:
    table = pa.ipc.open_stream(body).read_all()
    return list(zip(*(table.column(name).to_pylist() for name in COLUMNS), strict=True))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    log = made.log()
    log.recover()
    for number in range(300):
        append(log, [b"%d" % number * 20])
    commit(log)
    made.hold(WHOLE)
    return made


def refused(scan: Scanning) -> str:
    with pytest.raises(Refused) as error:
        scan.begin()
    scan.close()
    assert error.value.answer.status == NO_COPY
    return error.value.answer.reason


def test_a_copy_gives_the_bytes_that_the_leader_gives(node: Node) -> None:
    board = Board(path_of(str(node.runtime), SHARD))
    board.put(QUEUE, 0, 300)
    board.show()
    for start, stop in ((0, 300), (0, 1), (17, 230), (300, 300)):
        leads = Scanning(node.streams, Scan("/", SHARD, QUEUE, "q", 0, COLUMNS, start, stop))
        body = sent(leads)
        assert sent(node.scanning(stop, start=start)) == body
        assert [offset for offset, _ in rows(body)] == list(range(start, stop))


def test_a_shard_that_the_node_has_made_is_read_where_it_is(tmp_path: Path) -> None:
    node = Node(tmp_path, (SHARD,))
    assert node.shard == tmp_path / f"shard-{SHARD:02d}"
    log = node.log()
    log.recover()
    append(log, [b"one"])
    commit(log)
    node.hold(WHOLE)
    assert rows(sent(node.scanning(1))) == [(0, b"one")]


@pytest.mark.parametrize(
    "held",
    [
        Held(store="s", copy="another", is_whole=True),
        Held(store="s", copy="name", is_whole=False),
        Held(),
    ],
)
def test_another_copy_is_not_read(node: Node, held: Held) -> None:
    node.hold(held)
    assert "compared anew" in refused(node.scanning(300))


def test_without_a_note_no_copy_is_read(node: Node) -> None:
    note = node.shard.with_name(f"{node.shard.name}.copy")
    for said in (b"", b"{", b"\xff", b"[]"):
        note.write_bytes(said)
        assert "nobody knows" in refused(node.scanning(300))
    note.unlink()
    assert "nobody knows" in refused(node.scanning(300))
    node.hold(Held(is_whole=True))
    assert "compared anew" in refused(node.scanning(300, copy=""))


def test_what_the_copy_lacks_is_the_leaders_to_answer(node: Node) -> None:
    """It is neither an end of the stream, nor damage, nor what retention has removed."""
    refused(node.scanning(301, start=300))
    next(node.stream.glob(f"log.*{0:04d}")).unlink()
    refused(node.scanning(300))
    last = max(node.stream.glob("log.*"))
    last.write_bytes(last.read_bytes()[:200])
    first = int(last.name[4:])
    refused(node.scanning(300, start=first))


def test_damage_of_a_copy_is_the_leaders_to_answer(node: Node) -> None:
    segment = sorted(node.stream.glob("log.*"))[1]
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    assert "damaged" in refused(node.scanning(300, start=int(segment.name[4:])))


@pytest.mark.parametrize("is_checked", [True, False])
def test_no_row_is_sent_that_was_read_beside_a_comparison(
    node: Node, monkeypatch: pytest.MonkeyPatch, *, is_checked: bool
) -> None:
    """Without the check behind each batch, rows of another copy are sent."""
    monkeypatch.setattr(scanning, "BATCH_ROWS_MAX", 10)
    if not is_checked:
        monkeypatch.setattr(scanning.Copy, "check", lambda copy: None)
    scan = node.scanning(300)
    scan.begin()
    plain = scan._scan.fill

    def fill(*how: object) -> int:
        if scan._scan.offset >= 100:  # the node follows another leader from here on
            node.hold(Held(store="s", copy="next", is_whole=False))
        return plain(*how)  # type: ignore[arg-type]

    monkeypatch.setattr(scan._scan, "fill", fill)
    if is_checked:
        with pytest.raises(CutOff) as cut:
            run(scan)
        data = cut.value.data
    else:
        data = run(scan)
    assert (b"99" * 20 in data, b"100" * 20 in data) == (True, not is_checked)


def test_files_that_are_open_are_read_to_their_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention removes them at the leader, and so here."""
    monkeypatch.setattr(scanning, "BATCH_ROWS_MAX", 5)
    second = int(sorted(node.stream.glob("log.*"))[1].name[4:])
    scan = node.scanning(second)
    scan.begin()
    for path in sorted(node.stream.glob("log.*"))[:-1]:
        path.rename(path.with_name(f"gone.{path.name}"))
    assert b"%d" % (second - 1) * 20 in run(scan)


# -- random histories ------------------------------------------------------------------------------


class History:
    """Nodes with copies of a stream, which lead in turn, and readers at those that follow.

    committed: the bodies that were committed, by offset. No reader may see another one there.
    pending: those behind them, which were published and not committed.
    """

    def __init__(self, world: CopiesWorld, root: Path, seed: int) -> None:
        self.world, self.random = world, random.Random(seed)
        self.nodes = {name: Node(root / name) for name in "abc"}
        self.copies: dict[str, CopiesNode] = {}
        for name, node in self.nodes.items():
            made = self.copies[name] = world.node(name, node.shard, OsFiles(0o600))
            node.shard.parent.mkdir(parents=True, exist_ok=True)
            held = Path(f"{node.shard}-held.json")
            node.shard.with_name(f"{node.shard.name}.copy").symlink_to(held)
            made.belongs = lambda path: True
        self.committed: list[bytes] = []
        self.first = 0
        self.log: StreamLog | None = None
        self.leader = ""
        self.read = self.refused = self.leads = 0
        self.pending: list[bytes] = []

    async def begin(self) -> None:
        for name in "abc":
            self.copies[name].start()
            if name == "a":
                await self.lead()
        await self.world.in_sync("a", "b", "c")

    async def lead(self) -> None:
        """Recover the stream at the node that leads: what it has is committed then."""
        leader = await self.world.leader()
        self.leader = next(n for n, node in self.copies.items() if node.leader is leader)
        log = self.log = self.nodes[self.leader].log(leader.replicated)
        await asyncio.to_thread(log.recover)
        known = len(self.committed)
        assert log.committed_offset >= known, "something committed is lost"
        if log.committed_offset > known:  # it had come to this node, and nobody was told
            blob = log.read(known, bytes_max=1 << 30)
            assert blob.next_offset == log.committed_offset
            self.committed += self.pending[: log.committed_offset - known]
        self.pending = []
        self.leads += 1

    async def publish(self, *, commits: bool) -> None:
        assert self.log is not None
        bodies = [self.random.randbytes(self.random.randint(1, 400)) for _ in range(20)]
        self.pending = [*self.pending, *bodies]
        append(self.log, bodies)
        if commits:
            await asyncio.to_thread(commit, self.log)
            self.committed += self.pending
            self.pending = []
        else:
            await asyncio.to_thread(self.log.flush)

    def retain(self) -> None:
        assert self.log is not None
        self.log.retain(0, max_bytes=3 * SEGMENT_BYTES)
        self.first = self.log.first_offset

    async def fail(self) -> None:
        """Kill the node that leads, with a tail that was not committed; another one leads."""
        assert self.world.store.record is not None
        await self.publish(commits=False)
        dead, term = self.leader, self.world.store.record.term
        await self.copies[dead].kill()
        for name in set(self.copies) - {dead}:
            follower = self.copies[name].follower
            assert follower is not None
            follower.leader_gone(term)
        await self.lead()
        self.copies[dead].start()
        if self.random.random() < 0.5:
            await self.world.in_sync(*"abc")

    async def look(self) -> None:
        """Read at each node that follows, as it would be done for a client."""
        stop = len(self.committed)
        for name, node in self.nodes.items():
            record, _ = await self.world.store.read()
            if name == self.leader or record is None or name not in record.in_sync:
                continue
            start = self.random.randint(self.first, stop)
            scan = node.scanning(stop, self.first, start, record.in_sync[name])
            try:
                found = await asyncio.to_thread(sent, scan)
            except (Refused, CutOff):
                self.refused += 1
                continue
            assert rows(found) == list(enumerate(self.committed))[start:]
            self.read += 1


@pytest.fixture
async def world() -> AsyncIterator[CopiesWorld]:
    made = CopiesWorld()
    yield made
    await made.close()


@pytest.mark.parametrize("seed", [1, 2])
async def test_readers_at_followers_see_what_was_committed_and_nothing_else(
    world: CopiesWorld, tmp_path: Path, seed: int
) -> None:
    history = History(world, tmp_path, seed)
    await history.begin()
    for step in range(12):
        await history.publish(commits=True)
        await history.look()
        if step % 3 == 2:
            history.retain()
            await history.look()
        if step % 4 == 3:
            await history.fail()
            await history.look()
    await world.in_sync(*"abc")
    await history.publish(commits=True)
    before = history.read
    await history.look()
    assert history.read == before + 2, "both that follow are read"
    assert history.leads > 3 and history.read > 20


async def test_by_an_older_record_a_reader_would_see_what_was_thrown_away(
    world: CopiesWorld, tmp_path: Path
) -> None:
    """So the record is read anew for each scan: the node that is cut off has its old name there."""
    history = History(world, tmp_path, 1)
    await history.begin()
    await history.publish(commits=True)
    old, a = world.store.record, history.nodes["a"]
    assert old is not None
    world.cut.add("a")
    world.cut_all()
    await history.publish(commits=False)  # it goes to no other node
    history.pending = []
    for name in "bc":
        follower = history.copies[name].follower
        assert follower is not None
        follower.leader_gone(old.term)
    await world.leader("b", "c")
    await history.copies["a"].kill()
    await history.lead()
    await history.publish(commits=True)
    record, _ = await world.store.read()
    assert record is not None and "a" not in record.in_sync
    stop = len(history.committed)
    seen = rows(await asyncio.to_thread(sent, a.scanning(stop, copy=old.in_sync["a"])))
    assert seen != list(enumerate(history.committed))
    await history.look()
    assert history.read == 1
