"""Operators hear of a message file that is gone after a crash; the rest is served."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from tests.streams.test_damaged_file import get
from tests.support.real_broker import RealBroker, wait_until

pytestmark = pytest.mark.crash

QUEUE = "q"
COUNT = 8000
AT_ONCE = 50  # messages of a transaction: each waits for the disk
BODY = b"x" * 1000
HEADER_BYTES, SLOT_BYTES = 16, 16


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RealBroker]:
    made = RealBroker(tmp_path / "data", shards=1)
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


def publish(broker: RealBroker) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        channel.queue_declare(QUEUE, durable=True)
        channel.tx_select()
        for _ in range(COUNT // AT_ONCE):
            for _ in range(AT_ONCE):
                channel.basic_publish("", QUEUE, BODY, pika.BasicProperties(delivery_mode=2))
            channel.tx_commit()


def listed(broker: RealBroker) -> int:
    """Slots in the store's list of its files."""
    found = broker.data_dir.glob("shard-00/*/index.0000000000")
    return sum((path.stat().st_size - HEADER_BYTES) // SLOT_BYTES for path in found)


def message_files(broker: RealBroker) -> list[Path]:
    return sorted(broker.data_dir.glob("shard-00/*/msgs.*"))


def test_a_message_file_that_is_gone_after_kill_9_is_in_the_log_the_metrics_and_health(
    broker: RealBroker,
) -> None:
    publish(broker)
    wait_until(lambda: listed(broker) >= 3, "a list of three files")
    broker.kill_all()
    gone = message_files(broker)[1]
    gone.unlink()
    broker.restart()
    line = rf"{gone}.*the file is not there, messages in it are lost"
    wait_until(lambda: re.search(line, broker.log_tail()) is not None, "the line in the log")
    assert re.search(
        rb"shardmq_shard_damaged\{[^}]*\} 1\b", get(broker, "/metrics", broker.metrics)
    )
    health = json.loads(get(broker, "/api/health/checks/alarms"))
    assert health["warnings"] == [
        {"shard": 0, "warning": "1 damaged places found in message files, see the log"}
    ]
    left = json.loads(get(broker, "/api/queues/%2F/" + QUEUE))["messages"]
    assert 0 < left < COUNT
    # Told once: the next crash finds nothing more to miss.
    broker.kill_all()
    broker.restart()
    assert re.search(
        rb"shardmq_shard_damaged\{[^}]*\} 0\b", get(broker, "/metrics", broker.metrics)
    )
