"""Log lines are found again: in the journal by fields, as JSON line by line.

The level can be changed.

Whatever somebody chose for a name, one event is one line in every format.
"""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.supervisor import logs


def record(message: str, *args: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("shardmq.shardd.disk", level, "/x/disk.py", 7, message, args, None)


def fields_of(data: bytes) -> dict[str, str]:
    """Return the fields of an entry in the journal's native protocol.

    It is parsed as systemd documents it.
    """
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


@given(st.text(st.characters(exclude_categories=["C", "Z"])))
def test_any_text_comes_out_of_the_journal_as_it_was(text: str) -> None:
    found = fields_of(logs.entry(record("%s", text), "shard-1"))
    assert found["MESSAGE"] == text
    assert (found["SHARDMQ_PROCESS"], found["LOGGER"], found["PRIORITY"]) == (
        "shard-1",
        "shardd.disk",
        "4",
    )


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.CRITICAL, "2"), (logging.ERROR, "3"), (logging.INFO, "6"), (logging.DEBUG, "7")],
)
def test_priorities_are_syslogs(level: int, priority: str) -> None:
    assert fields_of(logs.entry(record("m", level=level), "p"))["PRIORITY"] == priority


@pytest.mark.row("N16")
def test_entries_reach_the_journals_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "socket"))
        logs.JournalHandler("controller", str(tmp_path / "socket")).handle(record("two\nlines"))
        assert fields_of(journal.recv(1 << 16))["MESSAGE"] == r"two\nlines"


def test_standard_error_that_is_not_the_journal_any_more_is_seen() -> None:
    mine = os.fstat(2)
    assert logs.is_journal(f"{mine.st_dev}:{mine.st_ino}")
    assert not logs.is_journal(f"{mine.st_dev}:{mine.st_ino + 1}") and not logs.is_journal("")


def run(form: str) -> list[str]:
    program = (
        "import logging; from shardmq.supervisor import logs\n"
        f"logs.begin('info', '{form}', 'shard-0'); log = logging.getLogger('a.b')\n"
        "log.debug('not yet'); logs.set_level('debug'); log.debug('now %s', 'ü')\n"
        "try: 1 / 0\nexcept ZeroDivisionError: log.exception('failed')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
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


@pytest.mark.parametrize("form", ["text", "json"])
def test_loggers_are_named_without_the_name_of_the_package(form: str) -> None:
    event = logging.LogRecord(
        "shardmq.broker.client", logging.INFO, "/x/client.py", 7, "said", (), None
    )
    handler = logs._handler(form, "front-door-0")
    line = handler.format(event)
    assert "broker.client" in line and "shardmq" not in line


# -- what clients name -----------------------------------------------------------------------------

ANYTHING = st.text(st.characters())  # lone surrogates, too: names are read leniently in places
# Line ends of any kind, ESC and other control characters, line and paragraph separators, changes of
# direction.
HOSTILE = st.text(
    st.sampled_from(
        "a\n\r\x1b\x00\x07\x7f\x85\x9b\u2028\u2029\u202e\u2066\u200f\ufeff\ud800\t\x0b\x0c\x1c"
    )
)
NAMES = ANYTHING | HOSTILE


def said(name: str, fault: str | None) -> logging.LogRecord:
    """Return an event with a name that a client chose.

    With `fault` the event has an exception with this text.
    """
    exc_info = None
    if fault is not None:
        try:
            raise ValueError(fault)
        except ValueError:
            exc_info = sys.exc_info()
    return logging.LogRecord(
        "shardmq.broker.client",
        logging.WARNING,
        "/x/client.py",
        7,
        "user '%s'",
        (name,),
        exc_info,
    )


def as_text(event: logging.LogRecord) -> bytes:
    """Return what a process writes to standard error."""
    handler = logs._handler("text", "front-door-0")
    return written(handler, event)


def as_json(event: logging.LogRecord) -> bytes:
    return written(logs._handler("json", "front-door-0"), event)


def written(handler: logging.Handler, event: logging.LogRecord) -> bytes:
    assert isinstance(handler, logging.StreamHandler)
    out = io.BytesIO()
    handler.setStream(stream := io.TextIOWrapper(out, "utf-8"))
    handler.handle(event)
    stream.flush()
    return out.getvalue()


def is_one_line(line: bytes) -> bool:
    """Return whether the text is one line without control characters of terminals or pagers."""
    text = line.decode("utf-8")
    return text.endswith("\n") and not any(
        unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text[:-1]
    )


@given(NAMES, st.none() | NAMES)
def test_an_event_is_one_line_of_text_whatever_clients_name(name: str, fault: str | None) -> None:
    assert is_one_line(as_text(said(name, fault)))


@given(NAMES, st.none() | NAMES)
def test_an_event_is_one_line_of_json_whatever_clients_name(name: str, fault: str | None) -> None:
    line = as_json(said(name, fault))
    assert is_one_line(line)
    event = json.loads(line)
    assert event["message"].isprintable()
    assert all(part.isprintable() for part in event.get("exception", "").split("\n"))
    shown = logs.exception_lines(event.get("exception", ""))
    assert all(part.startswith("    ") and part.isprintable() for part in shown)


@given(NAMES, st.none() | NAMES)
def test_an_event_is_one_entry_of_the_journal_whatever_clients_name(
    name: str, fault: str | None
) -> None:
    found = fields_of(logs.entry(said(name, fault), "front-door-0"))
    assert found["MESSAGE"].isprintable() and found["SHARDMQ_PROCESS"] == "front-door-0"


@given(st.lists(st.tuples(NAMES, st.none() | NAMES), min_size=1, max_size=4))
def test_each_event_that_is_kept_is_a_line_whatever_clients_name(
    events: list[tuple[str, str | None]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept = logs.KeptLines(f"{folder}/log-front-door-0", "front-door-0")
        for name, fault in events:
            kept.handle(said(name, fault))
        kept.close()
        lines = Path(folder, "log-front-door-0").read_bytes().splitlines(keepends=True)
    assert len(lines) == len(events) and all(map(is_one_line, lines))


@given(NAMES)
def test_what_is_printable_is_written_as_it_is(name: str) -> None:
    assert logs.escaped(name).isprintable()
    assert name != logs.escaped(name) or name.isprintable()
    assert not name.isprintable() or name == logs.escaped(name)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\nb", r"a\nb"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\u202egnp", r"\u202egnp"),
        ("\ud800", r"\ud800"),
        ("größe 漢", "größe 漢"),
    ],
)
def test_what_is_not_printable_is_written_as_in_python(name: str, shown: str) -> None:
    assert logs.escaped(name) == shown


def test_a_formatter_that_does_not_escape_is_caught() -> None:
    raw = logging.StreamHandler()
    raw.setFormatter(logging.Formatter("%(message)s"))
    assert not is_one_line(written(raw, said("a\nforged", None)))
    assert not is_one_line(written(raw, said("\x1b[2J", None)))
