"""A backup as deploy/BACKUP.md says holds what was confirmed before it, also under load."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pika
import pytest

from tests.support.real_broker import RealBroker, wait_until

pytestmark = pytest.mark.broker
PERSISTENT = pika.BasicProperties(delivery_mode=2)
QUEUES = [f"q{number}" for number in range(4)]
STREAM = "stream"


class Load:
    """A client that publishes numbers to some queues, each with a confirm."""

    def __init__(self, url: str) -> None:
        self.confirmed: dict[str, int] = dict.fromkeys((*QUEUES, STREAM), 0)
        self._over = threading.Event()
        self._url = url
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _run(self) -> None:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for queue in QUEUES:
                channel.queue_declare(queue, durable=True)
            channel.queue_declare(STREAM, durable=True, arguments={"x-queue-type": "stream"})
            number = 0
            while not self._over.is_set():
                for queue in (*QUEUES, STREAM):
                    channel.basic_publish("", queue, b"%d" % number, PERSISTENT)
                    self.confirmed[queue] = number + 1
                number += 1


@contextmanager
def frozen(broker: RealBroker) -> Iterator[None]:
    """Stop all processes for a moment: what a copy finds then is what a snapshot would have."""
    pids = [broker.process.pid, *(int(child["pid"]) for child in broker.status()["children"])]
    pids = [pid for pid in pids if pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)


def messages(broker: RealBroker) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        for queue in QUEUES:
            found[queue] = []
            while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
                assert got[2] is not None
                found[queue].append(int(got[2]))
    return found


def rows(broker: RealBroker, count: int) -> list[int]:
    """Return the first messages of the stream."""
    found: list[int] = []
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=500)
        arguments = {"x-stream-offset": "first"}
        for method, _, body in channel.consume(STREAM, arguments=arguments):
            channel.basic_ack(method.delivery_tag)
            found.append(int(body))
            if len(found) == count:
                channel.cancel()
                return found
    return found


def shardctl(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardmq.supervisor.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_snapshot_under_load_has_each_message_confirmed_before_it(tmp_path: Path) -> None:
    broker = RealBroker(tmp_path / "data")
    restored: RealBroker | None = None
    try:
        load = Load(broker.url)
        try:
            wait_until(lambda: min(load.confirmed.values()) > 100, "some messages")
            before = dict(load.confirmed)
            with frozen(broker):
                shutil.copytree(
                    tmp_path / "data", tmp_path / "copy",
                    ignore=lambda _, names: [each for each in names if each == "run"],
                )  # fmt: skip
                after = dict(load.confirmed)
            wait_until(
                lambda: min(load.confirmed.values()) > max(after.values()), "the load to go on"
            )
        finally:
            load.stop()
        assert shardctl("store", "verify", str(tmp_path / "copy")).returncode == 0
        restored = RealBroker(tmp_path / "copy")
        for queue, numbers in messages(restored).items():
            # One message more may be on the disk: its confirm was on the way.
            assert numbers == list(range(len(numbers)))
            assert before[queue] <= len(numbers) <= after[queue] + 1
        restored.stop()
        broker.stop()
    finally:
        broker.clean_up()
        if restored:
            restored.clean_up()


@contextmanager
def running(data_dir: Path) -> Iterator[RealBroker]:
    broker = RealBroker(data_dir)
    try:
        yield broker
        broker.stop()
    finally:
        broker.clean_up()


def test_a_snapshot_by_command_has_each_message_confirmed_before_it_and_leaves_the_broker_alone(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "data") as broker:
        with Load(broker.url) as load:
            wait_until(lambda: min(load.confirmed.values()) > 100, "some messages")
            before = dict(load.confirmed)
            where = ("--data-dir", str(tmp_path / "data"))
            made = shardctl("snapshot", str(tmp_path / "copy"), *where)
            assert made.returncode == 0, made.stderr
            after = dict(load.confirmed)
            refused = shardctl("snapshot", str(tmp_path / "copy"), *where)
            assert refused.returncode and "is not empty" in refused.stderr
            wait_until(
                lambda: min(load.confirmed.values()) > max(after.values()), "the load to go on"
            )
        assert shardctl("store", "verify", str(tmp_path / "copy")).returncode == 0
        with running(tmp_path / "copy") as restored:
            assert rows(restored, before[STREAM]) == list(range(before[STREAM]))
            for queue, numbers in messages(restored).items():
                # One message more may be on the disk: its confirm was on the way.
                assert numbers == list(range(len(numbers)))
                assert before[queue] <= len(numbers) <= after[queue] + 1
        # The files that the two share were not changed by who started on the snapshot.
        for queue, numbers in messages(broker).items():
            assert numbers == list(range(load.confirmed[queue]))
    assert not list(tmp_path.glob("*.incomplete"))
    assert shardctl("store", "verify", str(tmp_path / "data")).returncode == 0


def test_a_snapshot_of_a_broker_whose_shard_dies_meanwhile_is_whole_or_not_there(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "data") as broker:
        with Load(broker.url) as load:
            wait_until(lambda: min(load.confirmed.values()) > 20, "some messages")
        (tmp_path / "target.incomplete").mkdir()
        where = ("--data-dir", str(tmp_path / "data"))
        refused = shardctl("snapshot", str(tmp_path / "target"), *where)
        assert refused.returncode and "remove it" in refused.stderr
        (tmp_path / "target.incomplete").rmdir()
        # It has no answer while it stands still, and the next process gets the request again.
        pid = broker.pid("shard", 0)
        os.kill(pid, signal.SIGSTOP)
        making = threading.Thread(
            target=shardctl, args=("snapshot", str(tmp_path / "target"), *where)
        )
        making.start()
        wait_until(lambda: (tmp_path / "target.incomplete" / "shard-01").exists(), "the other one")
        os.kill(pid, signal.SIGKILL)
        making.join()
        assert not (tmp_path / "target.incomplete").exists()
        assert (tmp_path / "target").exists()
        assert shardctl("store", "verify", str(tmp_path / "target")).returncode == 0
        with running(tmp_path / "target") as restored:
            found = messages(restored)
        assert {queue: len(numbers) for queue, numbers in found.items()} == {
            queue: load.confirmed[queue] for queue in QUEUES
        }
