"""The copy is, after each operation, what the leader's disk was, for a crash at any moment too."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.broker.controller.stored.definitions import Definitions, is_of_definitions
from shardmq.broker.controller.stored.errors import DefinitionsError
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import AnyChange, VhostPut
from shardmq.cluster import operations
from shardmq.cluster.operations import (
    REPLACEMENT,
    CopiedDirectory,
    FileSums,
    Kind,
    NoPath,
    Operation,
    OperationLog,
    digests_of,
)
from shardmq.cluster.replicated_files import Confirmations, ReplicatedFiles, SyncNews
from shardmq.cluster.rules import Position
from shardmq.shardd.store.files import Files, OsFiles
from tests.definitions.test_log import write
from tests.support.catalogs import state
from tests.support.changes import any_change
from tests.support.faulty_files import FaultyFiles, PowerCut

EVER = 1 << 60
HISTORIES = 200
SKIPPABLE = [kind for kind in Kind if kind not in (
    Kind.MAKE_DIRECTORY, Kind.REMOVE_DIRECTORY, Kind.SYNC_ALL
)]  # fmt: skip


class ForgetfulFiles(ReplicatedFiles):
    """Does not send one kind of change."""

    forgotten: Kind

    def _append(self, operation: Operation) -> int:
        return 0 if operation.kind == self.forgotten else super()._append(operation)


def replicated(
    files: Files, root: str, log: OperationLog, kind: type[ReplicatedFiles] = ReplicatedFiles
) -> ReplicatedFiles:
    confirmations = Confirmations()
    confirmations.confirm(EVER)
    return kind(
        files, root, log, confirmations, SyncNews(lambda *_: None, lambda: None, lambda _: None)
    )


def crash_states(files: FaultyFiles) -> Any:
    """Return all that decides what a crash or a power cut leaves of a disk.

    A file without a name is left out: its last name may come back, but nobody relies on what was
    written to it since.
    """
    named = {id(node) for node in files.names.values()}
    return [
        {
            name: (node.data, node.stable, node.dirty) if id(node) in named else None
            for name, node in names.items()
        }
        for names in (files.names, files.stable_names, *files.changes)
    ]


def act(rng: random.Random, files: ReplicatedFiles, handles: list[int]) -> None:
    """Make a random call, as stores do: with files that lose their names while they are open."""
    name, other = (f"d/{rng.choice('abcd')}" for _ in range(2))
    handle = rng.choice(handles) if handles else None
    with contextlib.suppress(FileNotFoundError):
        match rng.choice("oowwwwtlssdrxukc"):
            case "o":
                handles.append(files.open(name, create=rng.random() < 0.8))
            case "w" if handle is not None:
                files.write(handle, rng.randbytes(rng.randrange(1, 900)), rng.randrange(600))
            case "t" if handle is not None:
                files.truncate(handle, rng.randrange(900))
            case "l" if handle is not None:
                files.allocate(handle, rng.randrange(900))
            case "s" if handle is not None:
                files.sync(handle)
            case "d":
                files.sync_directory("d")
            case "r" if name != other:
                files.rename(name, other)
            case "x" if name != other:
                files.exchange(name, other)
            case "u":
                files.remove(name)
            case "c" if handle is not None:
                handles.remove(handle)
                files.close(handle)


def play(seed: int, kind: type[ReplicatedFiles] = ReplicatedFiles) -> bool:
    """Play a history; return whether the copy could be told from the leader's disk."""
    rng, log = random.Random(seed), OperationLog()
    leader, copy = FaultyFiles(), FaultyFiles()
    files, directory = replicated(leader, "d", log, kind), CopiedDirectory(copy, "d")
    handles: list[int] = []
    done = log.last
    for _ in range(40):
        act(rng, files, handles)
        try:
            for numbered in log.after(done, EVER) or []:
                directory.apply(numbered.operation)
        except FileNotFoundError:
            return True
        done = log.last
        if crash_states(leader) != crash_states(copy):
            return True
    return False


