"""Measure what Python programs get out of brokers by turns: with pika, aio-pika and Celery.

    python bench/peers.py -- python bench/python_clients.py
    python bench/python_clients.py --runs 5 --seconds 3 --only celery --peer NAME=URL

Each measurement is a process of its own, on a queue of its own. All figures are a second: messages
or tasks. The client takes most of the time; on two cores it shares them with the broker. The table
has medians, with the smallest and the largest of the runs beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import aio_pika
import pika
from brokers import OWN_NAME, own_broker
from celery import Celery

BODY = b"x" * 100
PERSISTENT = pika.BasicProperties(delivery_mode=2)
WINDOW = 100  # messages that aio-pika has on their way, and the prefetch of consumers
PUBLISHED_AT_ONCE = 1000  # transient messages of pika between two looks at the clock
CELERY_QUEUE = "BENCH_CELERY_QUEUE"
CELERY_URL = "BENCH_CELERY_URL"
RESULT_S_MAX = 120.0


def channel_of(connection: pika.BlockingConnection, queue: str) -> pika.channel.Channel:
    channel = connection.channel()
    channel.queue_declare(queue, durable=True)
    return channel


@contextlib.contextmanager
def pika_channel(url: str, queue: str) -> Iterator[pika.channel.Channel]:
    """Yield a channel with a durable queue, which is deleted at the end."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = channel_of(connection, queue)
        yield channel
        channel.queue_delete(queue)


def pika_confirmed(url: str, queue: str, seconds: float) -> float:
    """Publish persistent messages, each when the one before is confirmed."""
    with pika_channel(url, queue) as channel:
        channel.confirm_delivery()
        count, begin = 0, time.perf_counter()
        while (taken := time.perf_counter() - begin) < seconds:
            channel.basic_publish("", queue, BODY, PERSISTENT)
            count += 1
        return count / taken


def pika_published(url: str, queue: str, seconds: float) -> float:
    """Publish transient messages without confirms."""
    with pika_channel(url, queue) as channel:
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            for _ in range(PUBLISHED_AT_ONCE):
                channel.basic_publish("", queue, BODY)
            count += PUBLISHED_AT_ONCE
        channel.queue_declare(queue, passive=True)  # the broker has taken all when it answers
        return count / (time.perf_counter() - begin)


def pika_consumed(url: str, queue: str, seconds: float) -> float:
    """Consume a backlog and acknowledge each message."""
    with pika_channel(url, queue) as channel:
        backlog = int(seconds * 20_000)
        for _ in range(backlog):
            channel.basic_publish("", queue, BODY)
        channel.queue_declare(queue, passive=True)
        channel.basic_qos(prefetch_count=WINDOW)
        count, begin = 0, time.perf_counter()
        for method, _, _ in channel.consume(queue):
            assert method is not None
            channel.basic_ack(method.delivery_tag)
            count += 1
            if count == backlog or time.perf_counter() - begin > seconds:
                break
        taken = time.perf_counter() - begin
        channel.cancel()
        return count / taken


def aio_pika_confirmed(url: str, queue: str, seconds: float) -> float:
    """Publish persistent messages, many at once, each with its confirm awaited."""

    async def run() -> float:
        async with await aio_pika.connect(url) as connection:
            channel = await connection.channel(publisher_confirms=True)
            declared = await channel.declare_queue(queue, durable=True)
            count, begin = 0, time.perf_counter()

            async def publish() -> None:
                nonlocal count
                while time.perf_counter() - begin < seconds:
                    message = aio_pika.Message(BODY, delivery_mode=2)
                    await channel.default_exchange.publish(message, queue)
                    count += 1

            await asyncio.gather(*(publish() for _ in range(WINDOW)))
            taken = time.perf_counter() - begin
            await declared.delete(if_empty=False, if_unused=False)
            return count / taken

    return asyncio.run(run())


def aio_pika_consumed(url: str, queue: str, seconds: float) -> float:
    """Consume a backlog and acknowledge each message."""

    async def run() -> float:
        async with await aio_pika.connect(url) as connection:
            channel = await connection.channel(publisher_confirms=False)
            declared = await channel.declare_queue(queue, durable=True)
            backlog = int(seconds * 10_000)
            for _ in range(backlog):
                await channel.default_exchange.publish(aio_pika.Message(BODY), queue)
            await channel.declare_queue(queue, durable=True)
            await channel.set_qos(prefetch_count=WINDOW)
            count, begin = 0, time.perf_counter()
            async with declared.iterator() as messages:
                async for message in messages:
                    await message.ack()
                    count += 1
                    if count == backlog or time.perf_counter() - begin > seconds:
                        break
                taken = time.perf_counter() - begin
            await declared.delete(if_empty=False, if_unused=False)
            return count / taken

    return asyncio.run(run())


