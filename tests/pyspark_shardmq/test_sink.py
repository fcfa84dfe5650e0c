"""Each row is published and confirmed once, however often a task, epoch or request repeats."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyspark_shardmq.jobs.command import start

pytestmark = pytest.mark.timeout(400)  # Spark starts slowly on a busy machine

if TYPE_CHECKING:
    from tests.support.fake_streams import FakeStreams


def values(streams: FakeStreams, exchange: str) -> Counter[bytes]:
    return Counter(row["value"] for row in streams.published.get(exchange, []))


def writing(frame: Any, url: str, exchange: str | None = "out", **options: Any) -> None:
    writer = frame.write.format("shardmq").mode("append").option("shardmq.url", url)
    for key, value in {**({} if exchange is None else {"exchange": exchange}), **options}.items():
        writer = writer.option(key, value)
    writer.save()


def test_rows_are_published_with_their_columns(spark: Any, url: str, streams: FakeStreams) -> None:
    frame = spark.sql(
        "select string(id) as value, concat('k.', id) as routing_key, "
        "array(named_struct('key', 'a', 'type', 'S', 'value', binary('x'))) as headers from "
        "range(1000)"
    )
    writing(frame, url, publishBatchRows=300)
    assert values(streams, "out") == Counter(b"%d" % n for n in range(1000))
    row = next(row for row in streams.published["out"] if row["value"] == b"7")
    assert row["routing_key"] == "k.7" and row["headers"] == [
        {"key": "a", "type": "S", "value": b"x"}
    ]


def test_an_answer_that_is_lost_makes_no_row_twice(
    spark: Any, url: str, streams: FakeStreams
) -> None:
    streams.faults = {"/exchanges/": 3}
    writing(spark.range(2000).selectExpr("string(id) as value"), url, publishBatchRows=200)
    assert (
        values(streams, "out") == Counter(b"%d" % n for n in range(2000)) and streams.duplicates > 0
    )


def test_a_batch_with_a_name_may_be_run_again(spark: Any, url: str, streams: FakeStreams) -> None:
    frame = spark.range(100).selectExpr("string(id) as value")
    for _ in range(2):
        writing(frame, url, producerName="nightly-1")
    assert values(streams, "out") == Counter(b"%d" % n for n in range(100))
    writing(frame, url, delivery="atLeastOnce")
    assert sum(values(streams, "out").values()) == 200


def test_what_is_stored_and_what_was_known_is_said(
    spark: Any, url: str, streams: FakeStreams, tmp_path: Path
) -> None:
    """Check the line of JSON for each write.

    The second write has 50 new rows; nothing is known of the third.
    """
    metrics = tmp_path / "metrics"
    more: dict[str, Any] = {"metricsPath": str(metrics)}
    for rows in (100, 150):
        frame = spark.range(0, rows, 1, 1).selectExpr("string(id) as value")
        writing(frame, url, producerName="nightly-1", **more)
    writing(frame, url, delivery="atLeastOnce", **more)
    assert [json.loads(line) for line in metrics.read_text().splitlines()] == [
        {"rows": 100, "stored": 100, "known": 0},
        {"rows": 150, "stored": 50, "known": 100},
        {"rows": 150, "stored": None, "known": None},
    ]


def test_other_rows_under_an_old_name_are_refused(
    spark: Any, url: str, streams: FakeStreams
) -> None:
    frame = spark.range(100).selectExpr("string(id) as value")
    writing(frame, url, producerName="nightly-1")
    with pytest.raises(
        Exception,
        match=r"producer 'nightly-1/\d' sent other rows before.*need a producer of another name",
    ):
        writing(frame.selectExpr("concat('x', value) as value"), url, producerName="nightly-1")
    assert values(streams, "out") == Counter(b"%d" % n for n in range(100))


@pytest.mark.minutes
def test_what_goes_nowhere_or_says_too_little_is_an_error(
    spark: Any, url: str, streams: FakeStreams
) -> None:
    frame = spark.range(10).selectExpr("string(id) as value")
    with pytest.raises(Exception, match=r"rows went to no queue, such as .*routing_key"):
        writing(frame, url, "unroutable")
    for wrong, exchange, why in [
        (frame, None, "say where to publish"),
        (spark.range(1), "out", "needs a column `value`"),
        (
            frame.selectExpr("value", "1 as offset"),
            "out",
            "does not know what to do with column offset",
        ),
        (spark.sql("select cast(null as string) as value"), "out", "have no value"),
    ]:
        with pytest.raises(Exception, match=why):
            writing(wrong, url, exchange)


@pytest.mark.minutes
def test_an_epoch_that_is_repeated_is_published_once(
    spark: Any, url: str, streams: FakeStreams, tmp_path: Path
) -> None:
    """Let the task of an epoch fail after its last row, so that it is repeated.

    Then let the epoch fail, so that the query is started again.
    """
    streams.declare("orders", 2)
    streams.append("orders", 500)
    frame = (
        spark.readStream.format("shardmq")
        .options(subscribe="orders", startingOffsets="earliest", maxOffsetsPerTrigger=200)
        .option("shardmq.url", url)
        .load()
        .selectExpr("value", "'k' as routing_key")
    )
    writer = (
        frame.writeStream.format("shardmq").option("shardmq.url", url).option("exchange", "out")
    )
    writer = writer.option("checkpointLocation", str(tmp_path)).option("fetchOffset.numRetries", 0)
    streams.faults = {
        "/exchanges/": 5
    }  # 2 tasks with 3 attempts each: the first epoch fails although all its rows were stored
    query = start(writer.trigger(availableNow=True).start)
    with pytest.raises(Exception, match="tried 1 times"):
        query.awaitTermination(100)
    streams.faults = {}
    query = start(writer.trigger(availableNow=True).start)
    query.awaitTermination(100)
    assert (
        values(streams, "out") == Counter(b"%d" % n for n in range(500)) and streams.duplicates > 0
    )
