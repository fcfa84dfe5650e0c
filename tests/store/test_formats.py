"""Files of a former version are read.

Files of a later version are refused by name and left as they were.
"""

from __future__ import annotations

import json
import shutil
import struct
from array import array
from pathlib import Path

import pytest

from shardmq.shardd.store.errors import FormatTooNew
from shardmq.shardd.store.format.record import crc32c
from shardmq.shardd.store.segments import SegmentStore
from tests.reference.record import decode_record, split_messages
from tests.support import golden_store

FORMATS = sorted(path.name for path in (Path(__file__).parent / "formats").iterdir())
# Where what the header's crc covers ends; None: with the file.
HEADERS = {"msgs.0000000002": 64, "index.0000000001": None, "acks.0000000001": 32, "state": None}


def golden(name: str, target: Path) -> str:
    shutil.copytree(Path(__file__).parent / "formats" / name, target)
    return str(target)


def opened(directory: str) -> SegmentStore:
    return SegmentStore(directory, segment_bytes=golden_store.SEGMENT_BYTES)


def messages_of(number: int) -> tuple[bytes, ...]:
    decoded = decode_record(golden_store.record(number), 0)
    assert decoded is not None
    return decoded[0].messages


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("without", ["", "index.*", "state"])
def test_a_directory_of_every_former_format_opens_with_exactly_its_live_messages(
    name: str, without: str, tmp_path: Path
) -> None:
    directory = golden(name, tmp_path / "s")
    expected = {
        int(queue): entries
        for queue, entries in json.loads((tmp_path / "s/expected.json").read_text()).items()
    }
    for path in (tmp_path / "s").glob(without) if without else ():
        path.unlink()
    store = opened(directory)
    found = store.recover(golden_store.QUEUES, timed=golden_store.QUEUES)
    assert store.damage == []
    flags = 1 if without == "state" else 0  # after no clean stop, all may have been delivered
    assert {queue: arrival.entries.tolist() for queue, arrival in found.items()} == {
        queue: [entry | flags for entry in entries] for queue, entries in expected.items()
    }
    published = [split for number in range(40) for split in messages_of(number)]
    for queue, arrival in found.items():
        messages = split_messages(store.read(arrival.entries, 1 << 20)[0])
        assert messages == [one for one in published if one in messages] and len(messages) == len(
            expected[queue]
        )
    store.close({queue: array("Q", arrival.entries) for queue, arrival in found.items()})
    again = opened(directory).recover(golden_store.QUEUES)
    assert {queue: arrival.entries for queue, arrival in again.items()} == {
        queue: arrival.entries for queue, arrival in found.items()
    }


@pytest.mark.parametrize("file", HEADERS)
def test_any_file_of_a_later_format_is_refused_by_name_and_nothing_is_changed(
    file: str, tmp_path: Path
) -> None:
    directory = golden("v1", tmp_path / "s")
    path = tmp_path / "s" / file
    data = bytearray(path.read_bytes())
    struct.pack_into("<II", data, 8, 99, crc32c(bytes(data[16 : HEADERS[file]]), 99))
    path.write_bytes(data)
    before = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    with pytest.raises(FormatTooNew, match=f"{file} has format 99, this program knows up to"):
        opened(directory).recover(golden_store.QUEUES)
    assert {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()} == before
