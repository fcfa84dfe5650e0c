"""Measure streams through Spark with a broker of this source tree: `make bench-spark`.

    python bench/spark.py [--rows 10000000] [--body 100] [--runs 3] [--data DIR] [--seconds 5]

Needs the packages of `pip install './pyspark_shardmq[spark]'`, pika, Java and a C compiler. One
stream exchange over 4 shards is filled. Then these are measured:

- reading with all base columns and with three, where Spark's sink only counts
- reading the same rows by AMQP: with one consumer per shard that counts bytes, and with pika into
  rows as tasks of Spark would, in two processes
- writing rows into 4 queues with confirms
- the time of a micro-batch, with a message each 100 ms
- the latency of 1,000 AMQP messages a second, alone and while Spark reads as fast as it can with
  the processor time that others leave (cpu.idle)

CPU is that of all the broker's processes, and of the reader alone. Trust the ratios of one run:
rates move with whatever else the machine does. At the end each bar is printed with ok or SHORT; the
exit status does not depend on it.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import statistics
import struct
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
from brokers import own_broker
from generator import build_generator, measure
from load.families import BY_NAME
from scale import shortstr
from streams import StreamClient

SHARDS = 4
EXCHANGE, SINK = "bench", "bench-sink"
PIKA_ROWS = 100_000
WRITTEN_ROWS, WARM_ROWS = 1_000_000, 20_000
PREFETCH = 1000
# Java compiles what runs often, so the first messages do not count.
WARM_MESSAGES, LATENCY_MESSAGES = 100, 200
LATENCY_GAP_S = 0.1
READY_S_MAX = 300
TIMES_AMQP = 6  # a read by Spark should be faster than one by AMQP by this factor
TIMES_LATENCY = 2  # p99 may be longer by this factor while Spark reads
BESIDE_ROWS = 2_000_000  # rows of each read beside AMQP
BESIDE_RUNS = 3
# The figure, the bar and whether more is better, by line.
BARS: dict[str, tuple[str, float, bool]] = {
    "read, 3 columns, into noop": ("reader CPU ns/row", 60, False),
    "write into 4 queues, confirms": ("rows/s", 150_000, True),
    "micro-batches, a message each 100 ms": ("p50 ms", 500, False),
}
ROWS_PER_S_BAR = 700_000


class SparkBench:
    def __init__(self, spark: Any, broker: Any, given: argparse.Namespace) -> None:
        self.spark, self.broker, self.given, self.rows = spark, broker, given, given.rows
        self.amqp = broker.url.rpartition("@")[2].rstrip("/")
        self.client = StreamClient(self.amqp)
        self.http = f"http://{broker.http}"

    # -- set up ------------------------------------------------------------------------------------

    def fill(self) -> list[str]:
        """Fill the stream and return the names of its shard queues."""
        self.call(
            "PUT",
            f"exchanges/%2F/{EXCHANGE}",
            exchange("x-modulus-hash", {"x-queue-type": "stream"}),
        )
        queues = [shard["queue"] for shard in self.stream()["shards"]]
        for queue in queues:
            self.client.publish(queue, self.given.body, self.rows // SHARDS)
        give_up = time.monotonic() + READY_S_MAX
        while (
            sum(shard["next"] for shard in self.stream()["shards"]) < self.rows // SHARDS * SHARDS
        ):
            if time.monotonic() > give_up:
                raise TimeoutError("not all rows are on stable storage")
            time.sleep(0.1)
        return queues

    def call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(f"{self.http}/api/{path}", method=method)
        request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")
        request.add_header("Content-Type", "application/json")
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(request, data, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def stream(self) -> Any:
        return self.call("GET", f"streams/%2F/{EXCHANGE}")

    # -- measured ----------------------------------------------------------------------------------

    def timed(self, rows: int, act: Callable[[], None]) -> dict[str, float]:
        pids = self.broker.processes()
        reader = [
            pid for pid in pids if b"shardd.reader" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        cpu, own, begun = machine.cpu_seconds(pids), ended_too(reader), time.monotonic()
        act()
        seconds = time.monotonic() - begun
        return {
            "rows/s": round(rows / seconds),
            "broker CPU ns/row": round((machine.cpu_seconds(pids) - cpu) / rows * 1e9),
            "reader CPU ns/row": round((ended_too(reader) - own) / rows * 1e9),
        }

    def read(self, columns: str | None, rows: int | None = None) -> dict[str, float]:
        """Read the first `rows` rows of the stream, or all."""
        # Starts the workers of Spark and the broker's reader, which live on.
        self.into_noop(columns, SHARDS)
        return self.timed(rows or self.rows, lambda: self.into_noop(columns, rows))

    def into_noop(self, columns: str | None, rows: int | None) -> None:
        reader = (
            self.spark.read.format("shardmq")
            .option("shardmq.url", self.http)
            .option("subscribe", EXCHANGE)
        )
        if columns is not None:
            reader = reader.option("columns", columns)
        if rows is not None:
            ends = {EXCHANGE: {str(shard): rows // SHARDS for shard in range(SHARDS)}}
            reader = reader.option("endingOffsets", json.dumps(ends))
        reader.load().write.format("noop").mode("overwrite").save()

    def read_by_amqp(self, queues: list[str]) -> dict[str, float]:
        each = self.rows // SHARDS

        def consume(queue: str) -> None:
            StreamClient(self.amqp).read(queue, self.given.body, each, 10_000)

        def all_at_once() -> None:
            threads = [threading.Thread(target=consume, args=(queue,)) for queue in queues]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return self.timed(self.rows, all_at_once)

    def read_by_pika(self, queues: list[str]) -> dict[str, float]:
        """Read a part of each stream, since a message costs the same everywhere."""
        each = min(self.rows, PIKA_ROWS) // SHARDS
        fresh = multiprocessing.get_context("spawn")  # the processes inherit nothing of Spark
        halves = [queues[: SHARDS // 2], queues[SHARDS // 2 :]]

        with fresh.Pool(len(halves)) as pool:
            pool.map(importing_pika, halves)

            def act() -> None:
                pool.starmap(rows_by_pika, [(self.broker.url, half, each) for half in halves])

            return self.timed(each * SHARDS, act)

    def write(self) -> dict[str, float]:
        rows = min(self.rows, WRITTEN_ROWS)
        self.publish(WARM_ROWS)
        return self.timed(rows, lambda: self.publish(rows))

    def publish(self, rows: int) -> None:
        columns = [
            f"cast(repeat('x', {self.given.body}) as binary) as value",
            "string(id) as routing_key",
        ]
        frame = self.spark.range(0, rows, 1, 2).selectExpr(*columns)
        writer = frame.write.format("shardmq").mode("append").option("shardmq.url", self.http)
        writer.option("exchange", SINK).save()

    def latency(self) -> dict[str, float]:
        """Measure the latency of messages and the duration of micro-batches, both in milliseconds.

        The latency is the time from the publish of a message until its micro-batch has given it to
        Python.
        """
        taken: dict[int, float] = {}

        def note(frame: Any, _: int) -> None:
            bodies = frame.select("value").toArrow().column(0).to_pylist()
            taken.update(
                dict.fromkeys(
                    (int.from_bytes(body[:8], "big") for body in bodies), time.monotonic()
                )
            )

        reader = (
            self.spark.readStream.format("shardmq")
            .option("shardmq.url", self.http)
            .option("subscribe", EXCHANGE)
        )
        with tempfile.TemporaryDirectory() as checkpoint:
            query = (
                reader.load()
                .writeStream.foreachBatch(note)
                .option("checkpointLocation", checkpoint)
                .start()
            )
            sent = {}
            for number in itertools.count(1):
                sent[number] = time.monotonic()
                self.send(number)
                time.sleep(LATENCY_GAP_S)
                if (
                    len(taken) >= WARM_MESSAGES + LATENCY_MESSAGES
                    or time.monotonic() - sent[1] > READY_S_MAX
                ):
                    break
            lasted = [
                one["durationMs"]["triggerExecution"]
                for one in query.recentProgress
                if one["numInputRows"]
            ]
            # To stop in the middle of a micro-batch prints a long error.
            query.processAllAvailable()
            query.stop()
        # The first messages wait for Spark's first batch, which takes seconds.
        waits = sorted((taken[n] - sent[n]) * 1000 for n in sorted(taken)[WARM_MESSAGES:])
        if not waits:
            raise TimeoutError(f"{len(taken)} messages came through Spark within {READY_S_MAX} s")
        return {
            "p50 ms": round(statistics.median(waits)),
            "p95 ms": round(waits[len(waits) * 95 // 100]),
            "ms a micro-batch": round(statistics.median(lasted[len(lasted) // 3 :])),
        }

    def beside(self) -> dict[str, float]:
        """Measure the p99 latency of AMQP messages in turn alone and while a thread reads."""
        seconds = self.given.seconds
        options = [*BY_NAME["latency-1k"].options, "--seconds", str(seconds)]
        jvm = self.spark.sparkContext._gateway.proc.pid
        alone, busy = [], []
        for _ in range(BESIDE_RUNS):
            alone.append(measure(self.broker, options, seconds)["latency_p99_us"])
            over, reading = threading.Event(), threading.Event()
            thread = threading.Thread(target=self.read_until, args=(over, reading))
            thread.start()
            if not reading.wait(READY_S_MAX):
                raise TimeoutError(f"Spark has read nothing within {READY_S_MAX} s")
            try:
                with machine.last_in_line(machine.tree(jvm)):
                    busy.append(measure(self.broker, options, seconds)["latency_p99_us"])
            finally:
                over.set()
                thread.join()
        us_alone, us_busy = statistics.median(alone), statistics.median(busy)
        return {
            "times": round(us_busy / us_alone, 2),
            "us alone": us_alone,
            "us while Spark reads": us_busy,
        }

    def read_until(self, over: threading.Event, reading: threading.Event) -> None:
        while not over.is_set():
            self.into_noop("offset,timestamp,value", min(self.rows, BESIDE_ROWS))
            reading.set()

    def send(self, number: int) -> None:
        body = number.to_bytes(8, "big")
        one = self.client.method(
            60, 40, b"\0\0" + shortstr(EXCHANGE) + shortstr(str(number)) + b"\0"
        )
        one += struct.pack(">BHIHHQH", 2, 1, 14, 60, 0, len(body), 0) + b"\xce"
        self.client._socket.sendall(one + struct.pack(">BHI", 3, 1, len(body)) + body + b"\xce")


def importing_pika(_: Any) -> None:
    """Import pika before the clock starts, because the import takes time."""
    importlib.import_module("pika")


def rows_by_pika(url: str, queues: list[str], each: int) -> int:
    """Make (offset, timestamp, value) of `each` messages of each stream and return their number."""
    import pika

    channel = pika.BlockingConnection(pika.URLParameters(url)).channel()
    channel.basic_qos(prefetch_count=PREFETCH)
    rows: list[tuple[int, Any, bytes]] = []
    for queue in queues:
        until = len(rows) + each
        for method, properties, body in channel.consume(
            queue, arguments={"x-stream-offset": "first"}
        ):
            rows.append((properties.headers["x-stream-offset"], properties.timestamp, body))
            if len(rows) % (PREFETCH // 2) == 0 or len(rows) == until:
                channel.basic_ack(method.delivery_tag, multiple=True)
            if len(rows) == until:
                break
        channel.cancel()
    return len(rows)


def ended_too(pids: list[int]) -> float:
    """Return the CPU seconds of processes in clock ticks, which count ended threads too."""
    fields = [machine.stat_fields(pid) for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields if one) / machine.TICKS_PER_S


def exchange(kind: str, arguments: dict[str, str]) -> dict[str, Any]:
    return {
        "type": kind,
        "durable": True,
        "arguments": {"x-shards": SHARDS, "x-shard-arguments": arguments},
    }


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rows", type=int, default=10_000_000)
    made.add_argument("--body", type=int, default=100)
    made.add_argument("--runs", type=int, default=3, help="of each; medians are shown")
    made.add_argument("--seconds", type=float, default=5.0, help="of each measurement of latency")
    made.add_argument(
        "--data", type=Path, default=None, help="where the broker's data directory is made"
    )
    given = made.parse_args()
    from pyspark_shardmq.jobs.session import session

    build_generator()
    spark = session("bench", "local[2]", {"spark.driver.memory": "2g"})
    print(
        json.dumps(
            {
                **machine.facts(),
                "rows": given.rows,
                "body bytes": given.body,
                "load": machine.load_average(),
            }
        )
    )
    with own_broker(given.data) as broker:
        bench = SparkBench(spark, broker, given)
        queues = bench.fill()
        bench.call("PUT", f"exchanges/%2F/{SINK}", exchange("x-modulus-hash", {}))
        scenarios: dict[str, Callable[[], dict[str, float]]] = {
            "read, 7 columns, into noop": lambda: bench.read(None),
            "read, 3 columns, into noop": lambda: bench.read("offset,timestamp,value"),
            "AMQP, a client that counts bytes": lambda: bench.read_by_amqp(queues),
            "AMQP into rows, pika, 2 processes": lambda: bench.read_by_pika(queues),
            "write into 4 queues, confirms": bench.write,
        }
        # Scenarios take turns, so that a busy minute slows all of them alike.
        found: dict[str, list[dict[str, float]]] = {name: [] for name in scenarios}
        for _ in range(given.runs):
            for name, act in scenarios.items():
                found[name].append(act())
        for name, runs in found.items():
            show(name, runs)
        rate, by_amqp = (
            statistics.median(run["rows/s"] for run in found[name])
            for name in ("read, 3 columns, into noop", "AMQP into rows, pika, 2 processes")
        )
        bar("Spark, 3 columns, over AMQP", rate / by_amqp, TIMES_AMQP, True)
        bar("Spark, 3 columns, rows/s", rate, ROWS_PER_S_BAR, True)
        show("micro-batches, a message each 100 ms", [bench.latency()])
        beside = bench.beside()
        show("AMQP p99 at 1,000 messages/s", [beside])
        bar("that p99 while Spark reads, over alone", beside["times"], TIMES_LATENCY, False)
    spark.stop()
    print("", *said, sep="\n", flush=True)


def show(name: str, runs: list[dict[str, float]]) -> None:
    """Print the medians, and all rates beside them."""
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    text = ", ".join(f"{value:,.0f} {key}" for key, value in medians.items())
    print(f"{name:40} {text}   {[next(iter(run.values())) for run in runs]}", flush=True)
    if name in BARS:
        key, wanted, more = BARS[name]
        bar(f"{name}, {key}", medians[key], wanted, more)


def bar(name: str, found: float, wanted: float, more: bool) -> None:
    reached = found >= wanted if more else found <= wanted
    said.append(
        f"{'ok   ' if reached else 'SHORT'} {name}: {found:,.1f},"
        f" bar: at {'least' if more else 'most'} {wanted:,.0f}"
    )
    print(said[-1], flush=True)


said: list[str] = []


if __name__ == "__main__":
    main()
