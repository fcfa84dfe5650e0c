"""Report rates, hot keys and skew of streams: `python -m pyspark_shardmq.jobs.analytics`.

The report has the rates by window of time, the most frequent routing keys, and how evenly the
shards are used (the fullest shard against the average). It is printed as tables, with --json as
JSON, and with --html written as one HTML file without other parts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark_shardmq.jobs import command, report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WINDOWS_MAX = 10_000  # the most windows of a report; more are refused, since nobody reads them


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    made = command.parser("analytics", "Rates, hot keys and skew of streams.")
    made.add_argument("streams", help="streams or stream exchanges, several with commas")
    made.add_argument("--window", default="1 minute", help="as Spark says it")
    made.add_argument(
        "--keys", type=command.at_least(1), default=10, help="how many of the most frequent"
    )
    made.add_argument(
        "--since",
        type=command.moment,
        metavar="TIME",
        help="as 2026-11-20T12:00:00Z; rows from then on",
    )
    made.add_argument("--html", metavar="FILE", help="the report as a page")
    return made.parse_args(words)


def job(spark: SparkSession, given: argparse.Namespace) -> dict[str, Any]:
    rows = read(spark, given).cache()
    windows, window_s = rates(rows, given.window)
    found = {
        "rates": windows,
        "hot keys": hot_keys(rows, given.keys),
        "shards": shards(rows),
    }
    rows.unpersist()
    if given.html:
        Path(given.html).write_text(
            report.page(given.streams, totals(found), found, window_s), encoding="utf-8"
        )
    if given.json:
        return {**found, **totals(found)}
    for title, table in found.items():
        print(f"{title}\n{as_text(table)}\n")
    return {**totals(found), **({"report": given.html} if given.html else {})}


def read(spark: SparkSession, given: argparse.Namespace) -> DataFrame:
    options = {"subscribe": given.streams, **command.connector_options(given)}
    rows = spark.read.format("shardmq").options(**options, **dict(given.option)).load()
    if given.since is not None:
        rows = rows.where(f"timestamp >= {given.since}")
    return rows.selectExpr("queue", "shard", "timestamp", "routing_key", "length(value) as bytes")


# -- tables: lists of rows that all have the same columns ------------------------------------------


def rates(rows: DataFrame, window: str) -> tuple[list[dict[str, Any]], float]:
    """Return the windows that have rows, and the length of a window in seconds."""
    from pyspark.sql import functions as f

    groups = rows.groupBy("queue", f.window("timestamp", window).alias("window"))
    sums = groups.agg(f.count("*").alias("rows"), f.sum("bytes").alias("bytes"))
    seconds = "(unix_micros(window.end) - unix_micros(window.start)) / 1e6"
    found = sums.selectExpr(
        "queue",
        "string(window.start) as begins",
        "rows",
        "bytes",
        f"round(rows / ({seconds}), 3) as rows_per_second",
        f"double({seconds}) as window_s",
    )
    windows = [
        row.asDict() for row in found.orderBy("queue", "begins").limit(WINDOWS_MAX + 1).collect()
    ]
    if len(windows) > WINDOWS_MAX:
        raise command.JobError(
            f"more than {WINDOWS_MAX} windows: take a longer --window than {window}"
        )
    return windows, max((row.pop("window_s") for row in windows), default=0.0)


def hot_keys(rows: DataFrame, count: int) -> list[dict[str, Any]]:
    from pyspark.sql import functions as f

    total = rows.count()
    keys = rows.groupBy("queue", "routing_key").agg(
        f.count("*").alias("rows"), f.sum("bytes").alias("bytes")
    )
    most = keys.orderBy(f.desc("rows"), "queue", "routing_key").limit(count).collect()
    return [{**row.asDict(), "share": round(row["rows"] / total, 4)} for row in most]


def shards(rows: DataFrame) -> list[dict[str, Any]]:
    """Return the rows of each shard; `of_average` is 1 where all shards have the same number.

    Shards without rows are not in the table.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    sums = rows.groupBy("queue", "shard").agg(
        f.count("*").alias("rows"), f.sum("bytes").alias("bytes")
    )
    average = f.avg("rows").over(Window.partitionBy("queue"))
    found = sums.withColumn("of_average", f.round(f.col("rows") / average, 3)).orderBy(
        "queue", "shard"
    )
    return [row.asDict() for row in found.collect()]


def totals(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    by_shard = found["shards"]
    return {
        "rows": sum(row["rows"] for row in by_shard),
        "bytes": sum(row["bytes"] for row in by_shard),
        "skew": max((row["of_average"] for row in by_shard), default=None),
    }


# -- shown -----------------------------------------------------------------------------------------


def as_text(table: Sequence[dict[str, Any]]) -> str:
    if not table:
        return "  nothing"
    lines = [list(table[0]), *([str(value) for value in row.values()] for row in table)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = (zip(line, widths, strict=True) for line in lines)
    return "\n".join(
        "  " + "  ".join(word.ljust(width) for word, width in line).rstrip() for line in padded
    )


if __name__ == "__main__":
    sys.exit(command.run("analytics", arguments(), job))
