"""A snapshot is a store as it was at one moment, whatever happens to the store that it is of."""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmq.shardd.snapshot import LINKS, Part, Snapshot
from shardmq.shardd.store.files import OsFiles
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.store.streams import StreamCache, StreamLog
from shardmq.shardd.store.tools.__main__ import main
from tests.reference.record import Record, encode_message, split_messages

STORE, STREAM = "a" * 40, f"{'a' * 40}/stream.7"
SEGMENT_BYTES = 4096


class Messages:
    """A store below a directory, with a model of its messages: their numbers by entry."""

    def __init__(self, root: Path, begun: dict[int, int] | None = None) -> None:
        self.root = root
        self.store = SegmentStore(f"{root}/{STORE}", segment_bytes=SEGMENT_BYTES)
        found = self.store.recover([1]).get(1)
        self.live: dict[int, int] = {}
        if found is not None and len(found.entries):
            blob, sizes = self.store.read(found.entries, 1 << 30)
            bodies = re.findall(rb"[0-9]{150}", b"".join(split_messages(blob)))
            assert len(bodies) == len(sizes) == len(found.entries)
            self.live = dict(zip(found.entries, map(int, bodies), strict=True))

    def numbers(self) -> list[int]:
        return sorted(self.live.values())

    def publish(self, numbers: range) -> None:
        records = b"".join(
            Record((1,), (encode_message(b"%0150d" % n, b"", b"k"),), 5, 0xFFFFFFFF).encode()
            for n in numbers
        )
        (arrival,) = self.store.append(records)
        self.live.update(zip(arrival.entries, numbers, strict=True))

    def settle(self, entries: list[int]) -> None:
        for entry in entries:
            del self.live[entry]
        self.store.settle(1, array("Q", entries), True)

    def sync(self) -> None:
        if (job := self.store.begin_sync()) is not None:
            job.run()
            self.store.finish_sync(job)
        if (settled := self.store.begin_settled_sync()) is not None:
            settled.run()
            self.store.finish_settled_sync(settled)

    def part(self) -> Part:
        """Return what a snapshot has to know, behind a flush."""
        self.store.flush()
        return Part(STORE, self.store.growing())

    def act(self, rng: random.Random, count: itertools.count[int]) -> None:
        match rng.randrange(4):
            case 0:
                numbers = list(itertools.islice(count, rng.randint(1, 20)))
                self.publish(range(numbers[0], numbers[-1] + 1))
            case 1 if self.live:
                entries = sorted(self.live)
                self.settle(entries[: rng.randint(1, len(entries))])
            case 2:
                self.sync()
            case 3:
                self.store.compact()


