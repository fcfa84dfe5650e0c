"""Publish Parquet, CSV or JSON files: `python -m pyspark_shardmq.jobs.backfill`.

In files with a column `value` that column is the body. In other files each row becomes a JSON
object. A run may be repeated under the same --name without publishing a row twice.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from pyspark_shardmq.jobs import command
from pyspark_shardmq.jobs.replay import options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KNOWN = ("value", "routing_key", "exchange", "headers", "properties")


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    made = command.parser("backfill", "Publish the rows of files.")
    made.add_argument("path", help="a file or a directory of files")
    made.add_argument(
        "--format",
        choices=["parquet", "csv", "json"],
        default="parquet",
        help="CSV: with a header line",
    )
    made.add_argument("--exchange", help="where to publish; else a column `exchange` says it")
    made.add_argument("--routing-key", help="for all rows; or --routing-key-column")
    made.add_argument("--routing-key-column", metavar="COLUMN")
    made.add_argument(
        "--order-by",
        metavar="COLUMNS",
        help="makes a repeated run the same; else the order of the files",
    )
    made.add_argument("--rate", type=command.at_least(1), metavar="ROWS", help="a second, at most")
    made.add_argument("--name", help="of this run; repeated under the same name no row comes twice")
    made.add_argument(
        "--lanes", type=command.at_least(1), default=1, help="how many tasks publish at once"
    )
    return made.parse_args(words)


def job(spark: SparkSession, given: argparse.Namespace) -> dict[str, Any]:
    reader = spark.read.option("header", "true") if given.format == "csv" else spark.read
    rows = reader.format(given.format).load(given.path)
    count = rows.count()
    if given.order_by:
        rows = rows.orderBy(*(name.strip() for name in given.order_by.split(",")))
    with command.writer_metrics() as metrics:
        said = {"metricsPath": str(metrics), **options(given)}
        messages(rows, given).coalesce(given.lanes).write.format("shardmq").mode("append").options(
            **said
        ).save()
        done = command.stored_and_known(metrics)
    return {
        "rows": count,
        **done,
        "exchange": given.exchange if given.exchange is not None else "of each row",
    }


def messages(rows: DataFrame, given: argparse.Namespace) -> DataFrame:
    from pyspark.sql import functions as f

    key = given.routing_key_column
    if key is not None and key not in rows.columns:
        raise command.JobError(
            f"--routing-key-column {key}: the files have {', '.join(rows.columns)}"
        )
    if "value" in rows.columns:
        made = rows if key is None else rows.withColumn("routing_key", f.col(key).cast("string"))
        return made.select(*(name for name in KNOWN if name in made.columns))
    value = f.to_json(f.struct(*rows.columns)).alias("value")
    return rows.select(
        value, *([] if key is None else [f.col(key).cast("string").alias("routing_key")])
    )


if __name__ == "__main__":
    sys.exit(command.run("backfill", arguments(), job))
