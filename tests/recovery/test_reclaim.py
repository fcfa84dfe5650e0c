"""Settled messages leave the disk within seconds; the others in their segments stay whole."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from tests.support.real_broker import RealBroker, wait_until

pytestmark = pytest.mark.crash

MIB = 1 << 20
SEGMENTS = 40
FILLERS = 16  # a segment's worth
SETTINGS = f"""
[shards]
segment_bytes = {MIB}
"""
# Two spares, the open segment, the one before it, what was merged, and its companions.
SMALL_BYTES = 6 * MIB
WITHIN_S = 60.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RealBroker]:
    settings = tmp_path / "broker.toml"
    settings.write_text(SETTINGS)
    made = RealBroker(tmp_path / "data", shards=1, more=("--config", str(settings)))
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


def connected(broker: RealBroker) -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.URLParameters(broker.url))


def disk_bytes(broker: RealBroker) -> int:
    return sum(
        path.stat().st_size for path in (broker.data_dir / "shard-00").rglob("*") if path.is_file()
    )


def stats(broker: RealBroker) -> list[dict[str, int]]:
    """Of each segment of a stopped broker."""
    command = [sys.executable, "-m", "shardmq.shardd.store.tools", "stats", str(broker.data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in map(json.loads, done.stdout.splitlines()) if "file" in line]


def fill(broker: RealBroker) -> list[bytes]:
    """Put one message of the queue `work` into each of many segments.

    The rest of each segment belongs to the queue `filler`.
    """
    persistent = pika.BasicProperties(delivery_mode=2)
    bodies = [b"work %d" % number for number in range(SEGMENTS)]
    with connected(broker) as connection:
        channel = connection.channel()
        for queue in ("work", "filler"):
            channel.queue_declare(queue, durable=True)
        for body in bodies:
            channel.basic_publish("", "work", body, persistent)
            for _ in range(FILLERS):
                channel.basic_publish("", "filler", b"x" * (MIB // FILLERS), persistent)
        channel.queue_declare("filler", passive=True)
    wait_until(lambda: disk_bytes(broker) > (SEGMENTS - 2) * MIB, "all of it on the disk", WITHIN_S)
    return bodies


@pytest.mark.parametrize(
    "restarted", [False, pytest.param(True, marks=pytest.mark.torture)], ids=["on", "restarted"]
)
def test_one_unacked_message_in_each_of_many_segments_ends_in_one(
    broker: RealBroker, restarted: bool
) -> None:
    bodies = fill(broker)
    if restarted:
        broker.stop()
        broker.restart()
    with connected(broker) as connection:
        channel = connection.channel()
        tags = []
        for body in bodies:
            method, _, got = channel.basic_get("work")
            assert got == body
            tags.append(method.delivery_tag)
        if restarted:
            channel.queue_delete("filler")
        else:
            channel.queue_purge("filler")
        wait_until(lambda: disk_bytes(broker) < SMALL_BYTES, "the disk to be freed", WITHIN_S)
        for tag in tags[::2]:
            channel.basic_ack(tag)
        channel.basic_nack(tags[1], requeue=True)
        method, _, got = channel.basic_get("work")
        assert (got, method.redelivered) == (bodies[1], True)
    broker.stop()
    segments = [one for one in stats(broker) if one["live_messages"]]
    assert sum(one["live_messages"] for one in segments) == SEGMENTS // 2
    assert len(segments) <= 2, "one merged, and perhaps the last one, which was open"
    broker.restart()
    broker.kill_all()
    broker.restart()
    with connected(broker) as connection:
        channel = connection.channel()
        for body in bodies[1::2]:
            method, _, got = channel.basic_get("work", auto_ack=True)
            assert (got, method.redelivered) == (body, True)
        assert channel.basic_get("work")[0] is None
