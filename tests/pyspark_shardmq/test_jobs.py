"""The jobs, as functions of one session: archive, replay, SQL and the summaries."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyspark_shardmq.jobs import analytics, archive, backfill, command, process, replay

# Spark starts slowly on a busy machine
pytestmark = [pytest.mark.minutes, pytest.mark.timeout(400)]

if TYPE_CHECKING:
    from tests.support.fake_streams import FakeStreams

HEADERS = [{"key": "a", "type": "S", "value": b"x"}, {"key": "n", "type": "l", "value": bytes(8)}]


def run(job: Any, spark: Any, url: str, *words: str) -> dict[str, Any]:
    return dict(job.job(spark, job.arguments([*words, "--url", url])))


def published(streams: FakeStreams, exchange: str) -> list[dict[str, Any]]:
    return streams.published.get(exchange, [])


@pytest.mark.parametrize("table_format", ["parquet", "delta"])
def test_what_is_archived_is_replayed_with_all_it_had(
    spark: Any, url: str, streams: FakeStreams, tmp_path: Path, table_format: str
) -> None:
    if table_format == "delta":
        pytest.importorskip("deltalake")
    path = str(tmp_path / "cold")
    streams.declare("orders", 2)
    streams.append(
        "orders", 300, headers=HEADERS, properties={"content_type": "text/plain", "priority": 3}
    )
    streams.append("orders", 100, value=b"\0\xff")
    words = ("orders", path, "--rows-per-epoch", "150", "--table-format", table_format)
    first = run(archive, spark, url, *words)
    assert first["rows"] == 400 and json.loads(first["ends"]) == {"orders": {"0": 200, "1": 200}}
    streams.append("orders", 10)
    assert run(archive, spark, url, *words)["rows"] == 10
    for stored in (410, 0):
        said = run(replay, spark, url, path, "--exchange", "again", "--name", "n1")
        assert (said["rows"], said["stored"], said["known before"]) == (410, stored, 410 - stored)
    columns = ("routing_key", "value", "headers")
    whole = [
        repr([row[name] for name in columns])
        for shard in streams.streams["orders"]
        for row in shard.rows
    ]
    assert Counter(
        repr([row[name] for name in columns]) for row in published(streams, "again")
    ) == Counter(whole)
    assert {
        row["properties"]["priority"] for row in published(streams, "again") if row["properties"]
    } == {3}


@pytest.mark.row("D17")
def test_what_retention_took_is_read_from_the_archive(
    spark: Any, url: str, streams: FakeStreams, tmp_path: Path
) -> None:
    path = str(tmp_path / "cold")
    streams.declare("orders", 2)
    streams.append("orders", 400)
    run(archive, spark, url, "orders", path)
    streams.append("orders", 50)
    for shard in streams.streams["orders"]:
        shard.truncate(170)
    rows = spark.read.format("shardmq").option("shardmq.url", url).option("subscribe", "orders")
    found = rows.option("archivePath", path).load().select("shard", "offset", "value").collect()
    assert sorted(int(row.value) for row in found) == list(range(450))
    assert all(int(row.value) == 2 * row.offset + row.shard for row in found)


def test_a_query_reads_the_archive_then_the_log_and_goes_on_when_a_shard_goes(
    spark: Any, url: str, streams: FakeStreams, tmp_path: Path
) -> None:
    path = str(tmp_path / "cold")
    streams.declare("orders", 2)
    streams.append("orders", 400)
    run(archive, spark, url, "orders", path)
    for shard in streams.streams["orders"]:
        shard.truncate(170)
    rows = spark.readStream.format("shardmq").options(
        subscribe="orders", startingOffsets="earliest", archivePath=path
    )
    rows = rows.option("shardmq.url", url).load()
    found: list[int] = []

    def run_query() -> None:
        writer = rows.writeStream.foreachBatch(
            lambda frame, _: found.extend(int(r.value) for r in frame.collect())
        )
        writer = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True)
        command.follow(command.start(writer.start), "query")

    run_query()
    assert sorted(found) == list(range(400))
    streams.streams["orders"][1].truncate(200)
    streams.shrink("orders", 1)
    streams.append("orders", 10)
    run_query()
    assert len(found) == 410
    assert run(archive, spark, url, "orders", path)["rows"] == 10


@pytest.mark.row("D18")
def test_sql_over_streams_is_published(
    spark: Any, url: str, streams: FakeStreams, tmp_path: Path
) -> None:
    sql = tmp_path / "even.sql"
    sql.write_text(
        "select concat('n', string(value)) as value, routing_key from input where "
        "int(string(value)) % 2 = 0;"
    )
    streams.declare("or-ders", 2)
    streams.append("or-ders", 200)
    words = (
        "or-ders",
        "--sql",
        str(sql),
        "--exchange",
        "even",
        "--checkpoint",
        str(tmp_path / "c"),
    )
    said = run(process, spark, url, *words)
    assert (said["rows read"], said["stored"], said["known before"]) == (200, 100, 0)
    streams.append("or-ders", 20)
    run(process, spark, url, *words)
    assert Counter(row["value"] for row in published(streams, "even")) == Counter(
        b"n%d" % n for n in range(0, 220, 2)
    )
    with pytest.raises(command.JobError, match="No such file"):
        run(
            process,
            spark,
            url,
            "or-ders",
            "--sql",
            "/nowhere",
            "--exchange",
            "x",
            "--checkpoint",
            str(tmp_path),
        )


def test_files_are_published_as_they_are_or_as_json(
    spark: Any, url: str, streams: FakeStreams, tmp_path: Path
) -> None:
    table = tmp_path / "prices.csv"
    table.write_text("item,price\ntea,3\nsoup,5\n")
    words = (
        str(table),
        "--format",
        "csv",
        "--exchange",
        "prices",
        "--routing-key-column",
        "item",
        "--name",
        "p1",
    )
    for stored in (2, 0):
        said = run(backfill, spark, url, *words)
        assert (said["rows"], said["stored"], said["known before"]) == (2, stored, 2 - stored)
    found = [(row["routing_key"], json.loads(row["value"])) for row in published(streams, "prices")]
    assert found == [
        ("tea", {"item": "tea", "price": "3"}),
        ("soup", {"item": "soup", "price": "5"}),
    ]
    with pytest.raises(command.JobError, match="the files have item, price"):
        run(
            backfill,
            spark,
            url,
            str(table),
            "--format",
            "csv",
            "--exchange",
            "x",
            "--routing-key-column",
            "no",
        )


def test_analytics_counts_what_is_there(
    spark: Any, url: str, streams: FakeStreams, tmp_path: Path
) -> None:
    streams.declare("orders", 2)
    streams.append("orders", 700)
    streams.append("orders", 300, routing_key="<hot>")
    report = run(
        analytics,
        spark,
        url,
        "orders",
        "--json",
        "--html",
        str(tmp_path / "r.html"),
        "--window",
        "1 second",
    )
    assert (report["rows"], report["skew"]) == (1000, 1.0)
    assert report["hot keys"][0] == {
        "queue": "orders",
        "routing_key": "<hot>",
        "rows": 300,
        "bytes": 900,
        "share": 0.3,
    }
    assert sum(window["rows"] for window in report["rates"]) == 1000
    shown = (tmp_path / "r.html").read_text()
    assert (
        "&lt;hot&gt;" in shown
        and "<hot>" not in shown
        and shown.count("<rect") == len(report["rates"]) + 2 + len(report["hot keys"])
    )
