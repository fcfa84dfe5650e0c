"""Run SQL over streams and publish its rows: `python -m pyspark_shardmq.jobs.process --sql FILE`.

Each stream is a view. The name of the view is that of the stream, with `_` for every character but
letters and digits; a single stream is also the view `input`. The rows of the SQL must have a column
`value` and may have `routing_key`, `exchange`, `headers` and `properties`.

Each row is published once, as long as a repeated epoch gives the same rows in the same order. That
is so for select and where. For groups and joins it is so only if the rows are sorted before the
sink (see OPTIONS.md, "Exactly once").
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark_shardmq.jobs import command

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHUFFLES = re.compile(
    r"^[\s+:\-]*(?:Aggregate|Join|Deduplicate\w*|Repartition\w*|Distinct|Window\b)", re.MULTILINE
)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    made = command.parser("process", "Run SQL over streams and publish what it gives.")
    made.add_argument(
        "streams",
        help="streams or stream exchanges, several with commas; each is a view of its name",
    )
    made.add_argument("--sql", required=True, metavar="FILE", help="one SELECT")
    made.add_argument("--exchange", help="where to publish; else the SQL gives a column `exchange`")
    made.add_argument("--routing-key", help="where the SQL gives none")
    made.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="how far it is; the same one goes on there",
    )
    made.add_argument(
        "--from",
        dest="begin",
        choices=["earliest", "latest"],
        default="earliest",
        help="without one",
    )
    made.add_argument(
        "--watermark",
        metavar="DURATION",
        help='how late rows may come for windows, as "10 seconds"',
    )
    made.add_argument("--output-mode", choices=["append", "update"], default="append")
    command.add_trigger(made)
    return made.parse_args(words)


def job(spark: SparkSession, given: argparse.Namespace) -> dict[str, Any]:
    result = query(spark, given)
    if shuffles(result):
        print(
            "process: groups and joins: a repeated epoch may publish rows in another order, "
            "and so twice",
            file=sys.stderr,
        )

    def begin() -> Any:
        writer = (
            result.writeStream.format("shardmq")
            .options(**sink_options(given))
            .outputMode(given.output_mode)
        )
        writer = writer.option("checkpointLocation", given.checkpoint).trigger(
            **command.trigger(given)
        )
        if given.continuous is None:  # a continuous query would let the file grow for ever
            writer = writer.option("metricsPath", str(metrics))
        return writer.start()

    with command.writer_metrics() as metrics:
        seen = command.follow(command.start(begin), "process")
        done = command.stored_and_known(metrics) if given.continuous is None else {}
    return {
        "rows read": seen.rows,
        "epochs": seen.epochs,
        **done,
        "exchange": given.exchange or "of each row",
    }


def query(spark: SparkSession, given: argparse.Namespace) -> DataFrame:
    try:
        text = Path(given.sql).read_text()
    except OSError as error:
        raise command.JobError(f"--sql {given.sql}: {error.strerror}") from None
    names = [name.strip() for name in given.streams.split(",") if name.strip()]
    for name in names:
        rows = stream(spark, given, name)
        rows.createOrReplaceTempView(view(name))
        if len(names) == 1:
            rows.createOrReplaceTempView("input")
    return spark.sql(text.strip().removesuffix(";"))


def view(name: str) -> str:
    return re.sub(r"\W", "_", name)


def stream(spark: SparkSession, given: argparse.Namespace, name: str) -> DataFrame:
    options = {
        "subscribe": name,
        "startingOffsets": given.begin,
        **command.connector_options(given),
    }
    rows = spark.readStream.format("shardmq").options(**options, **dict(given.option)).load()
    return rows.withWatermark("timestamp", given.watermark) if given.watermark else rows


def shuffles(rows: DataFrame) -> bool:
    plan = rows._jdf.queryExecution().analyzed().toString()
    return SHUFFLES.search(plan) is not None


def sink_options(given: argparse.Namespace) -> dict[str, str]:
    found = command.connector_options(given)
    if given.exchange is not None:
        found["exchange"] = given.exchange
    if given.routing_key is not None:
        found["routingKey"] = given.routing_key
    return found


if __name__ == "__main__":
    sys.exit(command.run("process", arguments(), job))
