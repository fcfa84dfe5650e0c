"""Publish archived rows again: `python -m pyspark_shardmq.jobs.replay`.

Rows keep their routing keys, headers and properties. The rows of a shard are published in the order
of their offsets. With --name a run may be repeated, also after a crash, without publishing a row
twice: the same rows of the same shard get the same producer and sequence numbers.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from pyspark_shardmq.archive import Archive
from pyspark_shardmq.jobs import command

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LANES = 4  # the tasks that publish; a repeated run needs the same number to publish no row twice


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    made = command.parser(
        "replay", "Publish archived rows again, in order, with their headers and properties."
    )
    made.add_argument("path", help="directory of the archive")
    made.add_argument(
        "--exchange", help="where to publish; else each row to the exchange it came by"
    )
    made.add_argument("--routing-key", help="instead of the one each row had")
    made.add_argument(
        "--queue", action="append", default=[], help="only rows of this stream; may be repeated"
    )
    made.add_argument("--from-offset", type=command.at_least(0), help="of each shard")
    made.add_argument("--to-offset", type=command.at_least(0), help="the first one not published")
    made.add_argument(
        "--since", type=command.moment, metavar="TIME", help="as 2026-11-20T12:00:00Z"
    )
    made.add_argument(
        "--until", type=command.moment, metavar="TIME", help="the first moment not published"
    )
    made.add_argument("--rate", type=command.at_least(1), metavar="ROWS", help="a second, at most")
    made.add_argument(
        "--name", help="of this replay; repeated under the same name no row comes twice"
    )
    made.add_argument(
        "--lanes", type=command.at_least(1), default=LANES, help="how many tasks publish at once"
    )
    return made.parse_args(words)


def job(spark: SparkSession, given: argparse.Namespace) -> dict[str, Any]:
    rows = chosen(archived(spark, Archive(given.path), given.queue), given)
    count = rows.count()
    columns = ["value", "routing_key", "headers", "properties"] + (
        [] if given.exchange is not None else ["exchange"]
    )
    if given.routing_key is not None:
        columns.remove("routing_key")
    # Each run must have the same rows in the same task in the same order.
    lanes = rows.repartition(given.lanes, "queue", "shard").sortWithinPartitions(
        "queue", "shard", "offset"
    )
    with command.writer_metrics() as metrics:
        said = {"metricsPath": str(metrics), **options(given)}
        lanes.select(*columns).write.format("shardmq").mode("append").options(**said).save()
        done = command.stored_and_known(metrics)
    return {
        "rows": count,
        **done,
        "exchange": given.exchange if given.exchange is not None else "of each row",
    }


def options(given: argparse.Namespace) -> dict[str, str]:
    found = command.connector_options(given)
    for name, value in [
        ("exchange", given.exchange),
        ("routingKey", given.routing_key),
        ("producerName", None if given.name is None else f"replay-{given.name}"),
        ("rowsPerSecondPerTask", None if given.rate is None else max(1, given.rate // given.lanes)),
    ]:
        if value is not None:
            found[name] = str(value)
    return {**found, **dict(given.option)}


def archived(spark: SparkSession, archive: Archive, queues: list[str]) -> DataFrame:
    names = sorted({name for piece in archive.pieces() for name in piece.files})
    files = [f"file://{(archive.path / name).resolve()}" for name in names]
    if not files:
        raise command.JobError(f"{archive.path} holds no archived rows")
    rows = spark.read.parquet(*files)
    return rows.where(rows.queue.isin(queues)) if queues else rows


def chosen(rows: DataFrame, given: argparse.Namespace) -> DataFrame:
    if given.from_offset is not None:
        rows = rows.where(rows.offset >= given.from_offset)
    if given.to_offset is not None:
        rows = rows.where(rows.offset < given.to_offset)
    if given.since is not None:
        rows = rows.where(f"timestamp >= {given.since}")
    if given.until is not None:
        rows = rows.where(f"timestamp < {given.until}")
    return rows


if __name__ == "__main__":
    sys.exit(command.run("replay", arguments(), job))