def refuse_links(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let links into targets fail, as if these were on another mount; the device is the same."""
    plain = os.link

    def link(source: str, target: str) -> None:
        if "/target" in target:
            raise OSError(number, os.strerror(number), source, None, target)
        plain(source, target)

    monkeypatch.setattr(os, "link", link)


@pytest.fixture(params=["links", "copies"])
def places(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Path]:
    """Return the directory of a name: on one file system, or as if it were on another."""
    if request.param == "copies":
        refuse_links(monkeypatch, errno.EXDEV)
    return lambda name: tmp_path / name


def live_on(seed: int, places: Callable[[str], Path]) -> None:
    """Take snapshots in the life of a store; go on with the store and with the snapshots."""
    rng, count = random.Random(seed), itertools.count()
    source = Messages(places("source"))
    expected: list[tuple[Path, list[int]]] = []
    for turn in range(3):
        for _ in range(rng.randint(1, 25)):
            source.act(rng, count)
        target = places(f"target-{turn}")
        made = Snapshot(str(source.root), str(target))
        made.prepare([STORE])
        for _ in range(rng.randint(0, 15)):
            source.act(rng, count)
        made.capture([source.part()])
        expected.append((target, source.numbers()))
        for _ in range(rng.randint(0, 15)):  # while the thread has not copied yet
            source.act(rng, count)
        made.finish()
    for _ in range(25):
        source.act(rng, count)
    for target, numbers in expected:
        assert main(["verify", str(target / STORE)]) == 0
        found = Messages(target)
        assert found.numbers() == numbers
        assert found.store.damage == []
        # All segments die, and their files are used again where that is possible.
        found.settle(sorted(found.live))
        for _ in range(30):
            found.act(rng, count)
            found.sync()
    source.store.flush()
    again = Messages(source.root)
    assert again.numbers() == source.numbers()


@pytest.mark.parametrize("seed", range(4))
def test_a_snapshot_and_its_store_go_on_without_each_other(
    seed: int, places: Callable[[str], Path]
) -> None:
    live_on(seed, places)
    assert not (places("source") / LINKS).exists()


def test_files_that_are_used_again_although_a_snapshot_has_them_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OsFiles, "is_linked", lambda self, handle: False)
    for seed in range(20):
        try:
            live_on(seed, lambda name, seed=seed: tmp_path / f"{seed}-{name}")  # type: ignore[misc]
        except (AssertionError, ValueError, OSError):
            return
    raise AssertionError("20 lives did not notice")


def test_sealed_segments_are_linked_and_the_open_one_is_copied(tmp_path: Path) -> None:
    source = Messages(tmp_path / "source")
    for first in range(0, 200, 20):
        source.publish(range(first, first + 20))
    source.sync()
    made = Snapshot(str(source.root), str(tmp_path / "target"))
    made.prepare([STORE])
    made.capture([source.part()])
    made.finish()
    names = sorted(path.name for path in (tmp_path / "target" / STORE).iterdir())
    assert not [name for name in names if name.startswith("spare")]
    segments = [name for name in names if name.startswith("msgs.")]
    links = {name: (tmp_path / "source" / STORE / name).stat().st_nlink for name in segments}
    assert links[segments[-1]] == 1 and links[segments[0]] == 2


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_is_in_the_snapshot_up_to_its_moment(
    seed: int, places: Callable[[str], Path]
) -> None:
    rng, source = random.Random(seed), places("source")

    def log_in(root: Path) -> StreamLog:
        made = StreamLog(
            f"{root}/{STREAM}", cache=StreamCache(OsFiles()), segment_bytes=SEGMENT_BYTES
        )
        made.recover()
        return made

    def append(log: StreamLog, count: int) -> None:
        for number in range(count):
            message = encode_message(b"%0200d" % number, b"", b"k")
            log.append(Record((7,), (message,), 5, 0xFFFFFFFF).encode())
            if rng.random() < 0.2 and (job := log.begin_sync()) is not None:
                job.run()
                log.finish_sync(job)

    log = log_in(source)
    append(log, rng.randint(0, 100))
    log.positions.set(b"reader", min(3, log.next_offset))
    made = Snapshot(str(source), str(places("target")))
    made.prepare([STREAM])
    append(log, rng.randint(0, 60))
    log.flush()
    expected = log.next_offset
    made.capture([Part(STREAM, log.growing())])
    append(log, rng.randint(0, 60))  # while the thread has not copied yet
    log.retain(0, max_bytes=SEGMENT_BYTES)
    made.finish()
    if expected:
        assert main(["verify", str(places("target") / STREAM)]) == 0
    found = log_in(places("target"))
    assert (found.first_offset, found.next_offset) == (0, expected)
    assert found.damage == []
    if expected:
        assert found.positions.offsets[b"reader"] == min(3, expected)


def test_a_snapshot_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Messages(tmp_path / "source")
    source.publish(range(200))
    made = Snapshot(str(source.root), str(tmp_path / "target"))
    made.prepare([STORE])
    made.capture([source.part()])
    calls = 0

    def fails(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("no room on purpose")

    monkeypatch.setattr(os, "fdatasync", fails)
    with pytest.raises(OSError, match="on purpose"):
        made.finish()
    made.give_up()
    assert not (tmp_path / "target").exists()


def test_a_target_that_is_there_is_left_alone(tmp_path: Path) -> None:
    source = Messages(tmp_path / "source")
    (tmp_path / "target").mkdir()
    made = Snapshot(str(source.root), str(tmp_path / "target"))
    with pytest.raises(FileExistsError):
        made.prepare([STORE])
    made.give_up()
    assert (tmp_path / "target").exists()


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_where_links_are_refused_the_moment_is_kept_without_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse_links(monkeypatch, number)
    source, target = Messages(tmp_path / "source"), tmp_path / "target"
    source.publish(range(200))
    made = Snapshot(str(source.root), str(target))
    made.prepare([STORE])
    made.capture([source.part()])
    assert list(target.iterdir()) == [], "its file system may hang"
    made.finish()
    assert Messages(target).numbers() == source.numbers()
    assert not (source.root / LINKS).exists()


def test_a_store_that_goes_while_its_files_are_looked_at_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Messages(tmp_path / "source")
    source.publish(range(200))
    plain = os.scandir

    def scandir(path: str) -> object:
        if path.endswith("b" * 40):
            os.rmdir(path)
        return plain(path)

    (source.root / ("b" * 40)).mkdir()
    made = Snapshot(str(source.root), str(tmp_path / "target"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scandir)
        made.prepare(["b" * 40, STORE])
    made.capture([source.part()])
    made.finish()
    assert Messages(tmp_path / "target").numbers() == source.numbers()


@pytest.mark.parametrize("step", ["prepare", "capture", "finish"])
@pytest.mark.parametrize("is_empty", [True, False])
def test_a_target_that_is_removed_is_not_made_again(
    tmp_path: Path, places: Callable[[str], Path], step: str, *, is_empty: bool
) -> None:
    source, part, gone = Messages(places("source")), tmp_path / "target", tmp_path / "gone"
    part.mkdir()
    source.publish(range(200))
    made = Snapshot(str(source.root), str(part / "shard-00"))
    steps: dict[str, Callable[[], object]] = {
        "prepare": lambda: made.prepare([] if is_empty else [STORE]),
        "capture": lambda: made.capture([] if is_empty else [source.part()]),
        "finish": made.finish,
    }

    def run() -> None:
        for name, do in steps.items():
            if name == step:
                part.rename(gone)
            do()

    with pytest.raises(FileNotFoundError):
        run()
    made.give_up()
    assert not part.exists()


def test_progress_is_told_while_the_loop_captures_alone(tmp_path: Path) -> None:
    source, told = Messages(tmp_path / "source"), itertools.count()
    source.publish(range(200))
    made = Snapshot(str(source.root), str(tmp_path / "target"))
    made.prepare([STORE])
    made.capture([source.part()], lambda: next(told))
    before = next(told)
    made.finish()
    assert before and next(told) == before + 1, "a thread says nothing about the loop"
