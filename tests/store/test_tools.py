"""Test the tools for files of a stopped broker; they keep off a running one."""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import re
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.store.errors import StoreFailed
from shardmq.shardd.store.format.record import crc32c
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.store.streams import StreamLog
from shardmq.shardd.store.tools.__main__ import main
from shardmq.shardd.store.tools.salvage import salvage
from tests.reference.record import Record, encode_message, split_messages
from tests.support.faulty_files import FaultyFiles
from tests.support.store_history import DIRECTORY, History

Output = pytest.CaptureFixture[str]
TARGET = "salvaged"


def one(number: int, *queues: int) -> bytes:
    message = encode_message(b"body %d" % number * 40, b"ex", b"%d" % number)
    return Record(queues or (1,), (message,), 5, 1000 if number % 2 else 0xFFFFFFFF).encode()


def made(directory: Path) -> array[int]:
    """Twenty messages in two segments, two of them settled, the third delivered before."""
    store = SegmentStore(str(directory), segment_bytes=4096)
    store.recover([1])
    entries = store.append(b"".join(one(number) for number in range(20)))[0].entries
    store.flush()
    store.settle(1, entries[:2], True)
    entries[2] |= 1
    store.close({1: entries[2:]})
    return entries


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_good_store_is_counted_told_and_dumped_message_by_message(
    tmp_path: Path, capsys: Output
) -> None:
    entries = made(tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    assert (
        capsys.readouterr().out
        == ".: 2 segments, 20 records, 20 messages, 18 of them not settled\n"
    )
    assert main(["stats", str(tmp_path)]) == 0
    told = lines(capsys.readouterr().out)
    assert [line.get("file", line.get("store")) for line in told] == [
        "msgs.0000000001",
        "msgs.0000000002",
        ".",
    ]
    assert [line["dead_messages"] for line in told] == [2, 0, 2]
    assert [line.get("segments") for line in told] == [None, None, 2]
    for count in ("live_messages", "live_bytes", "dead_bytes", "file_bytes"):
        first, second, total = (int(str(line[count])) for line in told)
        assert first + second == total > 0
    assert told[2]["live_messages"] == 18
    assert main(["dump", str(tmp_path)]) == 0
    told = lines(capsys.readouterr().out)
    assert [line["routing_key"] for line in told] == [str(number) for number in range(2, 20)]
    assert [(line["segment"], line["position"]) for line in told] == [
        (entry >> 32, (entry & 0xFFFFFFFF) >> 4) for entry in entries[2:]
    ]
    assert told[1] | {"segment": 0, "position": 0} == {
        "segment": 0,
        "position": 0,
        "queues": [1],
        "timestamp": 5,
        "ttl_ms": 1000,
        "priority": None,
        "persistent": True,
        "exchange": "ex",
        "routing_key": "3",
        "properties_base64": base64.b64encode(b"\0\0").decode(),
        "body_bytes": 240,
        "body_base64": base64.b64encode(b"body 3" * 40).decode(),
    }


def test_damage_is_told_by_file_and_byte_range_and_all_else_is_salvaged(
    tmp_path: Path, capsys: Output
) -> None:
    entries = made(tmp_path / "s")
    position = (entries[5] & 0xFFFFFFFF) >> 4
    with open(tmp_path / "s/msgs.0000000001", "r+b") as file:
        file.seek(position + 50)
        file.write(b"?")
    before = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    assert main(["verify", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("s/msgs.0000000001: corrupt, bytes ")
    # It is there.
    start, stop = map(int, re.search(r"bytes (\d+) to (\d+) ", told).groups())  # type: ignore[union-attr]
    assert start < position < stop
    assert main(["salvage", str(tmp_path / "s"), str(tmp_path / "new")]) == 1
    output = capsys.readouterr()
    assert (
        "17 messages copied" in output.out
        and f"2 settled, {stop - start} unreadable bytes" in output.out
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()} == before, (
        "only read"
    )
    assert main(["verify", str(tmp_path / "new")]) == 0
    store = SegmentStore(str(tmp_path / "new"))
    found = store.recover([1])[1].entries
    keys = [
        message[12 : message.index(b"\0\0body")]
        for message in split_messages(store.read(found, 1 << 20)[0])
    ]
    assert keys == [b"%d" % number for number in range(2, 20) if number != 5]
    assert [entry & 15 for entry in found] == [1] + [0] * 16, (
        "the redelivered flag stays with its message"
    )


def test_a_torn_acks_file_and_a_lost_header_are_told(tmp_path: Path, capsys: Output) -> None:
    made(tmp_path)
    size = (tmp_path / "acks.0000000001").stat().st_size
    with open(tmp_path / "acks.0000000001", "ab") as file:
        file.write(b"torn")
    with open(tmp_path / "msgs.0000000002", "r+b") as file:
        file.write(b"?")
    (tmp_path / "index.0000000002").unlink()
    assert main(["verify", str(tmp_path)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert [line.rpartition(":")[0] for line in told] == [
        f"acks.0000000001: torn, bytes {size} to {size + 4} (4 bytes)",
        "msgs.0000000002: header, bytes 0 to 4096 (4096 bytes)",
    ]


class BadSector(FaultyFiles):
    bad = range(0)

    def read_into(self, handle: int, target: memoryview, position: int) -> int:
        if (
            position < self.bad.stop
            and position + len(target) > self.bad.start
            and self.is_message_file(handle)
        ):
            raise OSError(errno.EIO, "a bad sector")
        return super().read_into(handle, target, position)

    def read_pieces(self, handle: int, size: int, positions: list[int]) -> list[bytes]:
        for position in positions:
            self.read_into(handle, memoryview(bytearray(size)), position)
        return super().read_pieces(handle, size, positions)

    def is_message_file(self, handle: int) -> bool:
        return any(
            self.names[name] is self.handles[handle] for name in self.names if "msgs." in name
        )


def test_where_the_disk_cannot_be_read_a_start_refuses_and_salvage_rescues_the_rest() -> None:
    files = BadSector()
    store = SegmentStore("d", files=files, segment_bytes=1 << 16)
    store.recover([1])
    entries = store.append(b"".join(one(number) for number in range(100)))[0].entries
    store.flush()
    store.close(None)
    files.bad = range(9000, 9100)
    for name in [name for name in files.names if "index." in name]:
        del files.names[name]
    with pytest.raises(StoreFailed, match="a bad sector"):
        SegmentStore("d", files=files, segment_bytes=1 << 16).recover([1])
    outcome = salvage(files, "d", "new")
    touched = [
        n for n, entry in enumerate(entries) if 8192 - 400 < (entry & 0xFFFFFFFF) >> 4 < 12288
    ]
    assert [(one.what, one.start, one.stop) for one in outcome.damage[:1]] == [
        ("unreadable", 8192, 12288)
    ]
    assert 100 - len(touched) <= outcome.messages < 100
    store = SegmentStore("new", files=files, segment_bytes=1 << 16)
    assert len(store.recover([1])[1].entries) == outcome.messages


def test_a_header_that_the_index_can_tell_is_told_as_no_loss(
    tmp_path: Path, capsys: Output
) -> None:
    made(tmp_path / "s")
    with open(tmp_path / "s/msgs.0000000002", "r+b") as file:
        file.write(b"?")
    assert main(["verify", str(tmp_path / "s")]) == 1
    output = capsys.readouterr()
    assert "msgs.0000000002: mendable, bytes 0 to 64 " in output.err
    assert "20 messages, 18 of them not settled" in output.out
    assert main(["salvage", str(tmp_path / "s"), str(tmp_path / "new")]) == 1
    assert "18 messages copied" in capsys.readouterr().out


def test_nothing_is_touched_while_a_broker_holds_the_data_directory(
    tmp_path: Path, capsys: Output
) -> None:
    store = tmp_path / "shard-00" / "vhost"
    made(store)
    lock = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    os.write(lock, b"4711\n")
    fcntl.flock(lock, fcntl.LOCK_EX)
    for arguments in (
        ["verify", str(store)],
        ["dump", str(tmp_path)],
        ["salvage", str(store), str(tmp_path / "new")],
    ):
        assert main(arguments) == 2
        assert "pid 4711" in capsys.readouterr().err
    os.close(lock)
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("shard-00/vhost: 2 segments")


@pytest.mark.parametrize(
    "arguments", [[], ["verify"], ["polish", "x"], ["salvage", "x"], ["verify", "/nowhere"]]
)
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    assert main(arguments) == 2


def test_where_there_is_no_store_verify_does_not_say_good(tmp_path: Path) -> None:
    (tmp_path / "shard-00").mkdir()
    assert main(["verify", str(tmp_path)]) == 2


def test_what_a_power_cut_left_of_a_merged_segment_is_not_counted_twice(
    tmp_path: Path, capsys: Output
) -> None:
    golden = Path(__file__).parent / "formats" / "v2"
    assert main(["verify", str(golden)]) == 0
    assert main(["dump", str(golden)]) == 0
    expected = json.loads((golden / "expected.json").read_text())
    told = lines(capsys.readouterr().out.partition("\n")[2])
    assert sum(len(list(line["queues"])) for line in told) == sum(map(len, expected.values()))  # type: ignore[call-overload]


def test_salvage_overwrites_nothing(tmp_path: Path) -> None:
    made(tmp_path / "s")
    made(tmp_path / "t")
    assert main(["salvage", str(tmp_path / "s"), str(tmp_path / "t")]) == 2
    assert main(["salvage", str(tmp_path / "s"), str(tmp_path / "s/new")]) == 2


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from(["stop", "kill", "power cut"]))
def test_salvage_finds_what_a_recovery_finds_in_the_same_order(seed: int, end: str) -> None:
    history = History(seed)
    history.play(60)
    if end == "stop":
        history.stop_cleanly()
        history.store.close(
            {queue: array("Q", history.queues[queue].live.values()) for queue in history.durable()}
        )
    history.files = history.files.restarted(power_cut=end == "power cut")
    outcome = salvage(history.files, DIRECTORY, TARGET)
    expected = contents_of(history, DIRECTORY)
    assert contents_of(history, TARGET) == expected
    assert outcome.references == sum(map(len, expected.values()))


def contents_of(history: History, directory: str) -> dict[int, list[tuple[bytes, int, int, int]]]:
    """Per queue, also those deleted since: message, redelivered, expiry and priority, timestamp."""
    store = SegmentStore(
        directory, files=history.files, segment_bytes=3 << 20 if directory == TARGET else 4096
    )
    found = {}
    for queue, arrival in store.recover(range(1, 2000), timed=range(1, 2000)).items():
        messages = split_messages(store.read(arrival.entries, 1 << 40)[0])
        flags = [entry & 15 for entry in arrival.entries]
        facts = arrival.facts or [0] * len(messages)
        found[queue] = list(zip(messages, flags, facts, arrival.times or (), strict=True))
    return found


def a_stream(directory: Path, count: int = 30) -> None:
    log = StreamLog(str(directory), segment_bytes=4096)
    log.recover()
    for number in range(count):
        log.append(one(number))
    log.positions.set(b"audit", 3)
    log.close()


def test_a_stream_is_counted_told_and_dumped_offset_by_offset(
    tmp_path: Path, capsys: Output
) -> None:
    store = tmp_path / "shard-00" / "vhost"
    made(store)
    a_stream(store / "stream-7")
    assert main(["verify", str(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("shard-00/vhost: 2 segments")
    assert (
        told[1]
        == "shard-00/vhost/stream-7: a stream, 3 segments, 30 chunks, 30 messages, next offset 30"
    )
    assert main(["stats", str(store / "stream-7")]) == 0
    found = lines(capsys.readouterr().out)
    assert found[0]["first_offset"] == 0 and found[-1]["next_offset"] == 30
    assert [line["file"] for line in found] == [
        f"log.{line['first_offset']:020d}" for line in found
    ]
    assert sum(int(str(line["messages"])) for line in found) == 30
    assert main(["dump", str(store / "stream-7")]) == 0
    found = lines(capsys.readouterr().out)
    assert [(line["offset"], line["routing_key"]) for line in found] == [
        (at, str(at)) for at in range(30)
    ]
    assert (
        found[3]["body_base64"] == base64.b64encode(b"body 3" * 40).decode()
        and found[3]["timestamp"] == 5
    )
    assert main(["salvage", str(tmp_path), str(tmp_path) + "-new"]) == 0
    log = StreamLog(str(tmp_path) + "-new/shard-00/vhost/stream-7")
    log.recover()
    assert log.next_offset == 30 and log.positions.get(b"audit") == 3


def test_damage_in_a_stream_is_told_by_file_and_byte_range_and_nothing_is_changed(
    tmp_path: Path, capsys: Output
) -> None:
    a_stream(tmp_path)
    (index, *_) = sorted(tmp_path.glob("index.*"))
    data = bytearray(index.read_bytes())
    data[40] ^= 1  # it says that the segment ends with another offset, and its crc is good
    data[12:16] = crc32c(bytes(data[16:]), 1).to_bytes(4, "little")
    index.write_bytes(data)
    (_, log, *_) = sorted(tmp_path.glob("log.*"))
    with log.open("r+b") as file:
        file.seek(500)
        file.write(b"?")
    (tmp_path / "positions").write_bytes((tmp_path / "positions").read_bytes() + b"torn")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["verify", str(tmp_path)]) == 1
    output = capsys.readouterr()
    told = dict(line.split(": ", 1) for line in output.err.splitlines())
    assert told.keys() == {index.name, log.name, "positions"}
    assert told[index.name].startswith("untrue") and told["positions"].startswith("torn")
    where = told[log.name].removeprefix("corrupt, bytes ").partition(" (")[0]
    start, stop = map(int, where.split(" to "))
    assert start <= 500 < stop and "29 messages" in output.out
    assert main(["dump", str(tmp_path)]) == 1
    assert len(lines(capsys.readouterr().out)) == 29
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
