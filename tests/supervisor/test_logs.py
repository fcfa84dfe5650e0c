"""What is logged is found again: in the journal by its fields, as JSON line by line; the level can be changed."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor import logs


def record(message: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("shardd.disk", level, "/x/disk.py", 7, message, None, None)


def fields_of(data: bytes) -> dict[str, str]:
    """The journal's native protocol, read as systemd documents it."""
    found = {}
    while data:
        head, _, rest = data.partition(b"\n")
        name, equals, value = head.partition(b"=")
        if not equals:
            (length,) = struct.unpack_from("<Q", rest)
            value, data = rest[8 : 8 + length], rest[8 + length :]
            assert data[:1] == b"\n"
            data = data[1:]
        else:
            data = rest
        found[name.decode()] = value.decode()
    return found


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_out_of_the_journal_as_it_was(text: str) -> None:
    found = fields_of(logs.entry(record("m"), "shard-1", text))
    assert found["MESSAGE"] == text
    assert (found["SHARDMQ_PROCESS"], found["LOGGER"], found["PRIORITY"]) == ("shard-1", "shardd.disk", "4")


@pytest.mark.parametrize(
    ("level", "priority"), [(logging.CRITICAL, "2"), (logging.ERROR, "3"), (logging.INFO, "6"), (logging.DEBUG, "7")]
)
def test_priorities_are_syslogs(level: int, priority: str) -> None:
    assert fields_of(logs.entry(record("m", level), "p", "m"))["PRIORITY"] == priority


@pytest.mark.row("N16")
def test_entries_reach_the_journals_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "socket"))
        logs.JournalHandler("controller", str(tmp_path / "socket")).handle(record("two\nlines"))
        assert fields_of(journal.recv(1 << 16))["MESSAGE"] == "two\nlines"


def test_standard_error_that_is_not_the_journal_any_more_is_seen() -> None:
    mine = os.fstat(2)
    assert logs.is_journal(f"{mine.st_dev}:{mine.st_ino}")
    assert not logs.is_journal(f"{mine.st_dev}:{mine.st_ino + 1}") and not logs.is_journal("")


def run(form: str) -> list[str]:
    program = (
        "import logging; from supervisor import logs\n"
        f"logs.begin('info', '{form}', 'shard-0'); log = logging.getLogger('a.b')\n"
        "log.debug('not yet'); logs.set_level('debug'); log.debug('now %s', 'ü')\n"
        "try: 1 / 0\nexcept ZeroDivisionError: log.exception('failed')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return ended.stderr.splitlines()


@pytest.mark.row("N16")
def test_as_json_each_event_is_a_line_and_the_level_changes_at_once() -> None:
    first, second = map(json.loads, run("json"))
    assert {key: first[key] for key in ("level", "process", "logger", "message")} == {
        "level": "debug", "process": "shard-0", "logger": "a.b", "message": "now ü",
    }  # fmt: skip
    assert "ZeroDivisionError" in second["exception"] and second["time"] >= first["time"]


def test_as_text_a_line_names_process_and_logger() -> None:
    assert run("text")[0].endswith(" DEBUG shard-0 a.b: now ü")
