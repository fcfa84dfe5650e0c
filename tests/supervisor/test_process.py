"""Test the supervisor as a process: signals, standard output, exit status, survivors."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Process:
    """`terminal`: a descriptor of the one it is started in; else it has none."""

    def __init__(self, tmp_path: Path, terminal: int | None = None) -> None:
        ports = [
            "--bind=127.0.0.1",
            "--amqp-port=0",
            "--http-port=0",
            "--metrics-port=0",
            "--shards=1",
        ]
        command = [sys.executable, "-m", "tests.supervisor.fake_broker", str(tmp_path / "journal")]
        self.popen = subprocess.Popen(
            [*command, "--data-dir", str(tmp_path / "data"), *ports],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "log").open("a"),
            text=True,
            start_new_session=True,
            preexec_fn=None
            if terminal is None
            else lambda: fcntl.ioctl(terminal, termios.TIOCSCTTY, 0),
        )
        assert self.popen.stdout is not None
        self.ready_line = self.popen.stdout.readline()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    yield process
    process.popen.send_signal(signal.SIGTERM)
    process.popen.communicate(timeout=120)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_the_status_is_0(
    tmp_path: Path, process: Process, number: signal.Signals
) -> None:
    assert process.ready_line.startswith("ready: amqp=127.0.0.1:")
    process.popen.send_signal(number)
    process.popen.send_signal(number)  # make and the terminal may both pass it on
    output, _ = process.popen.communicate(timeout=120)
    assert (process.popen.returncode, output) == (0, "")
    drained = [
        line
        for line in (tmp_path / "journal").read_text().splitlines()
        if line.endswith("drained") and not line.startswith(("reader", "bridges"))
    ]
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith("INFO supervisor: stopped")
    assert drained == ["front-door-0 drained", "shard-0 drained", "controller drained"]


def test_sighup_is_a_reload_and_ends_nothing(tmp_path: Path, process: Process) -> None:
    process.popen.send_signal(signal.SIGHUP)
    process.popen.send_signal(signal.SIGTERM)
    process.popen.communicate(timeout=120)
    assert process.popen.returncode == 0
    assert "are to be read anew" in (tmp_path / "log").read_text()


def test_the_end_of_its_terminal_drains_the_broker(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = Process(tmp_path, theirs)
    os.close(theirs)
    os.close(ours)
    process.popen.communicate(timeout=120)
    assert process.popen.returncode == 0
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith("INFO supervisor: stopped")


def test_when_the_supervisor_is_killed_its_children_drain_and_a_new_broker_starts_after_them(
    tmp_path: Path, process: Process
) -> None:
    process.popen.send_signal(signal.SIGKILL)
    process.popen.wait(timeout=120)
    second = Process(tmp_path)
    journal = (tmp_path / "journal").read_text().splitlines()
    assert second.ready_line.startswith("ready: ")
    second.popen.send_signal(signal.SIGTERM)
    second.popen.communicate(timeout=120)
    orphaned = [
        index
        for index, line in enumerate(journal)
        if line.endswith("orphaned") and not line.startswith(("reader", "bridges"))
    ]
    assert len(orphaned) == 3
    assert max(orphaned) < len(journal) - 1 - journal[::-1].index("controller started")


def test_a_second_broker_on_the_same_data_ends_with_status_2_in_one_line(
    tmp_path: Path, process: Process
) -> None:
    command = [
        sys.executable,
        "-m",
        "shardmq.supervisor",
        "--data-dir",
        str(tmp_path / "data"),
        "--amqp-port=0",
    ]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert f"in use by the broker with pid {process.popen.pid}" in ended.stderr
    assert (tmp_path / "data" / "broker.json").exists()
