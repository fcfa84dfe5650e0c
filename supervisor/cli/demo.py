"""A cluster of several nodes on this machine, for a look: `shardctl cluster demo`.

Each node is a broker of its own with an address of its own, from 127.0.0.2 on, and all of them have
one etcd. Nothing is meant to stay: a node that ends is not started again, so that one can see what
the others do.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from shardmq.supervisor import modules
from shardmq.supervisor.cli.api import FAILED, UNREACHABLE, USAGE, fail

NODES_MAX: Final = 9
ETCD_S_MAX: Final = 20.0
READY_S_MAX: Final = 120.0
END_S_MAX: Final = 60.0
LOOK_S: Final = 0.05
NO_ETCD: Final = (
    "no etcd is installed, or it is not on the PATH: the nodes of a cluster need one. On Debian: "
    "apt-get install etcd-server"
)


def demo(
    dir: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Keeps the data of all nodes, and logs.")
    ],
    nodes: Annotated[int, typer.Option(min=1, max=NODES_MAX, help="How many nodes.")] = 3,
    shards: Annotated[int, typer.Option(min=1, max=7, help="The shards of each node.")] = 2,
    amqp_port: Annotated[int, typer.Option(help="AMQP port of all nodes.")] = 5672,
    http_port: Annotated[int, typer.Option(help="HTTP port of all nodes.")] = 15672,
    metrics_port: Annotated[int, typer.Option(help="Port of the metrics of all nodes.")] = 15692,
) -> None:
    """Run a cluster of several nodes on this machine until Ctrl-C or SIGTERM.

    The nodes have the addresses 127.0.0.2, 127.0.0.3 and so on, and keep their data in DIR/node-1,
    DIR/node-2 and so on. DIR/node-1/pid is the process id of the first one, and DIR/node-1/log its
    log. When all are ready, one line says `ready:` and the URL of each.
    """
    # `make` puts an etcd beside the interpreter of its environment.
    path = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
    etcd = shutil.which("etcd", path=path)
    if etcd is None:
        fail(NO_ETCD, UNREACHABLE)
    dir = dir.absolute()
    try:
        dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"{dir}: {error.strerror}", USAGE)
    ports = {"amqp": amqp_port, "http": http_port, "metrics": metrics_port}
    cluster = _Demo(dir, etcd, [_address(index) for index in range(nodes)], shards, ports)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, cluster.stop)
    status = cluster.run()
    if status:
        raise typer.Exit(status)


def _address(index: int) -> str:
    return f"127.0.0.{index + 2}"


class _Demo:
    """The processes of a demo, each of which has its log in a file."""

    def __init__(
        self, dir: Path, etcd: str, addresses: list[str], shards: int, ports: dict[str, int]
    ) -> None:
        self._dir = dir
        self._etcd = etcd
        self._addresses = addresses
        self._shards = shards
        self._ports = ports
        self._store: subprocess.Popen[bytes] | None = None
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._stops = False

    def stop(self, number: int, frame: object) -> None:
        """End the demo; a handler of signals."""
        self._stops = True

    def run(self) -> int:
        """Start all, wait for a signal, and end all; return the exit status."""
        try:
            endpoint = self._start_etcd()
            if endpoint:
                for index in range(len(self._addresses)):
                    self._start_node(index, endpoint)
                if self._wait_until_ready():
                    urls = (
                        f"amqp://guest:guest@{at}:{self._ports['amqp']}/" for at in self._addresses
                    )
                    typer.echo(f"ready: {' '.join(urls)}")
                    self._watch()
            return 0 if self._stops else FAILED
        finally:
            self._end()

    def _start_etcd(self) -> str:
        """Start etcd at free ports; return its endpoint, or "" if it does not answer."""
        with (
            socket.create_server(("127.0.0.1", 0)) as one,
            socket.create_server(("127.0.0.1", 0)) as other,
        ):
            client, peer = (f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in (one, other))
            port = one.getsockname()[1]
        command = [
            self._etcd, "--name", "demo", "--data-dir", str(self._dir / "etcd"),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"demo={peer}", "--logger", "zap",
        ]  # fmt: skip
        # The peer of a single member is itself, under the address of this start.
        if (self._dir / "etcd" / "member").exists():
            command.append("--force-new-cluster")
        self._store = self._spawn(command, self._dir / "etcd.log", os.environ)
        until = time.monotonic() + ETCD_S_MAX
        while time.monotonic() < until and not self._stops and self._store.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError:
                time.sleep(LOOK_S)
            else:
                return client
        if not self._stops:
            typer.echo(f"etcd does not answer, see {self._dir / 'etcd.log'}", err=True)
        return ""

    def _start_node(self, index: int, endpoint: str) -> None:
        name, address = f"node-{index + 1}", self._addresses[index]
        folder = self._dir / name
        folder.mkdir(exist_ok=True)
        arguments = [
            "--data-dir", str(folder / "data"), "--bind", address, "--address", address,
            "--cluster-name", "demo", "--etcd", endpoint, "--node", name,
            "--shards", str(self._shards),
        ]  # fmt: skip
        for protocol, port in self._ports.items():
            arguments += [f"--{protocol}-port", str(port)]
        command = modules.command("shardmq.supervisor", *arguments)
        environment = {**modules.environment(), "SHARDMQ_CLUSTER_SECRET": self._secret()}
        node = self._nodes[name] = self._spawn(command, folder / "log", environment)
        (folder / "pid").write_text(f"{node.pid}\n")

    def _secret(self) -> str:
        """Return the secret of the demo, which stays the same in its directory."""
        path = self._dir / "secret"
        if not path.exists():
            path.touch(0o600)
            path.write_text(secrets.token_urlsafe(24))
        return path.read_text()

    def _spawn(
        self, command: list[str], log: Path, environment: os._Environ[str] | dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own, so that Ctrl-C reaches the demo alone."""
        with log.open("wb") as file:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=environment, start_new_session=True,
            )  # fmt: skip

    def _wait_until_ready(self) -> bool:
        until = time.monotonic() + READY_S_MAX
        waiting = set(self._nodes)
        while waiting and not self._stops:
            for name in sorted(waiting):
                log = self._dir / name / "log"
                if self._nodes[name].poll() is not None:
                    typer.echo(f"{name} has ended before it was ready, see {log}", err=True)
                    return False
                if any(line.startswith(b"ready: ") for line in log.read_bytes().splitlines()):
                    waiting.discard(name)
            if time.monotonic() > until:
                typer.echo(f"not ready after {READY_S_MAX:g} s: {', '.join(waiting)}", err=True)
                return False
            time.sleep(LOOK_S)
        return not self._stops

    def _watch(self) -> None:
        """Wait for a signal, and say when a process ends."""
        gone: set[str] = set()
        while not self._stops:
            processes = self._nodes | ({"etcd": self._store} if self._store is not None else {})
            for name, process in processes.items():
                if process.poll() is not None and name not in gone:
                    gone.add(name)
                    typer.echo(f"{name} has ended", err=True)
            time.sleep(LOOK_S)

    def _end(self) -> None:
        """End all nodes at the same time, and then etcd."""
        for stage in (list(self._nodes.values()), [self._store]):
            for process in stage:
                if process is not None and process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            for process in stage:
                if process is None:
                    continue
                try:
                    process.wait(END_S_MAX)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