def test_after_each_call_both_disks_are_the_same_for_any_crash(pytestconfig: pytest.Config) -> None:
    first = random.Random(pytestconfig.option.seed).randrange(1 << 40)
    assert [seed for seed in range(first, first + HISTORIES) if play(seed)] == []


@pytest.mark.parametrize("kind", SKIPPABLE, ids=lambda kind: kind.name)
def test_files_that_do_not_send_a_kind_of_change_are_convicted(kind: Kind) -> None:
    broken = type("Broken", (ForgetfulFiles,), {"forgotten": kind})
    assert any(play(seed, broken) for seed in range(HISTORIES))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(any_change(), max_size=6), max_size=5), st.randoms())
def test_definitions_of_the_copy_are_the_leaders_after_a_power_cut(
    batches: list[list[AnyChange]], rng: random.Random
) -> None:
    log = OperationLog()
    leader, copy = FaultyFiles(rng.randrange(1 << 30)), FaultyFiles(rng.randrange(1 << 30))
    files, directory = replicated(leader, "d", log), CopiedDirectory(copy, "d")
    done = log.last
    definitions = Definitions(Path("d"), "boot", files)
    catalog = definitions.load()
    for batch in [[VhostPut("/")], *batches]:
        write(definitions, catalog, batch)
        found = log.after(done, EVER) or []
        cut = rng.randint(0, len(found))
        for number, numbered in enumerate(found):
            if number == cut:
                # Sectors of a log that was not synced are kept in any order, so the log may be one
                # that people have to look at; otherwise there is a catalog that can be read.
                with contextlib.suppress(DefinitionsError):
                    Definitions(Path("d"), "other", copy.restarted(power_cut=True)).read()
            directory.apply(numbered.operation)
        done = log.last
        if any(numbered.operation.kind == Kind.SYNC for numbered in found):
            there = Definitions(Path("d"), "other", copy.restarted(power_cut=True)).read()
            assert state(durable(there)) == state(durable(catalog))


def test_all_files_of_definitions_are_known_by_name(tmp_path: Path) -> None:
    definitions = Definitions(tmp_path, "boot")
    write(definitions, definitions.load(), [VhostPut("/")])
    definitions.complete()
    assert all(is_of_definitions(name) for name in os.listdir(tmp_path))
    assert not any(map(is_of_definitions, ("shard-00", "aside", "x/vhosts.json", "cluster.json")))


def durable(catalog: Catalog) -> Catalog:
    """Return what of a catalog outlives the broker."""
    log = OperationLog()
    files = FaultyFiles()
    definitions = Definitions(Path("d"), "one", replicated(files, "d", log))
    empty = definitions.load()
    write(definitions, empty, list(catalog.changes()))
    definitions.close()
    return Definitions(Path("d"), "another", files).read()


