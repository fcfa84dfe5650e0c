"""A shard in a process of its own that listens at a TCP socket, and peers that talk to it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import zmq

from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.session import SessionKeys, first_incarnation, prepare
from tests.support.other_release import VARIABLE
from tests.support.real_broker import SOURCE

HOST = "127.0.0.3"
NUMBER = 5
WAIT_MS = 30_000
TRIES = 20  # of some seconds each

_numbers = itertools.count(1)


def new_keys(silent_s: float = 10.0) -> SessionKeys:
    public, secret = zmq.curve_keypair()
    return SessionKeys(public.decode(), secret.decode(), silent_s)


class RemoteShard:
    """A shard without queues, which is ready when a controller has joined it."""

    def __init__(
        self, directory: Path, keys: SessionKeys, wire_versions: tuple[int, int] | None = None
    ) -> None:
        """Start it; `wire_versions` are those that it understands, if it is of another release."""
        module, environment = "shardmq.shardd", {**os.environ, "PYTHONPATH": str(SOURCE)}
        if wire_versions is not None:
            module = "tests.support.other_release"
            environment[VARIABLE] = json.dumps({"wire": wire_versions})
        self.keys = keys
        (directory / "run").mkdir()
        self._listener = socket.create_server((HOST, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self.address = f"tcp://{HOST}:{self.port}"
        self._log = directory / "shard.log"
        fd = self._listener.fileno()
        config = {
            "data_dir": str(directory / "data"),
            "runtime_dir": str(directory / "run"),
            "shard": NUMBER,
            "session_fd": fd,
            "session_keys": {
                "public": keys.public, "secret": keys.secret, "silent_s": keys.silent_s
            },
        }  # fmt: skip
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "--config", json.dumps(config)],
                cwd=SOURCE,
                pass_fds=(fd,),
                stderr=log,
                env=environment,
            )

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def log(self) -> str:
        return self._log.read_text()

    def controller(self) -> RemotePeer:
        """Return the controller of the shard, which has just started; it has no queues."""
        for _ in range(TRIES):
            made = RemotePeer(self)
            if (hello := made.join()) is not None:
                break
            made.close()  # the shard has not begun to listen
        assert isinstance(hello, wire.Hello) and not hello.ready, hello
        made.tell(wire.Assign([]))
        while not (isinstance(hello, wire.Hello) and hello.ready):
            hello = made.hear()
            assert hello is not None
        return made

    def close(self) -> None:
        """SIGTERM; the exit status is 0."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log()
        self._listener.close()


class RemotePeer:
    """One session of a controller or front door, by hand."""

    def __init__(
        self,
        shard: RemoteShard,
        *,
        number: int = wire.CONTROLLER,
        keys: SessionKeys | None = None,
        server: str | None = None,
        address: str | None = None,
        incarnation: int = 0,
    ) -> None:
        self.number = number
        self.incarnation = incarnation or first_incarnation() + next(_numbers)
        self.epoch = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        keys = keys or shard.keys
        prepare(self._socket, keys)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.curve_serverkey = (server or shard.keys.public).encode()
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._socket.connect(address or shard.address)

    def tell(self, what: wire.Control) -> None:
        self._socket.send(envelope.control(self.number, self.incarnation, self.epoch, NUMBER, what))

    def hear(self, wait_ms: int = WAIT_MS) -> wire.Control | None:
        """Return the next control message, or None if none comes or the session ends."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while found := dict(poller.poll(wait_ms)):
            if self._socket not in found:
                return None
            message = self._socket.recv()
            head = envelope.read(message)
            assert (head.peer, head.shard) == (self.number, NUMBER)
            if head.kind == wire.CONTROL:
                self.epoch = head.epoch
                return envelope.read_control(message)
        return None

    def join(self, **more: Any) -> wire.Control | None:
        self.tell(wire.Join("", **more))
        return self.hear()

    def stats(self) -> dict[str, float]:
        self.tell(wire.Stats(1))
        while not isinstance(said := self.hear(), wire.StatsReply):
            assert said is not None
        return said.process

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()
