"""Show the progress of a job as one line on a terminal, drawn again and again.

For a streaming query the line counts rows: those that are done and those that wait in the streams.
For other work it counts the tasks of the job that Spark runs at the moment.
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

DRAW_S = 0.5
CELLS = 30
CLEAR_LINE = "\r\x1b[K"  # go to the beginning of the line and clear it


def bar(done: int, total: int) -> str:
    part = min(1.0, done / total) if total else 1.0
    full = int(part * CELLS)
    return f"[{'#' * full}{'.' * (CELLS - full)}] {part:4.0%}"


# -- streaming queries -----------------------------------------------------------------------------


def waiting(progress: Mapping[str, Any]) -> int:
    """Return how many rows the streams hold behind an epoch, 0 where this is not known."""
    rows = 0
    for source in progress["sources"]:
        if source.get("endOffset") and source.get("latestOffset"):
            rows += sum(lag(decode(source["endOffset"]), decode(source["latestOffset"])).values())
    return rows


def epoch_line(name: str, progress: Mapping[str, Any], done: int) -> str:
    """Return the line for an epoch; `done` counts the rows of all epochs up to this one."""
    total, rate = done + waiting(progress), progress.get("processedRowsPerSecond", 0)
    shown = f"{done:,} of {total:,} rows, {rate:,.0f} rows/s"
    return f"{name}: {bar(done, total)}  epoch {progress['batchId']}, {shown}"


class Epochs:
    """Count the epochs and rows of a query since its start, and draw them on a terminal.

    Spark itself remembers only the last hundred epochs.
    """

    def __init__(self, name: str, shown: bool) -> None:
        self._name, self._shown, self._last = name, shown, ""
        self.rows = self.epochs = 0

    def poll(self, query: StreamingQuery) -> None:
        # `query.recentProgress` asks the JVM for each number of each epoch. This loop asks only for
        # the text of the new epochs.
        updates, found = query._jsq.recentProgress(), []
        for i in reversed(range(len(updates))):
            progress = json.loads(updates[i].json())
            if progress["timestamp"] <= self._last:
                break
            found.append(progress)
        self.take(reversed(found))

    def take(self, news: Iterable[Mapping[str, Any]]) -> None:
        """Count the new reports of progress, oldest first.

        Spark also reports when it found no rows. Such a report has the number of the coming epoch,
        but no duration of `addBatch`, and is not counted.
        """
        for progress in news:
            self._last = progress["timestamp"]
            if "addBatch" not in progress["durationMs"]:
                continue
            self.epochs += 1
            self.rows += progress["numInputRows"]
            if self._shown:
                draw(epoch_line(self._name, progress, self.rows))

    def end(self) -> None:
        """End the line on the terminal, so that it stays."""
        if self._shown and self.epochs:
            print(file=sys.stderr, flush=True)


# -- other work ------------------------------------------------------------------------------------


def tasks(tracker: StatusTracker) -> tuple[int, int] | None:
    """Return how many tasks of the running job are done, and how many are known.

    The tasks of a stage are known when the stage begins. None: no job runs.
    """
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
def task_progress(spark: SparkSession, name: str) -> Iterator[None]:
    """Draw the running job's tasks, if standard error is a terminal.

    Nothing is drawn while a streaming query runs, because the query's rows are drawn then.
    """
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()

    def draw_tasks() -> None:
        shown = False
        while not over.wait(DRAW_S):
            found = None if spark.streams.active else tasks(spark.sparkContext.statusTracker())
            if found is not None:
                draw(f"{name}: {bar(*found)}  {found[0]} of {found[1]} tasks")
                shown = True
        if shown:
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=draw_tasks, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def draw(line: str) -> None:
    print(CLEAR_LINE + line, end="", file=sys.stderr, flush=True)
