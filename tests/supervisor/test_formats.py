"""A data directory of a later version is refused by name, and nothing is touched."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmq.broker.controller.stored import definitions, records
from shardmq.shardd.store.format import acks, manifest, producers_file, segment_file
from shardmq.shardd.store.format.record import crc32c
from shardmq.shardd.store.segments import recovery, returns
from shardmq.shardd.store.streams import positions
from shardmq.shardd.store.streams import segment as stream_segment
from shardmq.supervisor import formats
from shardmq.supervisor.config import ConfigError
from shardmq.supervisor.directories import DataDirectory

SOURCE = Path(__file__).parents[2]
STORE = SOURCE / "tests" / "store" / "formats" / "v1"
STREAM = SOURCE / "tests" / "store" / "stream_formats" / "v1"
LATER = 99


def begun(magic: bytes, rest: bytes) -> bytes:
    """Return a file of a later format whose checksum covers `rest`."""
    return struct.pack("<8sII", magic, LATER, crc32c(rest, LATER)) + rest


def definitions_log(path: Path) -> None:
    made = definitions.Definitions(path.parent, "boot")
    made.load()
    made.close()
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 8, LATER)
    path.write_bytes(data)


def written(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


ONE_STORE = "shard-00/" + "ab" * 20
# One file of each format, as a later version would begin it.
FILES: dict[str, Callable[[Path], None]] = {
    "VERSION": written(b'{"version": 99, "shards": []}'),
    "definitions.amqp": definitions_log,
    f"{ONE_STORE}/msgs.0000000007": written(
        begun(segment_file.MESSAGES_MAGIC, bytes(48)) + bytes(4096)
    ),
    f"{ONE_STORE}/spare.0000000001": written(
        begun(segment_file.MESSAGES_MAGIC, bytes(48)) + bytes(4096)
    ),
    f"{ONE_STORE}/index.0000000007": written(begun(segment_file.INDEX_MAGIC, bytes(999))),
    f"{ONE_STORE}/acks.0000000007": written(begun(acks.MAGIC, bytes(16)) + bytes(100)),
    f"{ONE_STORE}/state": written(begun(recovery.STATE_MAGIC, bytes(30))),
    f"{ONE_STORE}/producers": written(begun(producers_file.MAGIC, b"") + b"more"),
    f"{ONE_STORE}/returns": written(begun(returns.MAGIC, b"") + b"more"),
    f"{ONE_STORE}/stream.5/log.00000000000000000000": written(
        begun(stream_segment.MAGIC, bytes(48)) + bytes(4096)
    ),
    f"{ONE_STORE}/stream.5/index.00000000000000000000": written(
        begun(stream_segment.INDEX_MAGIC, bytes(80))
    ),
    f"{ONE_STORE}/stream.5/positions": written(begun(positions.MAGIC, bytes(16)) + b"more"),
    f"{ONE_STORE}/stream.5/producers": written(begun(producers_file.MAGIC, b"") + b"more"),
}


def snapshot(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("file", FILES)
def test_each_file_of_a_later_version_is_named_with_both_versions_and_nothing_is_touched(
    tmp_path: Path, file: str
) -> None:
    path = tmp_path / "data" / file
    path.parent.mkdir(parents=True)
    FILES[file](path)
    before = snapshot(tmp_path)
    start = [sys.executable, "-m", "shardmq.supervisor", "--data-dir", str(tmp_path / "data"),
             "--bind", "127.0.0.1",
             "--amqp-port", "0", "--http-port", "0", "--metrics-port", "0", "--shards",
             "1"]  # fmt: skip
    done = subprocess.run(start, cwd=SOURCE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert f"{path}: written by a later version" in done.stderr
    assert " 99, this program knows up to " in done.stderr
    assert snapshot(tmp_path) == before


def test_the_latest_formats_are_those_of_the_modules_that_write_them() -> None:
    assert {magic: kind.latest for magic, kind in formats.KINDS.items()} == {
        segment_file.MESSAGES_MAGIC: segment_file.MERGED_FORMAT,
        segment_file.INDEX_MAGIC: segment_file.FORMAT,
        acks.MAGIC: acks.FORMAT,
        recovery.STATE_MAGIC: segment_file.FORMAT,
        producers_file.MAGIC: producers_file.FORMAT,
        returns.MAGIC: returns.FORMAT,
        manifest.MAGIC: manifest.FORMAT,
        stream_segment.MAGIC: stream_segment.FORMAT,
        stream_segment.INDEX_MAGIC: stream_segment.FORMAT,
        positions.MAGIC: positions.FORMAT,
        records.MAGIC: records.CATALOG.most,
    }


def test_every_file_a_broker_writes_today_is_understood_and_has_a_known_head(
    tmp_path: Path,
) -> None:
    (tmp_path / "shard-00" / "ab").mkdir(parents=True)
    shutil.copytree(STORE, tmp_path / "shard-00" / "ab", dirs_exist_ok=True)
    shutil.copytree(STREAM, tmp_path / "shard-00" / "ab" / "stream.3")
    assert formats.check(tmp_path) == {}
    for path in (tmp_path / "shard-00").rglob("*"):
        if path.is_file() and path.suffix not in (".json", ".py"):
            assert path.read_bytes()[:8] in formats.KINDS, path


@pytest.mark.parametrize("file", [name for name in FILES if name.startswith(ONE_STORE)])
def test_a_damaged_number_is_not_taken_for_a_later_version(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    FILES[file](path)
    data = bytearray(path.read_bytes())
    data[9] ^= 1  # the number alone: the checksum no longer fits
    path.write_bytes(data)
    formats.check(tmp_path)


def test_the_checksum_is_that_of_the_stores() -> None:
    for size in (0, 1, 7, 48, 999):
        data = zlib.compress(bytes(range(256)) * 9)[:size]
        assert formats.crc32c(data, LATER) == crc32c(data, LATER)


def test_a_directory_without_a_version_is_taken_and_given_one(tmp_path: Path) -> None:
    (tmp_path / "shard-00").mkdir()
    directory = DataDirectory(tmp_path)
    directory.open()
    directory.write_version()
    directory.close()
    assert json.loads((tmp_path / "VERSION").read_text()) == {
        "version": formats.VERSION,
        "shards": [0],
    }


NO_VERSION_FILE = "this is not the VERSION file of a data directory"
WRONG_VERSION = "version must be a number of a version"
WRONG_SHARDS = "shards must be a list of numbers of shards"
BROKEN_VERSIONS: list[tuple[str, str]] = [
    ("", NO_VERSION_FILE),
    ("[]", NO_VERSION_FILE),
    ("{}", NO_VERSION_FILE),
    ("null", NO_VERSION_FILE),
    ("[" * 100_000, NO_VERSION_FILE),
    ('{"version": 1', NO_VERSION_FILE),
    ('{"version": "x"}', f'{WRONG_VERSION}, not "x"'),
    ('{"version": "1"}', f'{WRONG_VERSION}, not "1"'),
    ('{"version": null}', f"{WRONG_VERSION}, not null"),
    ('{"version": true}', f"{WRONG_VERSION}, not true"),
    ('{"version": 1.5}', f"{WRONG_VERSION}, not 1.5"),
    ('{"version": [1]}', f"{WRONG_VERSION}, not [1]"),
    ('{"version": 0}', f"{WRONG_VERSION}, not 0"),
    ('{"version": -1}', f"{WRONG_VERSION}, not -1"),
    ('{"version": 1, "shards": null}', f"{WRONG_SHARDS}, not null"),
    ('{"version": 1, "shards": 3}', f"{WRONG_SHARDS}, not 3"),
    ('{"version": 1, "shards": "01"}', f'{WRONG_SHARDS}, not "01"'),
    ('{"version": 1, "shards": {"0": 1}}', f"{WRONG_SHARDS}, not {{"),
    ('{"version": 1, "shards": ["0"]}', f"{WRONG_SHARDS}, not ["),
    ('{"version": 1, "shards": [null]}', f"{WRONG_SHARDS}, not [null]"),
    ('{"version": 1, "shards": [true]}', f"{WRONG_SHARDS}, not [true]"),
    ('{"version": 1, "shards": [[0]]}', f"{WRONG_SHARDS}, not [[0]]"),
    ('{"version": 1, "shards": [-1]}', f"{WRONG_SHARDS}, not [-1]"),
    ('{"version": 1, "shards": [0, 0.5]}', f"{WRONG_SHARDS}, not [0, 0.5]"),
    ('{"version": 1, "shards": "%s"}' % ("x" * 999), f"{WRONG_SHARDS}, not "),
]


@pytest.mark.parametrize(("text", "why"), BROKEN_VERSIONS, ids=range(len(BROKEN_VERSIONS)))
def test_a_version_that_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, text: str, why: str
) -> None:
    (tmp_path / "VERSION").write_text(text)
    with pytest.raises(ConfigError) as refused:
        DataDirectory(tmp_path).open()
    said = str(refused.value)
    assert said.startswith(f"data_dir: {tmp_path}/VERSION: {why}")
    assert "\n" not in said and len(said) < len(str(tmp_path)) + 200


def test_a_start_on_a_broken_version_ends_with_one_line_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "VERSION").write_text('{"version": 1, "shards": null}')
    start = [
        sys.executable,
        "-m",
        "shardmq.supervisor",
        "--data-dir",
        str(tmp_path),
        "--bind",
        "127.0.0.1",
    ]
    done = subprocess.run(start, cwd=SOURCE, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and WRONG_SHARDS in done.stderr
    assert (tmp_path / "VERSION").read_text() == '{"version": 1, "shards": null}'


def test_a_shard_whose_directory_is_missing_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    for shard in (0, 1):
        (tmp_path / f"shard-0{shard}").mkdir()
    directory = DataDirectory(tmp_path)
    directory.open()
    directory.write_version()
    directory.close()
    (tmp_path / "shard-00").rmdir()
    with pytest.raises(
        ConfigError, match=r"shard-00 is missing.*put it back, or take 0 out of .*VERSION"
    ):
        DataDirectory(tmp_path).open()


def test_a_folder_that_may_not_be_looked_into_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume has one of root's: lost+found."""
    (tmp_path / "lost+found").mkdir()
    look = os.scandir

    def scandir(path: Path) -> Any:
        if Path(path).name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied")
        return look(path)

    monkeypatch.setattr(formats.os, "scandir", scandir)
    formats.check(tmp_path)
