"""Measure the cost of a message in a deep queue by the number of messages that wait there.

    PYTHONPATH=. python bench/micro/queues.py [--sizes 10000 100000 1000000]

Messages are published, delivered, requeued and expired in one queue in one process, over a store
that keeps nothing. So the order of messages, their times and priorities are measured, not their
bytes. The figures are microseconds of CPU per message. If the cost of one message grew with the
number of the others, the columns would grow from left to right.

`ttl` gives each message a time of its own, `one ttl` is a queue with `x-message-ttl`, `priority`
has ten levels in random order, `delayed` is a queue where messages wait for random times.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Iterator
from typing import Any

from shardmq.shardd.queues import Consumer, Queue, Window, limits_of
from shardmq.shardd.queues.delay_queue import DelayQueue
from shardmq.shardd.store.format.record import Arrival

BATCH = 256
REQUEUED = 1_000
HOUR_MS = 3_600_000
BODY_BYTES = 16
ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ttl": {},
    "one ttl": {"x-message-ttl": HOUR_MS},
    "priority": {"x-max-priority": 9},
    "delayed": {"x-delays-for": "exchange"},
}


class Nowhere:
    """A store whose messages are all alike, and where deliveries go."""

    blob = bytes(BODY_BYTES)

    def read(self, entries: array[int], bytes_max: int) -> tuple[bytes, array[int]]:
        count = max(1, min(len(entries), bytes_max // BODY_BYTES))
        return self.blob * count, array("I", [BODY_BYTES]) * count

    def look(
        self, entries: array[int], bytes_max: int, whole: bool = True
    ) -> tuple[bytes, array[int]]:
        return self.read(entries, bytes_max)

    def settle(self, queue_id: int, entries: array[int], durable: bool) -> None:
        pass

    def deliver(
        self,
        consumer: Consumer,
        first_number: int,
        redelivered: bool,
        count: int,
        blob: bytes | memoryview,
    ) -> None:
        pass


def fact(row: str, rng: random.Random) -> int:
    """Return the facts of a message: priority << 56 | the time when it expires or is due."""
    if row == "priority":
        return rng.randrange(10) << 56
    return rng.randrange(HOUR_MS, 2 * HOUR_MS) if row in ("ttl", "delayed") else 0


def arrivals(row: str, count: int, first: int) -> Iterator[Arrival]:
    rng = random.Random(first)
    for start in range(first, first + count, BATCH):
        entries = array("Q", [n << 4 for n in range(start, min(start + BATCH, first + count))])
        facts = array("Q", [fact(row, rng) for _ in entries])
        yield Arrival(1, entries, BODY_BYTES * len(entries), facts if any(facts) else None)


def us_each(started: float, count: int) -> float:
    return (time.process_time() - started) * 1e6 / count


def measured(row: str, size: int) -> dict[str, float]:
    """Measure a queue of `size` messages that gets, delivers, requeues and loses some."""
    store = Nowhere()
    made = DelayQueue if row == "delayed" else Queue
    queue = made(1, store, limits_of(ROWS[row]))  # type: ignore[arg-type]
    for arrival in arrivals(row, size, 1):
        queue.publish(arrival, 0)
    more = list(arrivals(row, BATCH * 40, size + 1))
    found = {}
    started = time.process_time()
    for arrival in more:
        queue.publish(arrival, 0)
    found["publish"] = us_each(started, BATCH * 40)
    if row != "delayed":
        consumer = Consumer(queue, None, 1, Window(1 << 40), prefetch=REQUEUED)
        queue.attach(consumer)
        started = time.process_time()
        queue.deliver(0, store, 1 << 30)  # type: ignore[arg-type]
        found["deliver"] = us_each(started, REQUEUED)
        queue.detach(consumer, 0)
        held = array("Q", sorted(consumer.unacked.held()))
        consumer.unacked.take_all()
        started = time.process_time()
        for entry in held:
            queue.requeue(array("Q", [entry]), BODY_BYTES)
        found["requeue"] = us_each(started, REQUEUED)
    if row in ("ttl", "one ttl"):
        count = queue.backlog.ready_count
        started = time.process_time()
        queue.backlog.expire(3 * HOUR_MS)
        found["expire"] = us_each(started, count)
        assert not queue.backlog.ready_count
    if row == "delayed":
        count = queue.delayed_count
        started = time.process_time()
        while queue.deliver(3 * HOUR_MS, store, 1 << 30) or queue.next_due() is not None:  # type: ignore[arg-type]
            pass_on(queue)
        pass_on(queue)
        found["release"] = us_each(started, count)
        assert not queue.delayed_count
    return found


def pass_on(queue: Queue) -> None:
    """Take all due messages and settle them, as if a front door had published them elsewhere."""
    departures = queue.backlog.departures
    assert departures is not None
    number = 0
    while departures.waits:
        number += 1
        departures.hand_over(number, len(departures.first(BATCH).entries))
        departures.take_off(number, [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    sizes = parser.parse_args().sizes
    print("| us of CPU a message | " + " | ".join(f"{size:,}" for size in sizes) + " |")
    print("| --- |" + " ---: |" * len(sizes))
    for row in ROWS:
        columns = [measured(row, size) for size in sizes]
        for what in columns[0]:
            print(
                f"| {row}, {what} | "
                + " | ".join(f"{column[what]:.2f}" for column in columns)
                + " |"
            )


if __name__ == "__main__":
    main()
