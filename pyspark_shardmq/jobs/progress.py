"""How far a job is, as one line that is drawn again and again, where someone looks at it.

A streaming query knows its rows: those it has, and those that wait in the streams. All else is counted in tasks of
Spark's, of the job it does just now.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark_shardmq.offsets import decode, lag

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

LOOK_S = 0.5
CELLS = 30
AGAIN = "\r\x1b[K"  # to the beginning of the line, which is cleared


def bar(done: int, total: int) -> str:
    part = min(1.0, done / total) if total else 1.0
    full = int(part * CELLS)
    return f"[{'#' * full}{'.' * (CELLS - full)}] {part:4.0%}"


# -- streaming queries -------------------------------------------------------------------------------------


def waiting(progress: Mapping[str, Any]) -> int:
    """Rows that the streams hold behind an epoch. 0 where nobody knows."""
    rows = 0
    for source in progress["sources"]:
        if source.get("endOffset") and source.get("latestOffset"):
            rows += sum(lag(decode(source["endOffset"]), decode(source["latestOffset"])).values())
    return rows


def of_epoch(name: str, progress: Mapping[str, Any], done: int) -> str:
    """`done`: rows of all epochs so far, this one's among them."""
    total, rate = done + waiting(progress), progress.get("processedRowsPerSecond", 0)
    shown = f"{done:,} of {total:,} rows, {rate:,.0f} rows/s"
    return f"{name}: {bar(done, total)}  epoch {progress['batchId']}, {shown}"


class Epochs:
    """What a query has done since it was started, drawn where someone looks. Spark remembers the last hundred only."""

    def __init__(self, name: str, shown: bool) -> None:
        self._name, self._shown, self._last = name, shown, ""
        self.rows = self.epochs = 0

    def look(self, query: StreamingQuery) -> None:
        # `query.recentProgress` asks the JVM for every number of every epoch; this for the text of the new ones.
        updates, found = query._jsq.recentProgress(), []
        for i in reversed(range(len(updates))):
            progress = json.loads(updates[i].json())
            if progress["timestamp"] <= self._last:
                break
            found.append(progress)
        self.take(reversed(found))

    def take(self, news: Iterable[Mapping[str, Any]]) -> None:
        """A look that found nothing is no epoch, though it has the number of the one to come."""
        for progress in news:
            self._last = progress["timestamp"]
            if "addBatch" not in progress["durationMs"]:
                continue
            self.epochs += 1
            self.rows += progress["numInputRows"]
            if self._shown:
                draw(of_epoch(self._name, progress, self.rows))

    def end(self) -> None:
        """What was drawn stays."""
        if self._shown and self.epochs:
            print(file=sys.stderr, flush=True)


# -- all else ----------------------------------------------------------------------------------------------


def tasks(tracker: StatusTracker) -> tuple[int, int] | None:
    """Of the job that runs: tasks done, and all that are known of. Spark tells of a stage when it begins."""
    for job in sorted(tracker.getActiveJobsIds(), reverse=True):
        found = tracker.getJobInfo(job)
        stages = [] if found is None else [tracker.getStageInfo(stage) for stage in found.stageIds]
        known = [stage for stage in stages if stage is not None]
        if known:
            return sum(stage.numCompletedTasks for stage in known), sum(
                stage.numTasks for stage in known
            )
    return None


@contextlib.contextmanager
def drawn(spark: SparkSession, name: str) -> Iterator[None]:
    """While it lasts; nothing where standard error is no terminal. A streaming query draws its own."""
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()

    def draw_tasks() -> None:
        shown = False
        while not over.wait(LOOK_S):
            found = None if spark.streams.active else tasks(spark.sparkContext.statusTracker())
            if found is not None:
                draw(f"{name}: {bar(*found)}  {found[0]} of {found[1]} tasks")
                shown = True
        if shown:
            print(AGAIN, end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=draw_tasks, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def draw(line: str) -> None:
    print(AGAIN + line, end="", file=sys.stderr, flush=True)
