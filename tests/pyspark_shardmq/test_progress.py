"""The progress of a job has the numbers of the query, whatever Spark forgets.

These tests need no JVM.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_shardmq.jobs.progress import CELLS, Epochs, bar, epoch_line, tasks
from pyspark_shardmq.offsets import Position, encode

REMEMBERED = 100  # Spark remembers the progress of so many epochs


class Query:
    """A query that answers the one call of StreamingQuery that the code uses."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self._jsq = self

    def recentProgress(self) -> list[Any]:
        return [
            SimpleNamespace(json=lambda one=one: json.dumps(one)) for one in self.told[-REMEMBERED:]
        ]

    def tell(self, rows: int | None, epoch: int, end: int = 0, latest: int = 0) -> None:
        """Add a report of an epoch; `rows` is None for a report without new rows."""
        ends = [encode({("orders", 0): Position("id", offset)}) for offset in (end, latest)]
        one = {
            "timestamp": f"2026-11-20T12:{len(self.told) // 60:02}:{len(self.told) % 60:02}.000Z",
            "batchId": epoch,
        }
        one |= {"numInputRows": rows or 0, "durationMs": {} if rows is None else {"addBatch": 1}}
        one |= {
            "sources": [{"endOffset": ends[0], "latestOffset": ends[1]}],
            "processedRowsPerSecond": 5.0,
        }
        self.told.append(one)


@given(st.lists(st.lists(st.none() | st.integers(0, 50), max_size=REMEMBERED), max_size=6))
def test_every_epoch_is_counted_once(looks: list[list[int | None]]) -> None:
    query, seen, epoch = Query(), Epochs("archive", shown=False), 0
    for told in looks:
        for rows in told:
            query.tell(rows, epoch)
            epoch += rows is not None
        seen.poll(query)  # type: ignore[arg-type]
    done = [rows for told in looks for rows in told if rows is not None]
    assert (seen.rows, seen.epochs) == (sum(done), len(done))


def test_what_waits_is_in_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    query, seen = Query(), Epochs("archive", shown=True)
    query.tell(1000, 7, end=1000, latest=4000)
    seen.poll(query)  # type: ignore[arg-type]
    seen.end()
    half = "#" * (CELLS // 4) + "." * (CELLS - CELLS // 4)
    line = f"archive: [{half}]  25%  epoch 7, 1,000 of 4,000 rows, 5 rows/s"
    assert capsys.readouterr().err == f"\r\x1b[K{line}\n"
    del query.told[0]["sources"][0]["latestOffset"], query.told[0]["processedRowsPerSecond"]
    assert "100%  epoch 7, 1,000 of 1,000 rows, 0 rows/s" in epoch_line(
        "archive", query.told[0], 1000
    )


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_bar_is_as_full_as_what_is_done(done: int, total: int) -> None:
    shown = bar(done, total)
    part = min(1.0, done / total) if total else 1.0
    assert len(shown) == len(bar(0, 1)) and abs(shown.count("#") / CELLS - part) <= 1 / CELLS
    assert int(shown.rpartition(" ")[2].rstrip("%")) == round(part * 100)


def test_tasks_are_those_of_the_job_that_runs_as_far_as_they_are_known() -> None:
    stages = {
        1: SimpleNamespace(numTasks=4, numCompletedTasks=4),
        2: SimpleNamespace(numTasks=8, numCompletedTasks=1),
    }
    jobs = {5: SimpleNamespace(stageIds=[1, 2, 3]), 6: None}
    tracker: Any = SimpleNamespace(
        getActiveJobsIds=lambda: [5, 6], getJobInfo=jobs.get, getStageInfo=stages.get
    )
    assert tasks(tracker) == (5, 12)
    tracker.getActiveJobsIds = list
    assert tasks(tracker) is None
