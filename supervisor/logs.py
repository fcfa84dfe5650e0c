"""How all processes of the broker log: one line per event to standard error, or an entry with fields to the journal.

A line holds names and values that anybody may have chosen: a user who could not log in, a vhost, a header. So every
character of a message that is not printable (a line break, ESC and other control characters, what turns the direction
of writing) is written as Python writes it in a string, `\\n`, `\\x1b` or `\\u202e`. `escaped` does so for every format:
who logs passes names on as they are. A message is one line in every format, its traceback included.

`auto` is the journal's own protocol where standard error is already connected to it (systemd says so in
JOURNAL_STREAM), else text. An entry of the journal has MESSAGE, PRIORITY, SYSLOG_IDENTIFIER=shardmq, SHARDMQ_PROCESS
and LOGGER, so `journalctl -u shardmq SHARDMQ_PROCESS=shard-0 -p warning` finds what it says. The level can be changed
at any time. Beside that the last lines of each process are kept in the runtime directory, for who asks by HTTP.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import logging.handlers
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from typing import Any, Final

JOURNAL: Final = "/run/systemd/journal/socket"
IDENTIFIER: Final = "shardmq"
ONE_LOGGER: Final = (
    "supervisor",
    "controller",
)  # in lines of text their loggers are not told apart
MESSAGE_BYTES_MAX: Final = 48 << 10  # what one datagram holds on any machine
# syslog's priorities
PRIORITIES: Final = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
)
DEBUG_PRIORITY: Final = 7
KEPT: Final = "log-"  # and the name of the process: files in the runtime directory, lines of JSON
KEPT_BYTES_MAX: Final = 256 << 10  # of a file; the one before it is kept as well
LATE_S: Final = 2.0  # a process may write a line so much later than another one of the same moment


def begin(level: str, form: str, process: str) -> None:
    """Once, at the start of a process. `process`: its name in every line."""
    set_level(level)
    logging.raiseExceptions = (
        False  # a log on a dead disk must not fill what is left of it with tracebacks
    )
    faulthandler.register(signal.SIGUSR1)  # what every thread does just now, to standard error
    logging.getLogger().handlers[:] = [_handler(form, process)]


def keep(runtime_dir: str, process: str) -> logging.Handler:
    """From now on the last lines are in a file as well. They outlive the process: its last words are there."""
    handler = KeptLines(f"{runtime_dir}/{KEPT}{process}", process)
    logging.getLogger().addHandler(handler)
    return handler


def keep_no_more(handler: logging.Handler) -> None:
    logging.getLogger().removeHandler(handler)
    with contextlib.suppress(OSError):  # lines that the disk has refused
        handler.close()


def set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())


def _handler(form: str, process: str) -> logging.Handler:
    if form == "journal" or (form == "auto" and is_journal(os.environ.get("JOURNAL_STREAM", ""))):
        try:
            return JournalHandler(process)
        except OSError as error:
            if form == "journal":
                print(f"shardmq: no journal ({error}): logging to standard error", file=sys.stderr)
    handler = logging.StreamHandler(sys.stderr)
    name = process if process in ONE_LOGGER else f"{process} %(logger)s"
    if form == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(LineFormatter(f"%(asctime)s %(levelname)s {name}: %(message)s"))
    return handler


def is_journal(stream: str) -> bool:
    """Whether standard error is what JOURNAL_STREAM ("device:inode") names: it may have been redirected since."""
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return stream == f"{found.st_dev}:{found.st_ino}"


def escaped(text: str) -> str:
    """Return the text with every character that is not printable written as an escape sequence.

    Nothing in the result moves a cursor, ends a line or is refused by an encoding: not a lone surrogate either.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def logger_name(record: logging.LogRecord) -> str:
    """Return the name of the record's logger without `shardmq.`, which all loggers of the broker share."""
    return record.name.removeprefix("shardmq.")


class LineFormatter(logging.Formatter):
    """Makes one line of each record, its traceback and its stack included."""

    def format(self, record: logging.LogRecord) -> str:
        record.logger = logger_name(record)
        return escaped(super().format(record))


ONE_LINE: Final = LineFormatter()


class JsonFormatter(logging.Formatter):
    """One object a line: time (seconds), level, process, logger, message and, for one, exception.

    Only between the lines of an exception there are line breaks, which JSON writes as escapes; who shows these lines
    calls `exception_lines`, so that none of them passes for a line of the log.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": logger_name(record),
            "message": escaped(record.getMessage()),
        }
        if record.exc_info:
            entry["exception"] = "\n".join(
                map(escaped, self.formatException(record.exc_info).split("\n"))
            )
        return json.dumps(entry, ensure_ascii=False)


def exception_lines(exception: str) -> list[str]:
    """The lines of an exception as they are shown below the line of its event, indented."""
    return [f"    {escaped(line)}" for line in exception.split("\n")]


class KeptLines(logging.handlers.RotatingFileHandler):
    """Nobody is told when it fails: a disk without room may be what is being logged. Standard error has the line."""

    def __init__(self, path: str, process: str) -> None:
        super().__init__(path, maxBytes=KEPT_BYTES_MAX, backupCount=1, encoding="utf-8", delay=True)
        self.setFormatter(JsonFormatter(process))

    def _open(self) -> TextIOWrapper:
        # Names of users and addresses are in it; the folder may be one that others may enter.
        fd = os.open(
            self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        return open(fd, "a", encoding=self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:
        return


class JournalHandler(logging.Handler):
    """Entries by the journal's native protocol. Raises OSError when there is no journal."""

    def __init__(self, process: str, path: str = JOURNAL) -> None:
        super().__init__()
        self._process = process
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(path)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._socket.send(entry(record, self._process))
        except OSError:
            self.handleError(record)


def entry(record: logging.LogRecord, process: str) -> bytes:
    """FIELD=value lines; a value with a newline is FIELD, newline, its length (u64, little endian), value."""
    priority = next(
        (number for level, number in PRIORITIES if record.levelno >= level), DEBUG_PRIORITY
    )
    fields = {
        "MESSAGE": ONE_LINE.format(record),
        "PRIORITY": str(priority),
        "SYSLOG_IDENTIFIER": IDENTIFIER,
        "SHARDMQ_PROCESS": process,
        "LOGGER": logger_name(record),
        "CODE_FILE": record.pathname,
        "CODE_LINE": str(record.lineno),
    }
    return b"".join(
        _field(name, value.encode()[:MESSAGE_BYTES_MAX]) for name, value in fields.items()
    )


def _field(name: str, value: bytes) -> bytes:
    if b"\n" in value:
        return name.encode() + b"\n" + struct.pack("<Q", len(value)) + value + b"\n"
    return name.encode() + b"=" + value + b"\n"


class News:
    """Of the lines that are kept, rows that were not there at the look before."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._seen: dict[tuple[Any, ...], float] = {}
        self._newest = 0.0
        for _ in self.of(rows):
            pass

    @property
    def since(self) -> float:
        """What may be news is later than that."""
        return max(0.0, self._newest - LATE_S)

    def of(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for row in rows:
            key = tuple(sorted(row.items()))
            if key not in self._seen:
                self._seen[key] = row["time"]
                self._newest = max(self._newest, row["time"])
                yield row
        self._seen = {key: at for key, at in self._seen.items() if at > self.since}