def tree(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


@pytest.mark.row("K6")
@pytest.mark.parametrize("seed", range(30))
def test_a_comparison_while_files_change_ends_with_equal_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Contents are read later than names, piece by piece; the operations since make up for it."""
    monkeypatch.setattr(operations, "PIECE_BYTES", 256)
    rng, log = random.Random(seed), OperationLog()
    root = tmp_path / "leader"
    files = replicated(OsFiles(), str(root), log)
    files.make_directory(str(root))
    follower = tmp_path / "follower"
    directory = CopiedDirectory(OsFiles(), str(follower))
    for name in ("a", "b", "x/y", "x/z/z", "old"):
        path = follower / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(700))
    handles: list[int] = []

    def change(count: int) -> None:
        for _ in range(count):
            on_disk(rng, files, str(root), handles)

    change(40)
    for name in ("a", "b"):  # some of it is the same
        if (root / name).is_file():
            (follower / name).write_bytes((root / name).read_bytes()[:600])
    snapshot = files.snapshot()
    change(rng.randrange(30))
    listed = []
    for path, handle in snapshot.files:
        size = files.size(handle)
        change(rng.randrange(4))
        listed.append(FileSums(path, size, digests_of(files, handle, size)))
    wanted = directory.compare(snapshot.folders, listed)
    sizes = {file.path: file.size for file in listed}
    for path, numbers in wanted:
        for number in numbers:
            change(rng.randrange(3))
            at = number * 256
            data = files.read_snapshot(dict(snapshot.files)[path], min(256, sizes[path] - at), at)
            directory.write_piece(path, at, data)
    files.close_snapshot(snapshot)
    change(5)
    for numbered in log.after(snapshot.at, EVER) or []:
        directory.apply(numbered.operation)
    directory.sync_all()
    assert tree(follower) == tree(root)
    directory.close()
    for handle in handles:
        files.close(handle)


@pytest.mark.row("K6")
def test_only_pieces_that_differ_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "PIECE_BYTES", 256)
    disk, contents = OsFiles(), {"same": b"s" * 700, "other": b"o" * 700, "longer": b"l" * 700}
    leader, follower = tmp_path / "leader", tmp_path / "follower"
    for root in (leader, follower):
        root.mkdir()
        for name, content in contents.items():
            (root / name).write_bytes(content)
    (follower / "other").write_bytes(b"o" * 300 + b"x" + b"o" * 399)
    (follower / "longer").write_bytes(b"l" * 600)
    (leader / "new").write_bytes(b"n")
    (follower / "old").write_bytes(b"o")
    listed = []
    for path in sorted(leader.iterdir()):
        handle = disk.open(str(path), read_only=True)
        size = disk.size(handle)
        listed.append(FileSums(path.name, size, digests_of(disk, handle, size)))
        disk.close(handle)
    directory = CopiedDirectory(disk, str(follower))
    assert directory.compare([], listed) == [("longer", [2]), ("new", [0]), ("other", [1])]
    assert not (follower / "old").exists()
    directory.close()


CHANGES = {
    "rename": [
        Operation(Kind.RENAME, "x/msgs.1", other="x/spare.7"),
        Operation(Kind.WRITE, "x/spare.7", 100, b"new"),
        Operation(Kind.RENAME, "x/spare.7", other="x/msgs.9"),
    ],
    "write": [Operation(Kind.SYNC, "x/msgs.1"), Operation(Kind.WRITE, "x/msgs.1", 690, b"n" * 20)],
    "allocate": [Operation(Kind.ALLOCATE, "x/msgs.1", 2000)],
    "truncate": [Operation(Kind.CREATE, "x/msgs.1"), Operation(Kind.TRUNCATE, "x/msgs.1", 300)],
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_what_a_snapshot_has_linked_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[Operation]
) -> None:
    monkeypatch.setattr(operations, "PIECE_BYTES", 256)
    data = random.Random(1).randbytes(700)
    linked, plain, snapshot = tmp_path / "linked", tmp_path / "plain", tmp_path / "snapshot"
    for root in (linked, plain):
        (root / "x").mkdir(parents=True)
        (root / "x" / "msgs.1").write_bytes(data)
        (root / "x" / "msgs.2").write_bytes(data)
    snapshot.mkdir()
    for name in ("msgs.1", "msgs.2"):
        os.link(linked / "x" / name, snapshot / name)
    for root in (linked, plain):
        directory = CopiedDirectory(OsFiles(), str(root))
        for change in changes:
            directory.apply(change)
        directory.sync_all()
        directory.close()
    assert tree(linked) == tree(plain) != tree(snapshot)
    assert tree(snapshot) == {"msgs.1": data, "msgs.2": data}
    assert (linked / "x" / "msgs.2").samefile(snapshot / "msgs.2")  # nothing has changed it


@pytest.mark.parametrize("size", [600, 700, 800])
def test_a_comparison_does_not_change_what_a_snapshot_has_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(operations, "PIECE_BYTES", 256)
    root, snapshot, disk = tmp_path / "d", tmp_path / "snapshot", OsFiles()
    root.mkdir()
    snapshot.mkdir()
    old = random.Random(1).randbytes(700)
    new = old[:300] + b"new" + old[303:]
    new = (new + bytes(100))[:size]
    (tmp_path / "new").write_bytes(new)
    for name in ("same", "other", "gone"):
        (root / name).write_bytes(old)
        os.link(root / name, snapshot / name)
    listed = []
    for name, path in (("same", root / "same"), ("other", tmp_path / "new")):
        handle = disk.open(str(path), read_only=True)
        digests = digests_of(disk, handle, disk.size(handle))
        listed.append(FileSums(name, disk.size(handle), digests))
        disk.close(handle)
    directory = CopiedDirectory(disk, str(root))
    ((path, pieces),) = directory.compare([], listed)
    assert (path, pieces) == ("other", [1, 2, 3] if size > 700 else [1])
    for piece in pieces:
        directory.write_piece(path, piece * 256, new[piece * 256 : (piece + 1) * 256])
    directory.close()
    assert tree(root) == {"same": old, "other": new}
    assert tree(snapshot) == {"same": old, "other": old, "gone": old}
    assert (root / "same").samefile(snapshot / "same")


def lead_now_and_then(seed: int) -> bool:
    """Play a history with snapshots; return whether all of them, and the copy, are as they were."""
    rng, log = random.Random(seed), OperationLog()
    leader, copy = FaultyFiles(), FaultyFiles()
    files, directory = replicated(leader, "d", log), CopiedDirectory(copy, "d")
    handles: list[int] = []
    kept: dict[str, bytes] = {}
    for turn in range(4):
        done = log.last
        for _ in range(12):
            act(rng, files, handles)
        for numbered in log.after(done, EVER) or []:
            directory.apply(numbered.operation)
        directory.close()  # this node leads, and makes a snapshot
        for name, inode in list(copy.names.items()):
            if name.startswith("d/") and rng.random() < 0.7:
                copy.names[f"{turn}/{name}"] = inode
                kept[f"{turn}/{name}"] = bytes(inode.data)
        directory = CopiedDirectory(copy, "d")
    found = {name: bytes(inode.data) for name, inode in copy.names.items()}
    return found == kept | {name: bytes(inode.data) for name, inode in leader.names.items()}


def test_snapshots_stay_as_they_are_while_their_node_follows_again(
    pytestconfig: pytest.Config,
) -> None:
    first = random.Random(pytestconfig.option.seed).randrange(1 << 40)
    assert [seed for seed in range(first, first + 100) if not lead_now_and_then(seed)] == []


def test_a_copy_that_changes_what_snapshots_have_is_convicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FaultyFiles, "is_linked", lambda self, handle: False)
    assert not all(lead_now_and_then(seed) for seed in range(100))


class UnsyncedReplacements(FaultyFiles):
    """Does not sync a file that is to replace another."""

    def sync(self, handle: int) -> None:
        if self.handles[handle] is not self.names.get(f"d/{REPLACEMENT}"):
            super().sync(handle)


class UnsyncedNames(FaultyFiles):
    """Does not sync a directory."""

    def sync_directory(self, path: str) -> None:
        if path != "d":
            super().sync_directory(path)


def cut_power(cut: int, seed: int, kind: type[FaultyFiles] = FaultyFiles) -> tuple[bool, bool]:
    """Cut the power while a linked file is replaced and changed.

    Returns whether nothing is lost of what was synced, and whether the power did not fail.
    """
    disk = kind(seed)
    rng = random.Random(seed)
    old, data = rng.randbytes(2000), rng.randbytes(500)
    new = old[:600] + data + old[1100:]
    handle = disk.open("d/a", create=True)
    disk.names["snapshot/a"] = disk.names["d/a"]
    disk.write(handle, old, 0)
    FaultyFiles.sync(disk, handle)
    FaultyFiles.sync_directory(disk, "d")
    directory = CopiedDirectory(disk, "d")
    disk.cut_after, is_synced = cut, False
    with contextlib.suppress(PowerCut):
        directory.apply(Operation(Kind.WRITE, "a", 600, data))
        directory.apply(Operation(Kind.SYNC, "a"))
        is_synced = True
    after = disk.restarted(power_cut=True)
    CopiedDirectory(after, "d")
    assert after.names.keys() == {"d/a", "snapshot/a"}
    found = after.names["d/a"].data
    is_whole = found == new if is_synced else found[:600] + found[1100:] == old[:600] + old[1100:]
    return is_whole and after.names["snapshot/a"].data == old, is_synced


def test_a_power_cut_leaves_all_that_was_synced_of_a_linked_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "PIECE_BYTES", 768)
    results = {cut: [cut_power(cut, seed) for seed in range(20)] for cut in range(12)}
    assert all(is_whole for found in results.values() for is_whole, _ in found)
    assert not results[0][0][1] and results[11][0][1]  # all moments have been tried


@pytest.mark.parametrize("kind", [UnsyncedReplacements, UnsyncedNames])
def test_a_replacement_that_is_not_synced_is_convicted(kind: type[FaultyFiles]) -> None:
    assert not all(cut_power(cut, seed, kind)[0] for cut in range(12) for seed in range(20))


def test_a_full_disk_leaves_a_linked_file_as_it_is() -> None:
    disk = FaultyFiles()
    handle = disk.open("d/a", create=True)
    disk.names["snapshot/a"] = disk.names["d/a"]
    disk.write(handle, b"a" * 700, 0)
    directory = CopiedDirectory(disk, "d")
    disk.fill()
    with pytest.raises(OSError, match="full on purpose"):
        directory.apply(Operation(Kind.WRITE, "a", 0, b"b"))
    assert {name: bytes(inode.data) for name, inode in disk.names.items()} == {
        "d/a": b"a" * 700, "snapshot/a": b"a" * 700
    }  # fmt: skip
    disk.free()
    directory.apply(Operation(Kind.WRITE, "a", 0, b"b"))
    assert disk.names["d/a"].data[:2] == b"ba" and disk.names["snapshot/a"].data[:2] == b"aa"


def test_a_file_is_asked_for_links_once_while_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(FaultyFiles, "is_linked", lambda self, handle: bool(asked.append(handle)))
    directory = CopiedDirectory(FaultyFiles(), "d")
    directory.apply(Operation(Kind.CREATE, "a"))
    for number in range(100):
        directory.apply(Operation(Kind.WRITE, "a", number, b"a"))
        directory.apply(Operation(Kind.SYNC, "a"))
    assert len(asked) == 1
    directory.apply(Operation(Kind.RENAME, "a", other="b"))
    for number in range(100):
        directory.apply(Operation(Kind.TRUNCATE, "b", number))
    assert len(asked) == 2


def on_disk(rng: random.Random, files: ReplicatedFiles, root: str, handles: list[int]) -> None:
    folder = rng.choice(["", "", "x/", "x/z/"])
    name, other = (f"{root}/{folder}{rng.choice('abc')}" for _ in range(2))
    handle = rng.choice(handles) if handles else None
    with contextlib.suppress(OSError):
        match rng.choice("oowwwtsrxumnc"):
            case "o":
                handles.append(files.open(name, create=True))
            case "w" if handle is not None:
                files.write(handle, rng.randbytes(rng.randrange(1, 600)), rng.randrange(900))
            case "t" if handle is not None:
                files.truncate(handle, rng.randrange(900))
            case "s" if handle is not None:
                files.sync(handle)
            case "r" if name != other:
                files.rename(name, other)
            case "x" if name != other:
                files.exchange(name, other)
            case "u":
                files.remove(name)
            case "m":
                files.make_directory(f"{root}/{rng.choice(['x', 'x/z'])}")
            case "n":
                files.rename(f"{root}/x", f"{root}/moved")
            case "c" if handle is not None:
                handles.remove(handle)
                files.close(handle)


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", ".", "a/.", "a\0b", "x" * 2000]
)
def test_no_path_leads_out_of_the_directory(tmp_path: Path, path: str) -> None:
    directory = CopiedDirectory(OsFiles(), str(tmp_path / "d"))
    for operation in (
        Operation(Kind.CREATE, path), Operation(Kind.REMOVE, path),
        Operation(Kind.RENAME, "a", other=path), Operation(Kind.MAKE_DIRECTORY, path),
    ):  # fmt: skip
        with pytest.raises(NoPath):
            directory.apply(operation)
    with pytest.raises(NoPath):
        directory.compare([], [FileSums(path, 0, [])])


def test_links_are_not_followed(tmp_path: Path) -> None:
    directory = CopiedDirectory(OsFiles(), str(tmp_path / "d"))
    (tmp_path / "secret").write_bytes(b"s")
    os.symlink(tmp_path / "secret", tmp_path / "d" / "file")
    os.symlink(tmp_path, tmp_path / "d" / "folder")
    for operation in (
        Operation(Kind.CREATE, "file"), Operation(Kind.CREATE, "folder/new"),
        Operation(Kind.REMOVE, "folder/secret"),
    ):  # fmt: skip
        with pytest.raises(NoPath, match="is a link"):
            directory.apply(operation)


def test_what_does_not_belong_to_the_copy_is_neither_sent_nor_taken_nor_removed(
    tmp_path: Path,
) -> None:
    def belongs(path: str) -> bool:
        return path.startswith("mine")

    log, confirmations = OperationLog(), Confirmations()
    root = tmp_path / "leader"
    root.mkdir()
    news = SyncNews(lambda *_: None, lambda: None, lambda _: None)
    files = ReplicatedFiles(OsFiles(), str(root), log, confirmations, news, belongs)
    handle = files.open(str(root / "other"), create=True)
    files.write(handle, b"x", 0)
    files.sync(handle)
    files.close(handle)
    assert log.last == Position(0, 0)
    follower = tmp_path / "follower"
    directory = CopiedDirectory(OsFiles(), str(follower), belongs)
    (follower / "shard-00").mkdir()
    (follower / "shard-00" / "msgs").write_bytes(b"m")
    (follower / "mine.old").write_bytes(b"m")
    with pytest.raises(NoPath, match="not part of the copy"):
        directory.apply(Operation(Kind.REMOVE, "shard-00/msgs"))
    directory.compare([], [])
    assert {path.name for path in follower.iterdir()} == {"shard-00"}


def test_the_log_keeps_the_last_operations_and_says_when_others_are_gone() -> None:
    log = OperationLog(bytes_max=10_000)
    log.begin_term(3, knows_base=False)
    for number in range(1, 201):
        assert log.append(Operation(Kind.WRITE, "a", 0, bytes(36))) == number
    assert log.last == Position(3, 200) and log.oldest == Position(3, 100)
    assert log.after(Position(3, 99), EVER) is None
    found = log.after(Position(3, 100), EVER)
    assert found is not None and [each.at.number for each in found] == list(range(101, 201))
    log.begin_term(4, knows_base=True)
    log.append(Operation(Kind.SYNC_ALL))
    found = log.after(Position(3, 198), EVER)
    assert found is not None and [each.at for each in found] == [Position(3, 199), Position(3, 200)]
    found = log.after(Position(3, 200), EVER)
    assert found is not None and [each.at for each in found] == [Position(4, 1)]


def test_operations_that_are_gone_take_no_memory() -> None:
    log = OperationLog(bytes_max=1 << 20)
    log.begin_term(3, knows_base=False)
    datas = [bytes(1 << 18) for _ in range(10)]
    for data in datas:
        log.append(Operation(Kind.WRITE, "a", 0, data))
    del data
    held = [sys.getrefcount(data) for data in datas]
    assert held[:7] == [held[0]] * 7 and held[7:] == [held[0] + 1] * 3
