"""Test files of streams from other versions.

Files of a former version are read. Files of a later version are refused by name and left unchanged.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from shardmq.shardd.store.errors import FormatTooNew
from shardmq.shardd.store.format.record import crc32c
from shardmq.shardd.store.streams import StreamLog, wanted_filters
from tests.reference.record import split_messages
from tests.support import golden_stream

FOLDER = Path(__file__).parent / "stream_formats"
FORMATS = sorted(path.name for path in FOLDER.iterdir())
# Where what the header's crc covers ends; None: with the file.
HEADERS = {
    "log.00000000000000000018": 64,
    "log.00000000000000000072": 64,
    "index.00000000000000000054": None,
    "positions": 32,
}


def opened(directory: Path) -> StreamLog:
    log = StreamLog(str(directory), segment_bytes=golden_stream.SEGMENT_BYTES)
    log.recover()
    return log


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("without", ["", "index.*"])
def test_a_directory_of_every_former_format_opens_with_exactly_its_messages(
    name: str, without: str, tmp_path: Path
) -> None:
    shutil.copytree(FOLDER / name, tmp_path / "s")
    expected = json.loads((tmp_path / "s/expected.json").read_text())
    for path in (tmp_path / "s").glob(without) if without else ():
        path.unlink()
    published = [
        message for number in range(100) for message in golden_stream.batch(number).messages
    ]
    for _ in range(2):
        log = opened(tmp_path / "s")
        assert log.damage == []
        assert (log.first_offset, log.next_offset) == (expected["first"], expected["next"])
        assert {
            key.decode(): offset for key, offset in dict(log.positions.offsets).items()
        } == expected["positions"]
        found = log.read(0, 1 << 20)
        assert split_messages(found.blob) == published[expected["first"] : expected["next"]]
        assert log.find(golden_stream.batch(20).timestamp) == 60
        assert (
            len(log.read(60, 1 << 20, wanted_filters([b"elsewhere"], unfiltered=False)).sizes) == 0
        )
        log.close()


@pytest.mark.parametrize("file", HEADERS)
def test_any_file_of_a_later_format_is_refused_by_name_and_nothing_is_changed(
    file: str, tmp_path: Path
) -> None:
    shutil.copytree(FOLDER / "v1", tmp_path / "s")
    path = tmp_path / "s" / file
    data = bytearray(path.read_bytes())
    struct.pack_into("<II", data, 8, 99, crc32c(bytes(data[16 : HEADERS[file]]), 99))
    path.write_bytes(data)
    before = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    with pytest.raises(FormatTooNew, match=f"{file} has format 99, this program knows up to"):
        opened(tmp_path / "s")
    assert {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()} == before
