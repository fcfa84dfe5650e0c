"""Run Debian's RabbitMQ to measure it beside this broker: own node name, ports and directories.

    python bench/peers.py [--port 35672] -- python bench/run.py --runs 3

runs the command with `--peer rabbitmq=URL --peer-pid rabbitmq=PID --peer-restarts rabbitmq` added,
and removes the directories afterwards. Other brokers are given to run.py by URL.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from brokers import end
from generator import RunFailed, Target

# The script of this name in /usr/sbin changes to another user.
SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
READY_S_MAX = 60.0
LINES_SHOWN = 20
WATCH_S = 0.05  # a killed server is noticed after this time


@contextmanager
def rabbitmq(port: int) -> Iterator[Target]:
    """Run RabbitMQ on `port`; Erlang uses the two ports after it.

    A server that is killed is started again on its data.
    """
    if not SERVER.exists():
        raise RunFailed(f"{SERVER} is missing: apt-get install rabbitmq-server")
    with tempfile.TemporaryDirectory(prefix="bench-rabbitmq-") as directory:
        environment = settings(Path(directory), port)
        peer = Peer(Path(directory) / "out", environment)
        try:
            peer.start()
            peer.wait_for_port(port)
            peer.watch()
            yield Target("rabbitmq", f"amqp://guest:guest@127.0.0.1:{port}/", peer.process.pid)
        finally:
            peer.stop()
            # The port mapper of Erlang is a daemon that outlives the server.
            subprocess.run(["epmd", "-kill"], env=environment, capture_output=True, check=False)


class Peer:
    """The server's process, and its successors after a kill."""

    process: subprocess.Popen[bytes]

    def __init__(self, out: Path, environment: dict[str, str]) -> None:
        self._out = out
        self._environment = environment
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        with self._out.open("a") as out:
            self.process = subprocess.Popen(
                [str(SERVER)],
                env=self._environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for_port(self, port: int) -> None:
        """Wait until the server listens.

        Raises RunFailed, with the end of the server's output, if it ends or is not ready in time.
        """
        give_up = time.monotonic() + READY_S_MAX
        while self.process.poll() is None and time.monotonic() < give_up:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.2)
        tail = "\n".join(self._out.read_text(errors="replace").splitlines()[-LINES_SHOWN:])
        raise RunFailed(f"rabbitmq did not listen on port {port}; it said:\n{tail}")

    def watch(self) -> None:
        self._watcher.start()

    def _watch(self) -> None:
        while not self._over.wait(WATCH_S):
            if self.process.poll() is not None:
                self.start()

    def stop(self) -> None:
        self._over.set()
        if self._watcher.is_alive():
            self._watcher.join()
        end(self.process)


def settings(directory: Path, port: int) -> dict[str, str]:
    (directory / "plugins").write_text("[].\n")
    (directory / "rabbitmq.conf").write_text(f"listeners.tcp.default = 127.0.0.1:{port}\n")
    return {
        **os.environ,
        "HOME": str(directory),
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        "RABBITMQ_DIST_PORT": str(port + 1),
        "ERL_EPMD_PORT": str(port + 2),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_CRASH_DUMP": str(directory / "erl_crash.dump"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=35672)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with rabbitmq(arguments.port) as peer:
        added = ["--peer", f"{peer.name}={peer.url}", "--peer-pid", f"{peer.name}={peer.pid}"]
        added += ["--peer-restarts", peer.name]
        return subprocess.run([*command, *added], check=False).returncode if command else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(str(error))
