"""A whole broker of this source tree in processes of its own, on free ports.

Its data directory outlives it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.support import forked_broker

READY = re.compile(r"^ready: amqp=(\S+) http=(\S+) metrics=(\S+)")
# On a crowded machine; nobody waits longer than it takes.
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 90.0
PATIENCE_S = 60.0  # with what happens soon, on a crowded machine
LOG_LINES_SHOWN = 60
SOURCE = Path(__file__).resolve().parents[2]
# With this variable set, each broker has its front doors in the processes of the shards.
COMBINED = "SHARDMQ_TEST_COMBINED"
# With this variable set, the front doors and the controller of each broker reach its shards by TCP,
# as those of another node do.
REMOTE = "SHARDMQ_TEST_REMOTE"
# What `shardctl start` becomes, without the time that shardctl takes to load.
COMMAND = ("shardmq.supervisor",)
REMOTE_COMMAND = ("tests.support.remote_broker",)


Process = subprocess.Popen[str] | forked_broker.Forked


class Address(NamedTuple):
    """Where clients reach a broker, and who may log in; the password is the same word."""

    host: str
    port: int
    user: str = "guest"


class RealBroker:
    """A broker that starts at once.

    `stop` asserts a clean end. The kinds of processes are controller, shard and front-door. With
    `front_doors` 0 a front door and the shard of the same number are one process.
    """

    may_start = True  # false while a test runs that is not marked `broker`
    may_fork = True  # false while a test of the torture run runs

    def __init__(
        self,
        data_dir: Path,
        *,
        shards: int = 2,
        front_doors: int = 1,
        more: tuple[str, ...] = (),
        command: tuple[str, ...] = COMMAND,
        environment: Mapping[str, str] | None = None,
        remote_shards: bool = False,
        host: str = "127.0.0.1",
        user: str = "guest",
        prefix: tuple[str, ...] = (),
        forked: bool = True,
    ) -> None:
        """Start a broker; `environment` is added to the environment of this process.

        With `remote_shards` its shards are reached by TCP, as if they were on another node. `host`
        is where clients reach it, and `user` who they are. The command of its supervisor comes
        behind `prefix`. Without `forked` each process is started by a command, not by a fork
        (tests/support/forked_broker.py), as are those of another command than `shardctl start`.
        """
        self.host, self.user = host, user
        self._prefix = prefix
        self.data_dir = data_dir
        self._environment = {**os.environ, **(environment or {})}
        if remote_shards or (os.environ.get(REMOTE) and command == COMMAND):
            command = REMOTE_COMMAND
        self._command = command
        self._forked = (
            forked
            and self.may_fork
            and command == COMMAND
            and not prefix
            and forked_broker.may_fork(environment or {})
        )
        if os.environ.get(COMBINED):
            front_doors = 0
        self.combined = front_doors == 0  # with a front door, its shard dies, too
        self._arguments = ["--shards", str(shards), "--front-doors", str(front_doors), *more]
        self._port = 0  # the same after a restart, so that clients may come back
        self.amqp = self.http = self.metrics = ""
        self.addresses: dict[str, str] = {}  # all there are, by the names of the line `ready:`
        self.start()

    def start(self) -> None:
        assert self.may_start, "mark the test: @pytest.mark.broker"
        self.log_path = self.data_dir.with_name(self.data_dir.name + ".log")
        arguments = ["--data-dir", str(self.data_dir), "--amqp-port", str(self._port)]
        arguments += ["--http-port", "0", "--metrics-port", "0", *self._arguments]
        with self.log_path.open("ab") as log:
            self.process = self._started(arguments, log)
        self.amqp, self.http, self.metrics = self._wait_for_ready()
        self._port = int(self.amqp.rpartition(":")[2])
        threading.Thread(target=self._drain_output, args=(self.process,), daemon=True).start()

    def _started(self, arguments: list[str], log: IO[bytes]) -> Process:
        if self._forked:
            return forked_broker.template.start(arguments, self._environment, log)
        return subprocess.Popen(
            [*self._prefix, sys.executable, "-m", *self._command, *arguments],
            cwd=SOURCE,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )

    def _wait_for_ready(self) -> tuple[str, str, str]:
        assert self.process.stdout is not None
        overdue = threading.Timer(START_TIMEOUT_S, self._end_group)
        overdue.start()
        try:
            for line in self.process.stdout:
                if found := READY.match(line):
                    self.addresses = dict(word.split("=", 1) for word in line.split()[1:])
                    return found[1], found[2], found[3]
        finally:
            overdue.cancel()
        raise AssertionError(f"the broker did not get ready:\n{self.log_tail()}")

    @staticmethod
    def _drain_output(process: Process) -> None:
        assert process.stdout is not None
        for _ in process.stdout:
            pass

    # -- what it is --------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        return self._port

    @property
    def at(self) -> Address:
        return Address(self.host, self._port, self.user)

    @property
    def url(self) -> str:
        return f"amqp://{self.user}:{self.user}@{self.host}:{self.port}/"

    def status(self) -> dict[str, Any]:
        pointer = json.loads((self.data_dir / "broker.json").read_text())
        status: dict[str, Any] = json.loads(
            (Path(pointer["runtime_dir"]) / "status.json").read_text()
        )
        return status

    def pid(self, kind: str, index: int = 0) -> int:
        return int(self._child(kind, index)["pid"])

    def _child(self, kind: str, index: int) -> dict[str, Any]:
        for child in self.status()["children"]:
            number = child["front_door"] if kind == "front-door" else child["index"]
            if number == index and kind in (child["kind"], "front-door"):
                return dict(child)
        raise AssertionError(f"no {kind} {index}")

    def log_tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_SHOWN:])

    def has_logged(self, text: str) -> bool:
        return text in self.log_path.read_text(errors="replace")

    # -- what is done to it ------------------------------------------------------------------------

    def kill(self, kind: str, index: int = 0) -> None:
        """kill -9 one process and wait until another one of its kind is ready."""
        old = self.pid(kind, index)
        os.kill(old, signal.SIGKILL)
        wait_until(
            lambda: self.is_replaced(kind, index, old),
            f"{kind} {index} to come back",
            START_TIMEOUT_S,
        )

    def is_replaced(self, kind: str, index: int, old: int) -> bool:
        child = self._child(kind, index)
        return child["pid"] not in (0, old) and child["state"] == "ready"

    def kill_all(self) -> None:
        """Kill all processes as a power cut does, as nearly at one moment as signals allow."""
        # A supervisor that stands still starts no process, and one that has ended keeps its number.
        os.kill(self.process.pid, signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for children in threads for pid in children.read_text().split()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        pids.append(self.process.pid)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)
        wait_until(
            lambda: not any(is_running(pid) for pid in pids), "all processes to end", STOP_TIMEOUT_S
        )

    def restart(self) -> None:
        """Start again on the same data and port, after stop() or kill_all()."""
        self.start()

    def stop(self) -> None:
        """SIGTERM: drained, exit status 0."""
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._end_group()
            raise AssertionError(f"the broker did not stop:\n{self.log_tail()}") from None
        assert status == 0, f"exit status {status}:\n{self.log_tail()}"

    def clean_up(self) -> None:
        """Whatever a failed test left."""
        if self.process.poll() is None:
            self._end_group()

    def _end_group(self) -> None:
        """Kill the supervisor at once; its children notice the end of their lifeline."""
        self.process.kill()
        self.process.wait()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(happened: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    """Wait until `happened` returns true.

    `happened` may fail on what is not there yet: a file that is just being replaced, a port that is
    not open, a row that is not listed.
    """
    end = time.monotonic() + within_s
    at_last: Exception | None = None
    while time.monotonic() < end:
        try:
            if happened():
                return
            at_last = None
        except (OSError, ValueError, LookupError) as error:
            at_last = error
        time.sleep(0.02)
    raise AssertionError(f"waited {within_s:g} s for {what}") from at_last