app = Celery("python_clients", broker=os.environ.get(CELERY_URL, ""), backend="rpc://")
app.conf.update(
    task_default_queue=os.environ.get(CELERY_QUEUE, ""),
    task_acks_late=True,
    broker_transport_options={"confirm_publish": True},
)


@app.task(ignore_result=True)  # type: ignore[untyped-decorator]
def nothing() -> None:
    pass


@app.task  # type: ignore[untyped-decorator]
def last() -> None:
    pass


def celery_tasks(url: str, queue: str, seconds: float) -> float:
    """Send tasks to one worker, and wait until it has run all of them."""
    environment = {**os.environ, CELERY_URL: url, CELERY_QUEUE: queue}
    command = [sys.executable, "-m", "celery", "-A", "python_clients", "worker", "--pool", "solo"]
    worker = subprocess.Popen(
        command, cwd=Path(__file__).parent, env=environment, stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        app.conf.update(broker_url=url, task_default_queue=queue)
        last.delay().get(timeout=RESULT_S_MAX)  # the worker is there
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            nothing.delay()
            count += 1
        last.delay().get(timeout=RESULT_S_MAX)
        return count / (time.perf_counter() - begin)
    finally:
        worker.terminate()
        worker.wait()
        with pika_channel(url, queue):
            pass  # it deletes the queue


ROWS: dict[str, tuple[str, Callable[[str, str, float], float]]] = {
    "pika-confirmed": ("pika, persistent, one confirm at a time", pika_confirmed),
    "pika-published": ("pika, published without confirms", pika_published),
    "pika-consumed": ("pika, consumed, each acked", pika_consumed),
    "aio-pika-confirmed": ("aio-pika, persistent, 100 at once, confirmed", aio_pika_confirmed),
    "aio-pika-consumed": ("aio-pika, consumed, each acked", aio_pika_consumed),
    "celery": ("Celery, tasks sent with confirms and run by one worker", celery_tasks),
}


def measured(row: str, url: str, seconds: float) -> float:
    """Run one measurement in a process of its own."""
    command = [sys.executable, __file__, "--one", row, url, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{row} at {url}: {done.stderr}")
    return float(done.stdout)


def table(figures: dict[tuple[str, str], list[float]], names: list[str]) -> str:
    lines = [
        f"| workload, bodies of {len(BODY)} B | {' | '.join(names)} |",
        f"| --- |{' ---: |' * len(names)}",
    ]
    for row, (title, _) in ROWS.items():
        cells = [shown(figures[row, name]) for name in names if (row, name) in figures]
        if cells:
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(runs: list[float]) -> str:
    return f"{statistics.median(runs):,.0f} ({min(runs):,.0f} to {max(runs):,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--only", default=",".join(ROWS), metavar="ROW,...", help=", ".join(ROWS))
    parser.add_argument("--data", type=Path, help="the disk of this broker's data")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--one", nargs=3, metavar=("ROW", "URL", "SECONDS"), help="print a figure")
    for_run = "peers.py adds this flag for run.py; it has no effect here"
    for flag in ("--peer-pid", "--peer-restarts"):
        parser.add_argument(flag, action="append", help=for_run)
    arguments = parser.parse_args()
    if arguments.one:
        row, url, seconds = arguments.one
        print(ROWS[row][1](url, f"bench-{uuid.uuid4()}", float(seconds)))
        return
    rows = arguments.only.split(",")
    if unknown := set(rows) - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    figures: dict[tuple[str, str], list[float]] = {}
    with own_broker(arguments.data) as own:
        urls = {OWN_NAME: own.url, **dict(each.split("=", 1) for each in arguments.peer)}
        for number in range(arguments.runs):
            for row in rows:
                for name, url in urls.items():
                    figures.setdefault((row, name), []).append(
                        measured(row, url, arguments.seconds)
                    )
            print(f"run {number + 1} of {arguments.runs}", file=sys.stderr)
        print(table(figures, list(urls)))


if __name__ == "__main__":
    main()
