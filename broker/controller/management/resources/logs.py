"""/api/logs and /api/livelog: the log of all processes, its last lines or as server-sent events.

Each process keeps its last lines in a file in the runtime directory.
"""

from __future__ import annotations

import asyncio
import heapq
import json
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from aiohttp import web

from shardmq.broker.controller.management.api_error import ApiError, bad_request
from shardmq.broker.controller.management.call import Call, Route, to_json
from shardmq.supervisor.logs import KEPT, LogFollower

ROWS_MAX = 1_000  # in one response, the newest
TAIL_BYTES_MAX = 128 << 10  # read from the end of each file
MTIME_S = 1.0  # the precision of the time of the last write in file systems
LIVE_MAX = 16  # clients at a time
POLL_EACH_S = 0.5
COMMENT_S = 15.0  # without lines for so long a comment is sent: so a lost client is noticed
EVENTS = "text/event-stream"
FIELDS = ("time", "level", "process", "logger", "message", "exception")


async def get_all(call: Call) -> list[dict[str, Any]]:
    """Return the last lines, the oldest first; with ?since=SECONDS only later ones."""
    text = call.request.query.get("since", "0")
    try:
        since = float(text)
    except ValueError:
        raise bad_request("since: not a number of seconds since 1970") from None
    # In a thread, so that other calls do not wait for the disk.
    return await asyncio.to_thread(last_lines, Path(call.context.config.runtime_dir), since)


async def live(call: Call) -> web.StreamResponse:
    """Send the last lines, then new ones until the client goes.

    With the header `Last-Event-ID`, which is a time, only later lines are sent.
    """
    text = call.request.headers.get("Last-Event-ID", "0")
    try:
        since = float(text)
    except ValueError:
        raise bad_request("Last-Event-ID: not a number of seconds since 1970") from None
    if len(_live) >= LIVE_MAX:
        raise ApiError(503, "too_many", f"{LIVE_MAX} clients read the log as it comes already")
    response = web.StreamResponse(headers={"Content-Type": EVENTS, "Cache-Control": "no-cache"})
    task = asyncio.current_task()
    assert task is not None, "aiohttp runs each call in a task"
    _live[task] = call.request.app
    try:
        await response.prepare(call.request)
        if call.request.method != "HEAD":
            await _tell(call.request, response, Path(call.context.config.runtime_dir), since)
    finally:
        del _live[task]
    return response


async def end_live(app: web.Application) -> None:
    """Cancel these calls when the controller stops, as it would wait for them."""
    for task in [one for one, of in _live.items() if of is app]:
        task.cancel()


async def _tell(
    request: web.Request, response: web.StreamResponse, folder: Path, since: float
) -> None:
    follower, silent_s = LogFollower([]), COMMENT_S
    while not (request.transport is None or request.transport.is_closing()):
        rows = follower.new_rows(
            await asyncio.to_thread(last_lines, folder, max(since, follower.since))
        )
        events = b"".join(b"id: %.6f\ndata: %s\n\n" % (row["time"], to_json(row)) for row in rows)
        silent_s += POLL_EACH_S
        if events or silent_s >= COMMENT_S:
            await response.write(events or b":\n\n")
            silent_s = 0.0
        await asyncio.sleep(POLL_EACH_S)


_live: dict[asyncio.Task[Any], web.Application] = {}


def last_lines(folder: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """Return the last lines of all files; those that cannot be read just now are left out."""
    rows = (
        row
        for path in folder.glob(f"{KEPT}*")
        for row in _lines(path, since)
        if row["time"] > since
    )
    return heapq.nlargest(ROWS_MAX, rows, key=itemgetter("time"))[::-1]


def _lines(path: Path, since: float) -> Iterator[dict[str, Any]]:
    try:
        if path.stat().st_mtime < since - MTIME_S:
            return
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES_MAX))
            tail = file.read(TAIL_BYTES_MAX)
    except OSError:
        return
    for line in tail.splitlines():
        try:
            row = json.loads(line)
            yield {
                "time": float(row["time"]),
                **{name: str(row[name]) for name in FIELDS[1:] if name in row},
            }
        except (ValueError, TypeError, KeyError):
            continue  # the tail begins inside a line, or ends in one that is being written


ROUTES = [
    Route("GET", "/api/logs", get_all, "administrator", shows=["LogLine"]),
    Route("GET", "/api/livelog", live, "administrator"),
]
