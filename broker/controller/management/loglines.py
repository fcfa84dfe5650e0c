"""/api/logs: the last lines of all processes, out of the files each of them keeps in the runtime directory."""

from __future__ import annotations

import asyncio
import heapq
import json
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from broker.controller.management.call import Call, Route, bad_request
from supervisor.logs import KEPT

ROWS_MAX = 1_000  # in one answer, the newest
TAIL_BYTES_MAX = 128 << 10  # looked at of each file
FIELDS = ("time", "level", "process", "logger", "message", "exception")


async def get_all(call: Call) -> list[dict[str, Any]]:
    """The oldest first; with ?since=SECONDS those after that moment alone."""
    text = call.request.query.get("since", "0")
    try:
        since = float(text)
    except ValueError:
        raise bad_request("since: not a number of seconds since 1970") from None
    # In a thread: it reads files, and the broker's other calls should not wait for a disk.
    return await asyncio.to_thread(last_lines, Path(call.context.config.runtime_dir), since)


def last_lines(folder: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """What cannot be read is left out: a file may be replaced by the next one just now."""
    rows = (row for path in folder.glob(f"{KEPT}*") for row in _lines(path) if row["time"] > since)
    return heapq.nlargest(ROWS_MAX, rows, key=itemgetter("time"))[::-1]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES_MAX))
            tail = file.read(TAIL_BYTES_MAX)
    except OSError:
        return
    for line in tail.splitlines():
        try:
            row = json.loads(line)
            yield {"time": float(row["time"]), **{name: str(row[name]) for name in FIELDS[1:] if name in row}}
        except (ValueError, TypeError, KeyError):
            continue  # cut at the beginning, or just being written at the end


ROUTES = [Route("GET", "/api/logs", get_all, "administrator")]
