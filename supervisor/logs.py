"""The log of all processes of the broker: to standard error or to the journal of systemd.

A message holds names and values that anybody may have chosen: a user who could not log in, a vhost,
a header. So every character of a message that is not printable is written as an escape sequence, as
in a Python string: `\\n`, `\\x1b` or `\\u202e`. This holds for line breaks, control characters and
characters that change the direction of writing. `escaped` does so for every format, and callers log
names as they are. A message is one line in every format, with its traceback.

The format `auto` is that of the journal if standard error is connected to the journal, as systemd
says in JOURNAL_STREAM. Otherwise it is text. An entry of the journal has the fields MESSAGE,
PRIORITY, SYSLOG_IDENTIFIER=shardmq, SHARDMQ_PROCESS and LOGGER, so that this command finds warnings
of shard 0: `journalctl -u shardmq SHARDMQ_PROCESS=shard-0 -p warning`.

The level can be changed at any time. The last lines of each process are kept in the runtime
directory too, where the HTTP API reads them.
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
# Lines of text of these processes do not name the logger.
ONE_LOGGER: Final = ("supervisor", "controller")
MESSAGE_BYTES_MAX: Final = 48 << 10  # A datagram of this size can be sent on any machine.
# The priorities of syslog by the levels of Python.
PRIORITIES: Final = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
)
DEBUG_PRIORITY: Final = 7
# Files in the runtime directory hold the last lines as JSON. The name of the process follows.
KEPT: Final = "log-"
KEPT_BYTES_MAX: Final = 256 << 10  # The size of one file. The file before it is kept too.
# Two processes may write lines of the same moment so many seconds apart.
LATE_S: Final = 2.0


def begin(level: str, form: str, process: str) -> None:
    """Set up the log of this process. Call it once, at the start.

    Args:
        level: The lowest level that is logged: debug, info, warning or error.
        form: auto, text, json or journal.
        process: The name of the process in every line.
    """
    set_level(level)
    # A log on a disk without room must not use up the rest of the room with tracebacks.
    logging.raiseExceptions = False
    # SIGUSR1 writes the stack of every thread to standard error.
    faulthandler.register(signal.SIGUSR1)
    logging.getLogger().handlers[:] = [_handler(form, process)]


def keep(runtime_dir: str, process: str) -> logging.Handler:
    """Keep the last lines in a file too, from now on. The file outlives the process.

    Args:
        runtime_dir: The directory of the file.
        process: The name of the process, which is in the name of the file and in every line.

    Returns:
        The handler, for `keep_no_more`.
    """
    handler = KeptLines(f"{runtime_dir}/{KEPT}{process}", process)
    logging.getLogger().addHandler(handler)
    return handler


def keep_no_more(handler: logging.Handler) -> None:
    """Stop what `keep` has begun. The file stays."""
    logging.getLogger().removeHandler(handler)
    with contextlib.suppress(OSError):  # The disk refuses the last lines.
        handler.close()


def set_level(level: str) -> None:
    """Set the lowest level that is logged: debug, info, warning or error."""
    logging.getLogger().setLevel(level.upper())


def _handler(form: str, process: str) -> logging.Handler:
    """Return the handler of a format. Standard error takes the place of a missing journal."""
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
    """Return whether standard error is the stream that JOURNAL_STREAM ("device:inode") names.

    Standard error may have been redirected since systemd set the variable.
    """
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return stream == f"{found.st_dev}:{found.st_ino}"


def escaped(text: str) -> str:
    """Return the text with every character that is not printable written as an escape sequence.

    No character of the result moves the cursor, ends a line or is refused by an encoding. This
    holds for a lone surrogate too.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def logger_name(record: logging.LogRecord) -> str:
    """Return the name of the logger without `shardmq.`, which all loggers of the broker share."""
    return record.name.removeprefix("shardmq.")


class LineFormatter(logging.Formatter):
    """A formatter that makes one line of each record, with its traceback and its stack."""

    def format(self, record: logging.LogRecord) -> str:
        record.logger = logger_name(record)
        return escaped(super().format(record))


ONE_LINE: Final = LineFormatter()


class JsonFormatter(logging.Formatter):
    """A formatter that makes one JSON object of each record.

    The object has time (in seconds), level, process, logger and message, and exception if there is
    one. Line breaks occur only between the lines of an exception. Whoever shows such a text calls
    `exception_lines`, so that no line of an exception looks like a line of the log.
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
    """Return the lines of an exception, indented, to be shown below the line of the event."""
    return [f"    {escaped(line)}" for line in exception.split("\n")]


class KeptLines(logging.handlers.RotatingFileHandler):
    """A file of the last lines of a process.

    An error of the disk is not reported, because a full disk may be the very thing that is logged.
    Standard error has the line in any case.
    """

    def __init__(self, path: str, process: str) -> None:
        super().__init__(path, maxBytes=KEPT_BYTES_MAX, backupCount=1, encoding="utf-8", delay=True)
        self.setFormatter(JsonFormatter(process))

    def _open(self) -> TextIOWrapper:
        # The file holds names of users and addresses, and other users may enter the directory.
        fd = os.open(
            self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        return open(fd, "a", encoding=self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:
        return


class JournalHandler(logging.Handler):
    """A handler that sends entries by the native protocol of the journal.

    Raises:
        OSError: There is no journal.
    """

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
    """Return a record as an entry of the journal: lines of FIELD=value.

    A value that holds a newline is written as the name of the field, a newline, the length of the
    value (u64, little endian) and the value.
    """
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
    lines = bytearray()
    for name, text in fields.items():
        value = text.encode()[:MESSAGE_BYTES_MAX]
        equals = b"\n" + struct.pack("<Q", len(value)) if b"\n" in value else b"="
        lines += name.encode() + equals + value + b"\n"
    return bytes(lines)


class LogFollower:
    """Picks the new rows out of the last lines of the log, which are read again and again.

    Args:
        rows: The rows that are known already, as `JsonFormatter` makes them.
    """

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._seen: dict[tuple[Any, ...], float] = {}
        self._newest = 0.0
        for _ in self.new_rows(rows):
            pass

    @property
    def since(self) -> float:
        """The time in seconds after which a new row may have been written."""
        return max(0.0, self._newest - LATE_S)

    def new_rows(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield those rows that no earlier call has seen."""
        for row in rows:
            key = tuple(sorted(row.items()))
            if key not in self._seen:
                self._seen[key] = row["time"]
                self._newest = max(self._newest, row["time"])
                yield row
        self._seen = {key: at for key, at in self._seen.items() if at > self.since}
