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


class Load:
    """A client that publishes numbers to some queues, each with a confirm."""

    def __init__(self, url: str) -> None:
        self.confirmed: dict[str, int] = dict.fromkeys(QUEUES, 0)
        self._over = threading.Event()
        self._url = url
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for queue in QUEUES:
                channel.queue_declare(queue, durable=True)
            number = 0
            while not self._over.is_set():
                for queue in QUEUES:
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


def shardctl(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardmq.supervisor.cli.app", *words]
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
