"""The memory of lent bodies is bounded and comes back, whichever process is killed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pika
import pika.exceptions
import pytest

from shardmq.broker.controller import memory
from tests.support.real_broker import RealBroker, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.crash, pytest.mark.timeout(200)]

KILLS = 6  # tests/torture has more
SIZES = (20_000, 32 << 10, 100_000, 1 << 20)
# What a front door reads into when nobody uses lent memory.
READ_BYTES = 1 << 20
BUFFERS_BYTES = 12 << 20  # of a shard: two segments, the spare buffers, what Python keeps
WINDOW_BYTES = 4 << 20  # lent bodies weigh a quarter in the window of a connection, which is 1 MiB

SETTINGS = """
[supervision]
deaths_max = 100
deaths_within_s = 3
"""


def started(directory: Path, settings: str = SETTINGS, front_doors: int = 2) -> RealBroker:
    file = directory / "broker.toml"
    file.write_text(settings)
    config = ("--config", str(file))
    return RealBroker(
        directory / "data", shards=2, front_doors=front_doors, more=config, forked=False
    )


def lent_files(pid: int) -> dict[int, int]:
    """Return the bytes of each memory of lent bodies that a process has open, by inode."""
    found = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(fd).startswith("/memfd:shardmq-bodies"):
                facts = fd.stat()
                found[facts.st_ino] = facts.st_blocks * 512
    return found


def lent_bytes(broker: RealBroker) -> float:
    """Return the memory that somebody needs, as the metrics tell it."""
    with urllib.request.urlopen(f"http://{broker.metrics}/metrics", timeout=20) as answer:
        found = re.search(r"^shardmq_door_lent_bytes (\S+)", answer.read().decode(), re.M)
    assert found is not None
    return float(found[1])


def processes(broker: RealBroker, kind: str) -> list[int]:
    children = broker.status()["children"]
    if kind == "front-door" and broker.combined:
        kind = "shard"
    return [child["pid"] for child in children if child["kind"] == kind and child["pid"]]


class Load:
    """Clients that publish and consume large bodies until stop(), whoever is killed."""

    def __init__(self, broker: RealBroker, seed: int) -> None:
        self.broker, self.seed = broker, seed
        self.received = 0
        self._over = threading.Event()
        work: tuple[Callable[[int], None], ...] = (
            self._publish, self._publish, self._consume, self._consume, self._hang,
        )  # fmt: skip
        self._threads = [
            threading.Thread(target=self._again, args=(each, number))
            for number, each in enumerate(work)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _again(self, work: Callable[[int], None], number: int) -> None:
        while not self._over.is_set():
            with contextlib.suppress(pika.exceptions.AMQPError, OSError, IndexError):
                work(number)
            self._over.wait(0.05)

    def _channel(self) -> pika.adapters.blocking_connection.BlockingChannel:
        channel = pika.BlockingConnection(pika.URLParameters(self.broker.url)).channel()
        for queue in ("large-0", "large-1"):
            arguments = {"x-max-length": 100, "x-overflow": "drop-head"}
            channel.queue_declare(queue, durable=True, arguments=arguments)
        return channel

    def _publish(self, number: int) -> None:
        channel, at = self._channel(), random.Random(self.seed * 100 + number)
        channel.confirm_delivery()
        while not self._over.is_set():
            size = at.choice(SIZES)
            body = at.randbytes(16) * (size // 16)
            properties = pika.BasicProperties(delivery_mode=at.choice((1, 2)))
            channel.basic_publish("", f"large-{at.randrange(2)}", body, properties)
        channel.connection.close()

    def _consume(self, number: int) -> None:
        channel, at = self._channel(), random.Random(self.seed * 100 + number)
        channel.basic_qos(prefetch_count=20)
        for method, _, body in channel.consume(f"large-{number % 2}", inactivity_timeout=0.2):
            if self._over.is_set():
                break
            if method is None:
                continue
            assert body[:16] * (len(body) // 16) == body, "another body came"
            self.received += 1
            if at.random() < 0.9:
                channel.basic_ack(method.delivery_tag)
            elif at.random() < 0.9:
                channel.basic_nack(method.delivery_tag, requeue=True)
            else:
                break  # closed with what it holds
        channel.connection.close()

    def _hang(self, number: int) -> None:
        """Stop in the middle of a body, or stop to read, and go."""
        at = random.Random(self.seed * 100 + number)
        channel = self._channel()
        channel.basic_consume("large-0", lambda *_: None)
        self._over.wait(at.random())
        transport = channel.connection._impl._transport
        sock: socket.socket = transport._sock
        head = b"\x01\0\x01\0\0\0\x12\0\x3c\0\x28\0\0\0\x07large-0\0\xce"
        sizes = (1 << 20).to_bytes(8, "big")
        header = b"\x02\0\x01\0\0\0\x0e\0\x3c\0\0" + sizes + b"\0\0\xce"
        body = b"\x03\0\x01" + (131064).to_bytes(4, "big") + bytes(at.randrange(100_000))
        with contextlib.suppress(OSError):
            sock.sendall(head + header + body)
        self._over.wait(at.random())
        with contextlib.suppress(OSError):
            sock.close()


def kill_rounds(broker: RealBroker, seed: int, kills: int) -> None:
    """Kill processes at random moments under a load; then all memory must be back."""
    at = random.Random(seed)
    load = Load(broker, seed)
    kinds = ["shard", "shard", "front-door", "front-door", "controller"]
    try:
        for _ in range(kills):
            time.sleep(at.random() * 0.5)
            kind = at.choice(kinds)
            index = 0 if kind == "controller" else at.randrange(2)
            with contextlib.suppress(ProcessLookupError):
                os.kill(broker.pid(kind, index) or 1 << 30, signal.SIGKILL)
            if at.random() < 0.7:
                wait_until(lambda: len(ready(broker)) == everybody(broker), "all processes", 120)
        wait_until(lambda: len(ready(broker)) == everybody(broker), "all processes", 120)
        before = load.received
        wait_until(lambda: load.received > before + 10, "deliveries behind the last kill", 120)
    finally:
        load.stop()
    # Each front door has its memory, of which it keeps what it reads into. All else is gone.
    wait_until(lambda: len(lent_memory(broker)) == 2, "the memory of dead front doors to go", 60)
    wait_until(lambda: sum(lent_memory(broker)) <= 2 * READ_BYTES, "free memory to go", 60)


def lent_memory(broker: RealBroker) -> list[int]:
    """Return the bytes of each memory of lent bodies that some process of the broker has open."""
    files: dict[int, int] = {}
    for child in broker.status()["children"]:
        if child["pid"]:
            files |= lent_files(child["pid"])
    return list(files.values())


def ready(broker: RealBroker) -> list[int]:
    return [c["pid"] for c in broker.status()["children"] if c["state"] == "ready"]


def everybody(broker: RealBroker) -> int:
    return 3 if broker.combined else 5


@pytest.mark.parametrize("front_doors", [pytest.param(2, marks=pytest.mark.torture), 0])
def test_no_memory_stays_behind_when_processes_are_killed_at_any_moment(
    tmp_path: Path, front_doors: int
) -> None:
    broker = started(tmp_path, front_doors=front_doors)
    try:
        kill_rounds(broker, 7, KILLS)
        broker.stop()
    finally:
        broker.clean_up()
    assert "Traceback" not in broker.log_path.read_text()


@pytest.fixture
def one_door(tmp_path: Path) -> Iterator[RealBroker]:
    made = started(tmp_path, "[memory]\nbodies_bytes = 268435456\n", front_doors=1)
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


def used_bytes(broker: RealBroker) -> int:
    """Return the memory of all processes, as the controller counts it."""
    status = broker.status()
    return memory.used_bytes([status["pid"], *(child["pid"] for child in status["children"])])


def put_setting(broker: RealBroker, name: str, value: int) -> None:
    request = urllib.request.Request(
        f"http://{broker.http}/api/settings/{name}",
        data=f'{{"value": {value}}}'.encode(),
        method="PUT",
        headers={"Authorization": "Basic Z3Vlc3Q6Z3Vlc3Q=", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20):
        pass


def test_publishers_are_blocked_while_large_bodies_fill_the_memory(one_door: RealBroker) -> None:
    # What these calls take for the first time does not count.
    put_setting(one_door, "memory.high_watermark_bytes", 1 << 40)
    lent_bytes(one_door)
    put_setting(one_door, "memory.high_watermark_bytes", used_bytes(one_door) + (48 << 20))
    told: list[str] = []
    connection = pika.BlockingConnection(pika.URLParameters(one_door.url))
    connection.add_on_connection_blocked_callback(lambda *_: told.append("blocked"))
    connection.add_on_connection_unblocked_callback(lambda *_: told.append("unblocked"))
    channel = connection.channel()
    channel.queue_declare("full", durable=True)
    until = time.monotonic() + 60
    body, sent, most = bytes(1 << 20), 0, 0
    while "blocked" not in told and time.monotonic() < until:
        channel.basic_publish("", "full", body)
        sent += 1
        most = max(most, *lent_memory(one_door))
        connection.process_data_events(0)
    assert "blocked" in told, f"{sent} messages of 1 MiB"
    assert most > 8 << 20, "bodies are not lent"

    # The messages stay in the queue. Their bodies are copied, the memory comes back by itself.
    def is_over() -> bool:
        connection.process_data_events(0.1)
        return "unblocked" in told

    wait_until(is_over, "the end of it", 60)
    assert channel.queue_declare("full", passive=True).method.message_count == sent
    wait_until(lambda: lent_bytes(one_door) <= READ_BYTES, "the last body", 20)
    connection.close()


def test_free_memory_goes_back_behind_a_burst(one_door: RealBroker) -> None:
    before = [anonymous_bytes(shard) for shard in processes(one_door, "shard")]
    connection = pika.BlockingConnection(pika.URLParameters(one_door.url))
    channel = connection.channel()
    channel.queue_declare("burst", durable=True)
    grown = [0]

    def shards_grew() -> int:
        now = [anonymous_bytes(shard) for shard in processes(one_door, "shard")]
        grown.append(sum(now) - sum(before))
        return grown[-1]

    # The bodies that wait for a second are copied. The publishes behind them have the segments
    # written, so that each tick finds but a few more.
    for count, pause_s in ((100, 0.0), (40, 1.3), (100, 0.0)):
        for _ in range(count):
            channel.basic_publish("", "burst", bytes(1 << 20))
            shards_grew()
            time.sleep(0.02)
        time.sleep(pause_s)
    assert max(grown) >= 2 * BUFFERS_BYTES, "no body was copied"
    wait_until(lambda: shards_grew() < BUFFERS_BYTES, "the memory of copied bodies", 30)
    connection.close()


def test_a_slow_consumer_of_large_bodies_costs_what_waits_for_it(one_door: RealBroker) -> None:
    slow = pika.BlockingConnection(pika.URLParameters(one_door.url))
    sock: socket.socket = slow._impl._transport._sock
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    channel = slow.channel()
    channel.queue_declare("slow")
    channel.basic_consume("slow", lambda *_: None, auto_ack=True)
    fast = pika.BlockingConnection(pika.URLParameters(one_door.url)).channel()
    fast.queue_declare("fast")
    (door,) = processes(one_door, "front-door")
    before = anonymous_bytes(door)
    over = threading.Event()

    def take_a_little() -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            while not over.wait(0.05):
                sock.recv(256)

    reader = threading.Thread(target=take_a_little)
    reader.start()
    try:
        # Each small body lies beside a large one, and holds the memory of both.
        for _ in range(400):
            fast.basic_publish("", "slow", bytes(20_000))
            fast.basic_publish("", "fast", bytes(200_000))
            fast.basic_get("fast", auto_ack=True)
        waits = 400 * 20_000
        wait_until(lambda: lent_bytes(one_door) <= READ_BYTES, "the memory of the large ones", 20)
        assert anonymous_bytes(door) - before < waits + WINDOW_BYTES
    finally:
        over.set()
        reader.join()
        sock.close()
        fast.connection.close()


def anonymous_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) << 10
