"""What goes through streams: `python -m pyspark_shardmq.jobs.analytics`.

Rates by window of time, the keys that come most, how evenly the shards are used (the fullest against the average).
Tables on standard output, all of it as JSON with --json, and with --html as a page that needs nothing else to be
shown.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark_shardmq.jobs import command

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WINDOWS_MAX = 10_000  # in a report; beyond that the windows are too short for what is asked
PLOT_WIDTH, PLOT_HEIGHT = 900, 160


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    made = command.parser("analytics", "Rates, hot keys and skew of streams.")
    made.add_argument("streams", help="streams or stream exchanges, several with commas")
    made.add_argument("--window", default="1 minute", help="as Spark says it")
    made.add_argument("--keys", type=command.at_least(1), default=10, help="how many of the most frequent")
    made.add_argument("--since", metavar="TIME", help="as 2026-11-20T12:00:00Z; rows from then on")
    made.add_argument("--html", metavar="FILE", help="the report as a page")
    return made.parse_args(words)


def job(spark: SparkSession, given: argparse.Namespace) -> dict[str, Any]:
    rows = read(spark, given).cache()
    report = {
        "rates": rates(rows, given.window),
        "hot keys": hot_keys(rows, given.keys),
        "shards": shards(rows),
    }
    rows.unpersist()
    if given.html:
        Path(given.html).write_text(page(given.streams, report))
    if given.json:
        return {**report, **totals(report)}
    for title, table in report.items():
        print(f"{title}\n{as_text(table)}\n")
    return {**totals(report), **({"report": given.html} if given.html else {})}


def read(spark: SparkSession, given: argparse.Namespace) -> DataFrame:
    from pyspark_shardmq.jobs.replay import moment

    options = {"subscribe": given.streams, **command.connector_options(given)}
    rows = spark.read.format("shardmq").options(**options, **command.pairs(given.option, "--option")).load()
    if given.since is not None:
        rows = rows.where(f"timestamp >= {moment(given.since)}")
    return rows.selectExpr("queue", "shard", "timestamp", "routing_key", "length(value) as bytes")


# -- tables: lists of rows, all with the same names --------------------------------------------------------


def rates(rows: DataFrame, window: str) -> list[dict[str, Any]]:
    from pyspark.sql import functions as f

    groups = rows.groupBy("queue", f.window("timestamp", window).alias("window"))
    sums = groups.agg(f.count("*").alias("rows"), f.sum("bytes").alias("bytes"))
    seconds = "(unix_micros(window.end) - unix_micros(window.start)) / 1e6"
    found = sums.selectExpr(
        "queue", "string(window.start) as begins", "rows", "bytes", f"round(rows / ({seconds}), 3) as rows_per_second"
    )
    windows = [row.asDict() for row in found.orderBy("queue", "begins").limit(WINDOWS_MAX + 1).collect()]
    if len(windows) > WINDOWS_MAX:
        raise command.JobError(f"more than {WINDOWS_MAX} windows: take a longer --window than {window}")
    return windows


def hot_keys(rows: DataFrame, count: int) -> list[dict[str, Any]]:
    from pyspark.sql import functions as f

    total = rows.count()
    keys = rows.groupBy("queue", "routing_key").agg(f.count("*").alias("rows"), f.sum("bytes").alias("bytes"))
    most = keys.orderBy(f.desc("rows"), "queue", "routing_key").limit(count).collect()
    return [{**row.asDict(), "share": round(row["rows"] / total, 4)} for row in most]


def shards(rows: DataFrame) -> list[dict[str, Any]]:
    """By queue and shard; `of_average` is 1 for all where rows are spread evenly. Shards without rows are not seen."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    sums = rows.groupBy("queue", "shard").agg(f.count("*").alias("rows"), f.sum("bytes").alias("bytes"))
    average = f.avg("rows").over(Window.partitionBy("queue"))
    found = sums.withColumn("of_average", f.round(f.col("rows") / average, 3)).orderBy("queue", "shard")
    return [row.asDict() for row in found.collect()]


def totals(report: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    by_shard = report["shards"]
    return {
        "rows": sum(row["rows"] for row in by_shard),
        "bytes": sum(row["bytes"] for row in by_shard),
        "skew": max((row["of_average"] for row in by_shard), default=None),
    }


# -- shown -------------------------------------------------------------------------------------------------


def as_text(table: Sequence[dict[str, Any]]) -> str:
    if not table:
        return "  nothing"
    lines = [list(table[0]), *([str(value) for value in row.values()] for row in table)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = (zip(line, widths, strict=True) for line in lines)
    return "\n".join("  " + "  ".join(word.ljust(width) for word, width in line).rstrip() for line in padded)


def page(streams: str, report: dict[str, list[dict[str, Any]]]) -> str:
    """One HTML file: a plot of the rates of each stream, bars of the keys and shards, and all tables."""
    parts = [f"<h1>{html.escape(streams)}</h1><p>{html.escape(json.dumps(totals(report)))}</p>"]
    for queue in sorted({row["queue"] for row in report["rates"]}):
        values = [row["rows_per_second"] for row in report["rates"] if row["queue"] == queue]
        parts.append(f"<h2>{html.escape(queue)}: rows a second</h2>{plot(values)}")
    names = [f"{row['queue']} {row['routing_key']}" for row in report["hot keys"]]
    parts.append(f"<h2>hot keys</h2>{bars(names, [row['rows'] for row in report['hot keys']])}")
    names = [f"{row['queue']}/{row['shard']}" for row in report["shards"]]
    parts.append(f"<h2>shards</h2>{bars(names, [row['rows'] for row in report['shards']])}")
    parts += [f"<h2>{html.escape(title)}</h2>{as_table(table)}" for title, table in report.items()]
    style = "body{font:14px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:left}svg{background:#f6f6f6}"
    head = f"<meta charset=utf-8><title>{html.escape(streams)}</title><style>{style}</style>"
    return f"<!doctype html>{head}{''.join(parts)}\n"


def plot(values: Sequence[float]) -> str:
    top, step = max(values, default=0) or 1, PLOT_WIDTH / max(1, len(values) - 1)
    points = [f"{i * step:.1f},{PLOT_HEIGHT - value / top * (PLOT_HEIGHT - 20):.1f}" for i, value in enumerate(values)]
    if len(points) == 1:
        points.append(f"{PLOT_WIDTH},{points[0].split(',')[1]}")
    line = f'<polyline points="{" ".join(points)}" fill="none" stroke="#06c" stroke-width="2"/>'
    return f'<svg width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}">{line}<text x="4" y="14">{top:g}</text></svg>'


def bars(names: Sequence[str], values: Sequence[float]) -> str:
    top = max(values, default=0) or 1
    rows = (
        f"<tr><td>{html.escape(name)}<td>{value}<td><svg width=400 height=12>"
        f'<rect width="{value / top * 400:.0f}" height="12" fill="#06c"/></svg>'
        for name, value in zip(names, values, strict=True)
    )
    return f"<table>{''.join(rows)}</table>"


def as_table(table: Sequence[dict[str, Any]]) -> str:
    head = "".join(f"<th>{html.escape(name)}" for name in (table[0] if table else {}))
    body = ("<tr>" + "".join(f"<td>{html.escape(str(value))}" for value in row.values()) for row in table)
    return f"<table><tr>{head}{''.join(body)}</table>"


if __name__ == "__main__":
    sys.exit(command.run("analytics", arguments(), job))
