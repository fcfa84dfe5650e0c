"""Spark reads the rows of a whole broker exactly once, whichever process is killed meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pika
import pika.exceptions
import pytest

from pyspark_shardmq.archive import Archive
from pyspark_shardmq.jobs import archive, replay
from pyspark_shardmq.jobs.command import start
from tests.pyspark_shardmq.conftest import ROOT
from tests.support.real_broker import RealBroker, wait_until

# Spark starts slowly on a busy machine
pytestmark = [pytest.mark.minutes, pytest.mark.timeout(1200)]

WAIT_S = 300
LARGE_BYTES = 10 << 20


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    pytest.importorskip("pyarrow")
    made = RealBroker(tmp_path_factory.mktemp("broker") / "data")
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


@pytest.fixture
def channel(broker: RealBroker) -> Iterator[Any]:
    # The client answers no heartbeats while Spark works.
    connection = pika.BlockingConnection(pika.URLParameters(f"{broker.url}?heartbeat=0"))
    channel = connection.channel()
    channel.confirm_delivery()
    yield channel
    with contextlib.suppress(pika.exceptions.AMQPError):
        connection.close()


def url(broker: RealBroker) -> str:
    return f"http://{broker.http}"


def stream_exchange(channel: Any, name: str, shards: int) -> None:
    arguments = {"x-shards": shards, "x-shard-arguments": {"x-queue-type": "stream"}}
    channel.exchange_declare(name, "x-modulus-hash", durable=True, arguments=arguments)


def publish(broker: RealBroker, channel: Any, exchange: str, numbers: range) -> None:
    """Publish messages and wait until the stream has them on stable storage.

    A confirm for each message would take minutes on a slow disk.
    """
    before = ends(broker, exchange)
    quick = channel.connection.channel()
    for number in numbers:
        properties = pika.BasicProperties(
            delivery_mode=2, headers={"n": number, "deep": {"list": [1, "two", None]}}
        )
        quick.basic_publish(exchange, f"key.{number}", b"%d" % number, properties)
    wait_until(
        lambda: ends(broker, exchange) == before + len(numbers), "what was published", WAIT_S
    )
    quick.close()


def ends(broker: RealBroker, stream: str) -> int:
    return sum(shard["next"] for shard in asked(broker, f"streams/%2F/{stream}")["shards"])


def sink(channel: Any, exchange: str) -> None:
    channel.exchange_declare(exchange, "fanout", durable=True)
    channel.queue_declare(f"{exchange}-queue", durable=True)
    channel.queue_bind(f"{exchange}-queue", exchange)


def depth(broker: RealBroker, queue: str) -> int:
    with contextlib.suppress(OSError):
        return int(asked(broker, f"queues/%2F/{queue}").get("messages", -1))
    return -1  # not known while its shard is away


def taken(broker: RealBroker, queue: str) -> list[tuple[Any, pika.BasicProperties, bytes]]:
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    channel, found = connection.channel(), []
    while True:
        method, properties, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            connection.close()
            return found
        found.append((method, properties, body))


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Give a function that starts a job beside the test; kill the jobs that are left at the end."""
    begun = []

    def begin_one(job: str, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"pyspark_shardmq.jobs.{job}", *words]
        begun.append(
            subprocess.Popen(
                command, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True
            )
        )
        return begun[-1]

    yield begin_one
    for process in begun:
        if process.poll() is None:
            for pid in [*children(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def children(pid: int) -> list[int]:
    """Return all descendants of a process: Spark's JVM and the Python workers."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in map(int, task.read_text().split()):
                found += [child, *children(child)]
    return found


def kill_driver(process: subprocess.Popen[bytes]) -> None:
    """Kill the job and its JVM at once; workers may live on and publish their rows for a while."""
    family = children(process.pid)
    for pid in [process.pid, *family]:
        with contextlib.suppress(OSError):  # an idle worker ends by itself
            if "java" in Path(f"/proc/{pid}/comm").read_text() or pid == process.pid:
                os.kill(pid, signal.SIGKILL)
    process.wait()
    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in family),
        "the workers to end",
        WAIT_S,
    )


def kill_a_worker(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker as soon as there is one, since idle workers end by themselves."""

    def workers() -> list[int]:
        found = []
        for pid in children(process.pid):
            with contextlib.suppress(OSError):
                if b"pyspark.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    wait_until(lambda: process.poll() is not None or bool(workers()), "a worker", WAIT_S)
    assert process.poll() is None, "it has ended before a worker could be killed"
    os.kill(workers()[-1], signal.SIGKILL)


def test_a_stream_processor_publishes_each_row_once_through_kills(
    broker: RealBroker,
    channel: Any,
    spark: Any,
    tmp_path: Path,
    begin: Callable[..., subprocess.Popen[bytes]],
) -> None:
    """Kill a shard, a Python worker, and the driver with its JVM; then let the job run to its end.

    The job publishes to a queue and to a stream exchange.
    """
    total, step = 8000, 300
    stream_exchange(channel, "orders", 2)
    sink(channel, "checked")
    stream_exchange(channel, "kept", 2)
    channel.exchange_bind("kept", "checked")
    publish(broker, channel, "orders", range(total))
    sql = tmp_path / "query.sql"
    sql.write_text("select concat('seen ', string(value)) as value, routing_key from input")
    words = [
        "orders",
        "--sql",
        str(sql),
        "--exchange",
        "checked",
        "--checkpoint",
        str(tmp_path / "checkpoint"),
    ]
    words += [
        "--url",
        url(broker),
        "--master",
        "local[2,3]",
        "--option",
        f"maxOffsetsPerTrigger={step}",
    ]
    words += ["--option", "groupName=checker"]

    def until(count: int) -> Callable[[], bool]:
        return lambda: process.poll() is not None or depth(broker, "checked-queue") >= count

    process = begin("process", *words)
    wait_until(until(step), "the first rows", WAIT_S)
    broker.kill("shard", 0)
    wait_until(until(depth(broker, "checked-queue") + step), "more rows", WAIT_S)
    kill_a_worker(process)
    wait_until(until(depth(broker, "checked-queue") + step), "rows after a worker died", WAIT_S)
    assert process.poll() is None, "nothing is left to be killed"
    kill_driver(process)
    before = depth(broker, "checked-queue")
    assert 0 < before < total
    assert begin("process", *words).wait(WAIT_S) == 0
    expected = Counter(b"seen %d" % number for number in range(total))
    assert Counter(body for _, _, body in taken(broker, "checked-queue")) == expected
    assert (
        Counter(
            bytes(row.value) for row in reading(spark, broker, "kept").select("value").collect()
        )
        == expected
    )
    wait_until(
        lambda: asked(broker, "streams/%2F/orders/groups/checker")["lag"] == 0,
        "all to be reported",
        WAIT_S,
    )


def reading(spark: Any, broker: RealBroker, name: str, **options: Any) -> Any:
    return (
        spark.read.format("shardmq")
        .options(subscribe=name, **{"shardmq.url": url(broker)}, **options)
        .load()
    )


def asked(broker: RealBroker, path: str) -> Any:
    request = urllib.request.Request(f"{url(broker)}/api/{path}")
    request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")
    return json.load(urllib.request.urlopen(request))


def test_archived_and_replayed_messages_are_what_they_were(
    broker: RealBroker, channel: Any, spark: Any, tmp_path: Path
) -> None:
    stream_exchange(channel, "logs", 2)
    sink(channel, "again")
    publish(broker, channel, "logs", range(500))
    everything = pika.BasicProperties(
        content_type="text/plain",
        content_encoding="gzip",
        headers={
            "n": -1,
            "t": True,
            "b": b"\0\xff",
            "d": Decimal("1.5"),
            "nested": {"a": [None, {"x": 2**40}]},
        },
        delivery_mode=2,
        priority=5,
        correlation_id="c",
        reply_to="r",
        expiration="60000",
        message_id="m",
        timestamp=1_700_000_000,
        type="t",
        user_id="guest",
        app_id="a",
    )
    bodies = [bytes(range(256)), b"", os.urandom(LARGE_BYTES)]
    for body in bodies:
        channel.basic_publish("logs", "binary", body, everything)
    path = str(tmp_path / "cold")
    done = archive.job(
        spark, archive.arguments(["logs", path, "--url", url(broker), "--rows-per-epoch", "200"])
    )
    assert done["rows"] == 503
    words = [path, "--url", url(broker), "--exchange", "again", "--name", "one"]
    for _ in range(2):
        replay.job(spark, replay.arguments(words))
    found = taken(broker, "again-queue")
    assert Counter(body for _, _, body in found) == Counter(
        [*bodies, *(b"%d" % n for n in range(500))]
    )
    for method, properties, body in found:
        headers = dict(properties.headers)
        assert (
            headers.pop("x-producer-id").startswith("replay-one/")
            and headers.pop("x-sequence") >= 0
        )
        if method.routing_key == "binary":
            properties.headers = headers
            assert properties == everything
        else:
            assert headers == {"n": int(body), "deep": {"list": [1, "two", None]}}
            assert method.routing_key == f"key.{int(body)}"
    hot = sorted(
        map(
            repr,
            reading(spark, broker, "logs", includeHeaders=True, includeProperties=True).collect(),
        )
    )
    channel.queue_purge("logs")
    with pytest.raises(Exception, match=r"logs/\d has lost offsets 0 to \d+ to retention"):
        reading(spark, broker, "logs", startingOffsets='{"logs":{"0":0,"1":0}}').collect()
    cold = reading(
        spark, broker, "logs", includeHeaders=True, includeProperties=True, archivePath=path
    ).collect()
    assert sorted(map(repr, cold)) == hot and len(hot) == 503


@pytest.mark.parametrize("table_format", ["parquet", "delta"])
def test_an_archive_holds_each_row_once_though_its_job_was_killed(
    broker: RealBroker,
    channel: Any,
    spark: Any,
    tmp_path: Path,
    begin: Callable[..., subprocess.Popen[bytes]],
    table_format: str,
) -> None:
    if table_format == "delta":
        pytest.importorskip("deltalake")
    total, name, cold = 3000, f"events-{table_format}", Archive(tmp_path / "cold")
    stream_exchange(channel, name, 2)
    publish(broker, channel, name, range(total))
    words = [
        name,
        str(cold.path),
        "--url",
        url(broker),
        "--master",
        "local[2]",
        "--rows-per-epoch",
        "200",
    ]
    words += ["--table-format", table_format]

    def rows() -> int:
        return sum(piece.rows for piece in cold.pieces())

    process = begin("archive", *words)
    wait_until(lambda: process.poll() is not None or rows() > 600, "the first epochs", WAIT_S)
    assert process.poll() is None, "nothing is left to be killed"
    kill_driver(process)
    assert 0 < rows() < total
    assert begin("archive", *words).wait(WAIT_S) == 0
    found = replay.archived(spark, cold, []).select("shard", "offset", "value").collect()
    there = reading(spark, broker, name).select("shard", "offset", "value").collect()
    assert Counter(found) == Counter(there) and len(there) == rows() == total


def test_a_stream_declared_anew_is_no_stream_without_news(
    broker: RealBroker, channel: Any, spark: Any, tmp_path: Path
) -> None:
    def read() -> int:
        rows = spark.readStream.format("shardmq").options(
            subscribe="young", startingOffsets="earliest"
        )
        rows = rows.option("shardmq.url", url(broker)).load().writeStream.format("noop")
        query = start(
            rows.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start
        )
        query.awaitTermination(WAIT_S)
        if (error := query.exception()) is not None:
            raise error
        return sum(progress["numInputRows"] for progress in query.recentProgress)

    for expected in (5, 3):
        channel.queue_declare("young", durable=True, arguments={"x-queue-type": "stream"})
        for number in range(expected):
            channel.basic_publish("", "young", b"%d" % number)
        if expected == 5:
            assert read() == 5
            channel.queue_delete("young")
    with pytest.raises(Exception, match="young/0 was deleted and made anew"):
        read()


def test_rows_that_go_nowhere_and_users_without_rights_are_refused(
    broker: RealBroker, channel: Any, spark: Any
) -> None:
    channel.exchange_declare("nowhere", "direct")
    stream_exchange(channel, "private", 1)
    rows = spark.range(10).selectExpr("string(id) as value", "'lost' as routing_key")
    with pytest.raises(Exception, match=r"10 of 10 rows went to no queue, such as .*lost"):
        rows.coalesce(1).write.format("shardmq").mode("append").options(
            exchange="nowhere", **{"shardmq.url": url(broker)}
        ).save()
    reader = (
        spark.read.format("shardmq")
        .option("shardmq.url", url(broker))
        .option("subscribe", "private")
    )
    with pytest.raises(Exception, match="401"):
        reader.option("shardmq.user", "nobody").load().collect()


def test_counts_agree_with_what_the_broker_says(
    broker: RealBroker, channel: Any, spark: Any
) -> None:
    stream_exchange(channel, "counted", 3)
    publish(broker, channel, "counted", range(100))
    found = {
        row.shard: row["count"]
        for row in reading(spark, broker, "counted").groupBy("shard").count().collect()
    }
    shards = asked(broker, "streams/%2F/counted")["shards"]
    assert found == {s["shard"]: s["next"] - s["first"] for s in shards if s["next"] > s["first"]}
    assert sum(found.values()) == 100
