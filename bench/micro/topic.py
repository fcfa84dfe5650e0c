"""Measure a topic exchange with many bindings: keys routed per second of CPU, and unbinding.

    PYTHONPATH=. python bench/micro/topic.py [--bindings 10000] [--messages 200000]

The front door's own publishing runs in one process: the frames of a socket read are scanned, each
key is routed or already known, and the message is packed for its shard. Nothing is behind the
packer. There are as many `repeated` keys as bindings, and each `new` key comes once. Every tenth
binding has a `*`, every hundredth a `#`.

Unbinding is timed one change of the catalog at a time, as the front door applies changes. The front
door may publish between two changes, so the longest counts and not the sum. Times are of this
process's CPU.
"""

from __future__ import annotations

import argparse
import random
import struct
import time
from types import SimpleNamespace
from typing import Any

from shardmq.broker.amqp import Publishes, frames
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.publish.dedup_service import DedupService
from shardmq.broker.front_door.publish.publish import Publishing
from shardmq.broker.front_door.publish.replies import Replies
from shardmq.broker.front_door.publish.reservations import Reservations
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    BindingDelete,
    BindingPut,
    ExchangePut,
    PermissionPut,
    QueueDelete,
    QueuePut,
    UserPut,
    VhostPut,
)
from shardmq.shardd.wire import codec

QUEUES = 100
SHARDS = 2
READ_BYTES = 256 << 10
STATES = b"\0\1"
EXCHANGE = b"topic"
BODY = b"x" * 16


class Links:
    """The part of the shard links that publishing needs; packed batches are thrown away."""

    def __init__(self) -> None:
        self.packer = codec.Packer(SHARDS)
        self._batch = 0
        self.vhost = "/"

    def use_vhost(self, vhost: str) -> None:
        assert vhost == "/"

    def wait_for(self, shards: int, waiting: Any) -> None:
        raise AssertionError("nobody asked for confirms")

    def flush(self) -> int:
        taken = 0
        self._batch += 1
        for shard in range(SHARDS):
            taken += len(self.packer.take(shard, 0, 1, 1, self._batch) or b"")
        return taken


class Client:
    """A publisher with one channel."""

    id = 9
    user = "guest"
    vhost = "/"

    def __init__(self, publishing: Publishing) -> None:
        self.route_cache = publishing.route_cache("/", "guest")
        self.channels = {
            1: SimpleNamespace(
                number=1,
                is_open=True,
                published=0,
                confirms=None,
                transaction=None,
                reply_to="",
                unroutable_dropped=0,
            )
        }


def patterns(count: int) -> list[str]:
    found = []
    for n in range(count):
        words = ["site", str(n % 97), "sensor", str(n)]
        if n % 10 == 0:
            words[2] = "*"
        if n % 100 == 0:
            words[3:] = [str(n), "#"]
        found.append(".".join(words))
    return found


def keys(count: int, bindings: int) -> list[bytes]:
    """Return `count` keys, of which the first `bindings` match a binding each.

    Keys after the first `bindings` have a fifth word, which only bindings with a `#` match.
    """
    found = []
    for n in range(count):
        b = n % bindings
        more = f".{n}" if n >= bindings else ""
        found.append(f"site.{b % 97}.sensor.{b}{more}".encode())
    return found


def catalog_with(bindings: int) -> Catalog:
    catalog = Catalog()
    catalog.apply(VhostPut("/"))
    catalog.apply(UserPut("guest", ""))
    catalog.apply(PermissionPut("/", "guest", ".*", ".*", ".*"))
    catalog.apply(ExchangePut("/", EXCHANGE.decode(), "topic"))
    for n in range(QUEUES):
        catalog.apply(QueuePut("/", f"q{n}", n + 1, n % SHARDS))
    for n, pattern in enumerate(patterns(bindings)):
        catalog.apply(BindingPut("/", EXCHANGE.decode(), "queue", f"q{n % QUEUES}", pattern))
    return catalog


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, 1, len(payload)) + payload + b"\xce"


def publish(key: bytes) -> bytes:
    line = bytes([len(EXCHANGE)]) + EXCHANGE + bytes([len(key)]) + key + b"\0"
    header = struct.pack(">HHQH", 60, 0, len(BODY), 0)
    return frame(1, struct.pack(">HHH", 60, 40, 0) + line) + frame(2, header) + frame(3, BODY)


def reads(messages: list[bytes]) -> list[bytes]:
    """Return the bytes of the messages in pieces as a socket read gives them."""
    found, size = [[]], 0  # type: ignore[var-annotated]
    for message in messages:
        if size + len(message) > READ_BYTES:
            found.append([])
            size = 0
        found[-1].append(message)
        size += len(message)
    return [b"".join(each) for each in found]


def run(publishing: Publishing, links: Links, client: Client, data: list[bytes]) -> float:
    """Publish all reads and return the CPU seconds."""
    started = time.process_time()
    for read in data:
        at = 0
        while at < len(read):
            at, table, count, _, _ = frames.scan(read, at, len(read), STATES, 131072, 1 << 27)
            assert count
            now_ms = time.time_ns() // 1_000_000
            event = Publishes(read, table, count)
            done = publishing.publish(client, client.route_cache, client.channels, event, now_ms)  # type: ignore[arg-type]
            assert not done.failed
        links.flush()
    return time.process_time() - started


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--bindings", type=int, default=10_000)
    arguments.add_argument("--messages", type=int, default=200_000)
    asked = arguments.parse_args()
    catalog = catalog_with(asked.bindings)
    links = Links()
    counts = Counts()
    publishing = Publishing(
        SimpleNamespace(catalog=catalog),  # type: ignore[arg-type]
        links,  # type: ignore[arg-type]
        Reservations(links),  # type: ignore[arg-type]
        DedupService(links),  # type: ignore[arg-type]
        Replies(links, counts),  # type: ignore[arg-type]
        counts,
    )
    client = Client(publishing)
    random.seed(1)
    known = keys(asked.bindings, asked.bindings)
    repeated = reads([publish(random.choice(known)) for _ in range(asked.messages)])
    run(publishing, links, client, reads([publish(key) for key in known]))
    print(f"keys that repeat: {asked.messages / run(publishing, links, client, repeated):,.0f}/s")
    new = reads(
        [
            publish(key)
            for key in keys(asked.bindings + asked.messages, asked.bindings)[asked.bindings :]
        ]
    )
    print(f"keys that never repeat: {asked.messages / run(publishing, links, client, new):,.0f}/s")
    longest = total = 0.0
    for n, pattern in enumerate(patterns(asked.bindings)):
        started = time.process_time()
        catalog.apply(BindingDelete("/", EXCHANGE.decode(), "queue", f"q{n % QUEUES}", pattern))
        publishing.catalog_changed()
        took = time.process_time() - started
        longest, total = max(longest, took), total + took
    print(
        f"unbinding {asked.bindings:,}: {total * 1000:,.0f} ms, the longest {longest * 1000:.2f} ms"
    )
    for pattern in patterns(asked.bindings):
        catalog.apply(BindingPut("/", EXCHANGE.decode(), "queue", "q0", pattern))
    run(publishing, links, client, repeated[:4])
    started = time.process_time()
    catalog.apply(QueueDelete("/", "q0"))
    publishing.catalog_changed()
    print(
        f"deleting a queue with {asked.bindings:,} bindings:"
        f" {(time.process_time() - started) * 1000:.1f} ms at once"
    )


if __name__ == "__main__":
    main()
