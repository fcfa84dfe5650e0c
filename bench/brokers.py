"""Start and end this broker for a measurement, with its own data directory and free ports.

The data directory is removed afterwards.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

import machine
import pamqp.exceptions
import pamqp.frame
from generator import RunFailed, Target

ROOT = Path(__file__).parents[1]
OWN_NAME = "shardmq"
READY_S_MAX = 60.0
DRAIN_S_MAX = 30.0
LOG_LINES_SHOWN = 20
ANSWER_S_MAX = 10.0
AMQP_PORT = 5672


@contextmanager
def own_broker(
    data_parent: Path | None,
    python: str = sys.executable,
    flags: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Target]:
    """Run this broker on a fresh data directory below `data_parent`.

    The disk of `data_parent` is the disk that is measured. `flags` are added to the start command,
    and `variables` to its environment.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", dir=data_parent) as directory:
        log = Path(directory) / "log"
        command = [
            python,
            "-m",
            "shardmq.supervisor.cli",
            "start",
            "--data-dir",
            str(Path(directory) / "data"),
        ]
        command += ["--amqp-port", "0", "--http-port", "0", "--metrics-port", "0", *flags]
        with log.open("w") as errors:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        try:
            line = ready_line(process, log)
            amqp, http = (address_of(line, name) for name in ("amqp", "http"))
            yield Target(OWN_NAME, f"amqp://guest:guest@{amqp}/", process.pid, http)
        finally:
            end(process)


def ready_line(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the line `ready: amqp=HOST:PORT http=HOST:PORT ...` of a broker that starts.

    Raises RunFailed, with the end of the log, if the broker ends or is not ready in time.
    """
    assert process.stdout
    give_up = time.monotonic() + READY_S_MAX
    text = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, give_up - time.monotonic())):
            piece = os.read(process.stdout.fileno(), 4096)
            text += piece
            for line in text.decode(errors="replace").splitlines(keepends=True):
                if line.startswith("ready:") and line.endswith("\n"):
                    return line
            if not piece:
                break
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
    late = time.monotonic() >= give_up
    what = (
        f"the broker was not ready within {READY_S_MAX:.0f} s"
        if late
        else "the broker ended before it was ready"
    )
    raise RunFailed(f"{what}; it said:\n{tail}")


def address_of(ready_line: str, name: str) -> str:
    """Return the address HOST:PORT to connect to for one name of the ready line."""
    words = dict(word.split("=", 1) for word in ready_line.split()[1:] if "=" in word)
    host, _, port = words[name].rpartition(":")
    return f"{'127.0.0.1' if host in ('', '0.0.0.0', '[::]') else host}:{port}"


def port_of(url: str) -> int:
    return urlsplit(url).port or AMQP_PORT


def supervisor_of(pid: int | None) -> int | None:
    """Return the pid of the broker's top process for the pid of any process of the broker.

    The front door is the process that listens, but the top process is the one that started the
    shards.
    """
    while pid is not None and (fields := machine.stat_fields(pid)):
        parent = int(fields[1])
        if b"supervisor" not in command_line(parent):
            return pid
        pid = parent
    return None


def command_line(pid: int) -> bytes:
    try:
        return (machine.PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""


def server_properties(url: str) -> dict[str, str]:
    """Return a broker's product, version and so on from connection.start, {} without an answer."""
    try:
        with socket.create_connection(
            (urlsplit(url).hostname or "", port_of(url)), ANSWER_S_MAX
        ) as own:
            own.sendall(b"AMQP\0\0\x09\x01")
            got = b""
            while len(got) < 7 or len(got) < 8 + struct.unpack_from(">I", got, 3)[0]:
                if not (piece := own.recv(4096)):
                    return {}
                got += piece
            start = pamqp.frame.unmarshal(got)[2]
    except (OSError, pamqp.exceptions.UnmarshalingException):
        return {}
    said = getattr(start, "server_properties", {})
    return {
        name: str(said[name])
        for name in ("product", "version", "platform", "information")
        if name in said
    }


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the broker to end; after the longest drain, kill the whole session it was started in."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(DRAIN_S_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout:
        process.stdout.close()
