"""A bit flipped in a sealed file of a stream: its messages are lost, and all others come.

Everybody is told.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pyarrow as pa
import pytest

from tests.support.real_broker import RealBroker, wait_until

pytestmark = pytest.mark.crash

STREAM = {"x-queue-type": "stream", "x-stream-max-segment-size-bytes": 1_000_000}
COUNT = 4000
AT_ONCE = 50  # messages of a transaction: each waits for the disk


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RealBroker]:
    made = RealBroker(tmp_path / "data", shards=1)
    try:
        yield made
        if made.process.poll() is None:
            made.stop()
    finally:
        made.clean_up()


def get(broker: RealBroker, path: str, address: str = "") -> bytes:
    request = urllib.request.Request(f"http://{address or broker.http}{path}")
    request.add_header("Authorization", "Basic " + base64.b64encode(b"guest:guest").decode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def publish(broker: RealBroker) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        channel.queue_declare("s", durable=True, arguments=STREAM)
        channel.tx_select()
        for number in range(COUNT):
            body = b"%d:" % number + b"x" * 1000
            channel.basic_publish("", "s", body, pika.BasicProperties(headers={"number": number}))
            if number % AT_ONCE == AT_ONCE - 1:
                channel.tx_commit()


def offsets_by_amqp(broker: RealBroker) -> list[int]:
    found = []
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=500)
        for method, properties, body in channel.consume(
            "s", arguments={"x-stream-offset": "first"}
        ):
            found.append(properties.headers["x-stream-offset"])
            assert int(body.partition(b":")[0]) == found[-1]
            channel.basic_ack(method.delivery_tag)
            if found[-1] == COUNT - 1:
                return found
    raise AssertionError


def test_readers_by_amqp_and_by_arrow_and_operators_are_told_where_the_gap_is(
    broker: RealBroker,
) -> None:
    publish(broker)
    broker.stop()
    segment = damage(broker)
    broker.restart()
    found = offsets_by_amqp(broker)
    lost = sorted(set(range(COUNT)) - set(found))
    assert lost and lost == list(range(lost[0], lost[-1] + 1))
    line = (
        rf"{segment}, bytes \d+ to \d+ \(\d+ bytes\), offsets {lost[0]} to {lost[-1]}: "
        r"damaged, messages in it are lost"
    )
    wait_until(lambda: re.search(line, broker.log_tail()) is not None, "the line in the log")
    assert len(re.findall(line, broker.log_tail())) == 1

    def shown() -> dict[str, Any]:
        return dict(json.loads(get(broker, "/api/queues/%2F/s")))

    wait_until(lambda: shown().get("stream_gaps") == [[lost[0], lost[-1]]], "the gap at the queue")
    health = json.loads(get(broker, "/api/health/checks/alarms"))
    assert health["warnings"] == [
        {"shard": 0, "warning": "1 damaged places found in message files, see the log"}
    ]
    assert re.search(
        rb"shardmq_shard_damaged\{[^}]*\} 1\b", get(broker, "/metrics", broker.metrics)
    )
    assert by_arrow(broker) == (found, [[lost[0], lost[-1] + 1]])
    broker.stop()
    assert told_by_verify(broker) == [(segment.name, lost[0], lost[-1])]


def test_damage_that_only_the_arrow_reader_has_met_is_in_the_numbers_of_the_shard_too(
    broker: RealBroker,
) -> None:
    publish(broker)
    broker.stop()
    segment = damage(broker)
    broker.restart()
    assert re.search(
        rb"shardmq_shard_damaged\{[^}]*\} 0\b", get(broker, "/metrics", broker.metrics)
    )
    _, [(first, behind)] = by_arrow(broker)

    def is_counted() -> bool:
        return bool(
            re.search(
                rb"shardmq_shard_damaged\{[^}]*\} 1\b", get(broker, "/metrics", broker.metrics)
            )
        )

    wait_until(is_counted, "the place in the metrics")
    health = json.loads(get(broker, "/api/health/checks/alarms"))
    assert health["warnings"] == [
        {"shard": 0, "warning": "1 damaged places found in message files, see the log"}
    ]
    assert json.loads(get(broker, "/api/queues/%2F/s"))["stream_gaps"] == [[first, behind - 1]]
    line = rf"{segment}, bytes \d+ to \d+ \(\d+ bytes\), offsets {first} to {behind - 1}: damaged"
    assert by_arrow(broker)[1] == [[first, behind]]
    wait_until(
        lambda: broker.log_tail().count("messages with the offsets") == 2,
        "what the reader says of both scans",
    )
    assert len(re.findall(line, broker.log_tail())) == 1, "the shard tells it once"


def damage(broker: RealBroker) -> Path:
    """Flip a bit in a sealed file of the stream."""
    segment = sorted(broker.data_dir.glob("shard-00/*/stream.*/log.*"))[1]
    with segment.open("r+b") as file:
        file.seek(500_000)
        byte = file.read(1)[0]
        file.seek(500_000)
        file.write(bytes([byte ^ 4]))
    return segment


def by_arrow(broker: RealBroker) -> tuple[list[int], list[list[int]]]:
    """Offsets, and the gaps that the answer tells of."""
    reader = pa.ipc.open_stream(get(broker, "/api/streams/%2F/s/0/arrow?columns=offset"))
    rows: list[int] = []
    told: list[list[int]] = []
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return rows, told
        rows += batch.column("offset").to_pylist()
        told += json.loads(metadata[b"shardmq.gaps"]) if metadata else []


def told_by_verify(broker: RealBroker) -> list[tuple[str, int, int]]:
    command = [
        sys.executable,
        "-m",
        "shardmq.supervisor.cli",
        "store",
        "verify",
        str(broker.data_dir),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    lines = re.findall(r"/([^/]+): corrupt, bytes .*, offsets (\d+) to (\d+): ", done.stderr)
    return [(name, int(first), int(last)) for name, first, last in lines]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """Yield a broker that has run and stopped. It must start again when the tests are over."""
    made = RealBroker(tmp_path_factory.mktemp("stopped") / "data", shards=1)
    try:
        made.stop()
        yield made
        made.start()
        made.stop()
    finally:
        made.clean_up()


@pytest.mark.broker
@pytest.mark.parametrize(
    "file",
    ["vhosts.json", "users.json", "permissions.json", "topic_permissions.json", "parameters.json",
             "definitions.amqp", "shard-00"]
)  # fmt: skip
def test_a_start_without_a_file_that_was_there_is_refused_by_name_with_status_2(
    stopped: RealBroker, tmp_path: Path, file: str
) -> None:
    (stopped.data_dir / file).rename(tmp_path / "taken")
    try:
        with pytest.raises(AssertionError):
            stopped.start()
    finally:
        (tmp_path / "taken").rename(stopped.data_dir / file)
    assert stopped.process.wait(60) == 2
    assert f"{file} is missing" in stopped.log_tail()
