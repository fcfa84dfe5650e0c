"""Spark reads each row of the streams once and in the order of its shard, whatever breaks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyspark_shardmq.jobs.command import start
from tests.support.real_broker import wait_until

pytestmark = pytest.mark.timeout(400)  # Spark starts slowly on a busy machine

if TYPE_CHECKING:
    from tests.support.fake_streams import FakeStreams


def reading(spark: Any, url: str, **options: Any) -> Any:
    reader = spark.read.format("shardmq").option("shardmq.url", url)
    for key, value in options.items():
        reader = reader.option(key.replace("__", "."), value)
    return reader.load()


def numbers(frame: Any) -> list[int]:
    return sorted(int(row.value) for row in frame.select("value").collect())


def test_a_batch_holds_every_row_of_every_shard_once(
    spark: Any, url: str, streams: FakeStreams
) -> None:
    streams.declare("orders", 4)
    streams.append("orders", 5000)
    frame = reading(spark, url, subscribe="orders", minPartitions=8)
    assert frame.schema.simpleString() == (
        "struct<queue:string,shard:int,offset:bigint,timestamp:timestamp,exchange:string,routing_key:string,value:binary>"
    )
    assert numbers(frame) == list(range(5000))
    assert {(row.shard, row["count"]) for row in frame.groupBy("shard").count().collect()} == {
        (i, 1250) for i in range(4)
    }


def test_a_scan_that_is_cut_off_goes_on_behind_its_last_row(
    spark: Any, url: str, streams: FakeStreams
) -> None:
    streams.declare("orders", 2)
    streams.append("orders", 6000)
    streams.faults = {"/arrow": 5, "/streams/%2F/orders?": 1}
    assert numbers(reading(spark, url, subscribe="orders")) == list(range(6000))
    assert streams.faults["/arrow"] == 0


def test_filters_go_to_the_broker_and_leave_the_same_rows(
    spark: Any, url: str, streams: FakeStreams
) -> None:
    streams.declare("orders", 2)
    streams.append("orders", 3000)
    frame = reading(spark, url, subscribe="orders", pushFilters="true")
    narrow = frame.where("offset >= 100 and offset < 110 and shard = 1")
    assert numbers(narrow) == [2 * n + 1 for n in range(100, 110)]
    asked = [path for path in streams.requests if "/arrow" in path]
    assert len(asked) == 1 and "from=100&to=110" in asked[0]
    keyed = frame.where("routing_key = 'key.3'")
    assert numbers(keyed) == [n for n in range(3000) if n % 7 == 3]
    assert "filter=key%3Akey.3" in streams.requests[-1]


def test_columns_headers_properties_and_kafkas_names(
    spark: Any, url: str, streams: FakeStreams
) -> None:
    streams.declare("orders", 1)
    headers = [
        {"key": "a", "type": "S", "value": b"x"},
        {"key": "n", "type": "l", "value": bytes(8)},
    ]
    streams.append(
        "orders",
        1,
        headers=headers,
        value=bytes(range(256)),
        properties={"content_type": "text/plain"},
    )
    streams.append("orders", 1, value=b"")
    some = (
        reading(spark, url, subscribe="orders", columns="value,offset").orderBy("offset").collect()
    )
    assert some[0].asDict() == {"value": bytes(range(256)), "offset": 0} and some[1].value == b""
    whole = reading(
        spark, url, subscribe="orders", includeHeaders="true", includeProperties="true"
    ).orderBy("offset")
    first, second = whole.collect()
    assert [entry.asDict() for entry in first.headers] == headers and second.headers is None
    assert first.properties.content_type == "text/plain" and first.properties.priority is None
    kafka = reading(
        spark, url, subscribe="orders", rowFormat="kafka", includeHeaders="true"
    ).orderBy("offset")
    row = kafka.first()
    assert (row.key, row.topic, row.partition, row.timestampType) == (b"key.0", "orders", 0, 1)
    assert [entry.asDict() for entry in row.headers] == [
        {"key": "a", "value": b"x"},
        {"key": "n", "value": bytes(8)},
    ]


def test_by_time_by_offset_by_pattern_and_nothing_at_all(
    spark: Any, url: str, streams: FakeStreams
) -> None:
    streams.declare("orders-1", 2)
    streams.declare("orders-2", 1)
    streams.declare("empty", 3)
    streams.append("orders-1", 100)
    assert numbers(
        reading(spark, url, subscribe="orders-1", startingTimestamp=1_700_000_000_090)
    ) == list(range(90, 100))
    until = json.dumps({"orders-1": {"0": 3, "1": 0}})
    assert numbers(reading(spark, url, subscribe="orders-1", endingOffsets=until)) == [0, 2, 4]
    assert numbers(reading(spark, url, assign='{"orders-1":[1]}')) == list(range(1, 100, 2))
    streams.append("orders-2", 3)
    assert len(numbers(reading(spark, url, subscribePattern="orders-.*"))) == 103
    assert numbers(reading(spark, url, subscribe="empty")) == []


def test_what_retention_took_is_an_error_that_names_it(
    spark: Any, url: str, streams: FakeStreams
) -> None:
    streams.declare("orders", 1)
    streams.append("orders", 100)
    streams.streams["orders"][0].truncate(50)
    start = json.dumps({"orders": {"0": 10}})
    with pytest.raises(
        Exception, match="orders/0 has lost offsets 10 to 49 to retention; it begins at 50"
    ):
        reading(spark, url, subscribe="orders", startingOffsets=start).collect()
    kept = reading(spark, url, subscribe="orders", startingOffsets=start, failOnDataLoss="false")
    assert numbers(kept) == list(range(50, 100))


def test_wrong_options_are_refused_before_anything_is_read(
    spark: Any, url: str, streams: FakeStreams
) -> None:
    for options, why in [
        ({"subscribe": "orders", "maxOfsets": 1}, "unknown option"),
        ({"subscribe": "orders", "columns": "value,body"}, "no column body"),
        ({"subscribe": "orders", "maxOffsetsPerTrigger": 1}, "for streaming reads"),
        ({"subscribe": "nowhere"}, "no stream nowhere"),
    ]:
        with pytest.raises(Exception, match=why):
            reading(spark, url, **options).collect()


def flat(epochs: list[list[int]]) -> list[int]:
    return [number for epoch in epochs for number in epoch]


# -- streams ---------------------------------------------------------------------------------------


class Query:
    """Run a query with Trigger.AvailableNow and return the values of its epochs."""

    def __init__(self, spark: Any, url: str, checkpoint: Path, **options: Any) -> None:
        self.spark, self.url, self.checkpoint, self.options = spark, url, checkpoint, options

    def run(self) -> list[list[int]]:
        epochs: dict[int, list[int]] = {}

        def keep(frame: Any, epoch: int) -> None:
            epochs[epoch] = numbers(frame)

        reader = self.spark.readStream.format("shardmq").option("shardmq.url", self.url)
        for key, value in {"startingOffsets": "earliest", **self.options}.items():
            reader = reader.option(key, value)
        writer = (
            reader.load()
            .writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(self.checkpoint))
        )
        query = start(writer.trigger(availableNow=True).start)
        query.awaitTermination(100)
        assert query.exception() is None
        return [epochs[epoch] for epoch in sorted(epochs)]


def test_a_stream_is_read_in_portions_and_goes_on_from_its_checkpoint(
    spark: Any, url: str, streams: FakeStreams, tmp_path: Path
) -> None:
    streams.declare("orders", 3)
    streams.append("orders", 900)
    query = Query(spark, url, tmp_path, subscribe="orders", maxOffsetsPerTrigger=400, groupName="g")
    epochs = query.run()
    assert [len(epoch) for epoch in epochs] == [399, 399, 102]
    assert [reached for _, reached in streams.groups["orders", "g"].values()] == [300, 300, 300]
    assert sorted(flat(epochs)) == list(range(900))
    streams.append("orders", 90)
    assert Counter(flat(query.run())) == Counter(range(900, 990))
    streams.streams["orders"].append(type(streams.streams["orders"][0])())  # a shard is added
    streams.append("orders", 8)
    assert sorted(flat(query.run())) == list(range(990, 998))


@pytest.mark.minutes
def test_a_shard_that_is_added_while_a_query_runs_is_read_from_its_beginning(
    spark: Any, url: str, streams: FakeStreams, tmp_path: Path
) -> None:
    seen: list[int] = []
    streams.declare("orders", 1)
    streams.append("orders", 20)
    reader = spark.readStream.format("shardmq").options(
        subscribe="orders", startingOffsets="earliest"
    )
    rows = reader.option("shardmq.url", url).load().writeStream
    query = rows.foreachBatch(lambda frame, _: seen.extend(numbers(frame))).option(
        "checkpointLocation", str(tmp_path)
    )
    running = start(query.start)
    try:
        wait_until(lambda: len(seen) == 20, "the first rows", 100)
        streams.streams["orders"].append(type(streams.streams["orders"][0])())
        streams.append("orders", 20)
        wait_until(lambda: len(seen) == 40, "rows of the shard that was added", 100)
    finally:
        running.stop()
    assert sorted(seen) == list(range(40)) and running.exception() is None


def test_what_a_query_has_finished_is_reported_under_its_group(
    url: str, streams: FakeStreams
) -> None:
    """The query goes on, the next report makes up for the lost one, and the loss is logged once."""
    pytest.importorskip("pyspark")
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from pyspark_shardmq.offsets import Position, encode
    from pyspark_shardmq.options import read_options
    from pyspark_shardmq.source import ShardmqStreamReader

    shards = streams.declare("orders", 2)
    streams.append("orders", 20)
    options = {"shardmq.url": url, "subscribe": "orders", "groupName": "g/1", "pollTimeoutMs": "1"}
    reader = ShardmqStreamReader(read_options(options))

    def look(*ends: int) -> None:
        start = {("orders", n): Position(shards[n].id, end) for n, end in enumerate(ends)}
        reader.latestOffset(encode(start), ReadAllAvailable())

    streams.faults = {"/groups/": 1}
    look(3, 4)
    assert not streams.groups
    look(7, 4)
    assert streams.groups == {("orders", "g/1"): {0: (shards[0].id, 7), 1: (shards[1].id, 4)}}
    streams.groups.clear()
    look(7, 4)
    assert not streams.groups
    reader.stop()


def test_a_stream_made_anew_under_a_checkpoint_is_an_error(
    spark: Any, url: str, streams: FakeStreams, tmp_path: Path
) -> None:
    streams.declare("orders", 1)
    streams.append("orders", 50)
    query = Query(spark, url, tmp_path, subscribe="orders")
    assert len(flat(query.run())) == 50
    streams.declare("orders", 1)
    streams.append("orders", 20)
    with pytest.raises(Exception, match="orders/0 was deleted and made anew"):
        query.run()
    query.options["failOnDataLoss"] = "false"
    assert flat(query.run()) == list(range(20))


def test_a_limit_in_bytes_divides_a_stream_too(
    spark: Any, url: str, streams: FakeStreams, tmp_path: Path
) -> None:
    streams.declare("orders", 2)
    streams.append("orders", 400, value=b"%01000d" % 7)
    epochs = Query(spark, url, tmp_path, subscribe="orders", maxBytesPerTrigger=200_000).run()
    assert 2 <= len(epochs) <= 6 and sum(map(len, epochs)) == 400
