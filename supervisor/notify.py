"""The child's side of the link between the supervisor and a child process.

A child tells the supervisor that the child is ready, alive or stopping, and what it does. The
messages are those of sd_notify, one datagram each. They go over a socket that the child inherits.
The environment variable SHARDMQ_NOTIFY_FD holds its descriptor.

The lifeline is the read end of a pipe, and only the supervisor holds the write end. End of file on
the lifeline means that the supervisor is gone. The child then drains as if it were told to stop.

No function of the link raises, and all do nothing in a process that no supervisor has started: a
child whose messages do not arrive still has its work to do.

At its start a child reads its section of the settings with `section`. The section comes by a
descriptor because every user of the host can read a command line, and the settings hold a password.
"""

from __future__ import annotations

import os
import socket
import time
from functools import cache

NOTIFY_FD = "SHARDMQ_NOTIFY_FD"
LIFELINE_FD = "SHARDMQ_LIFELINE_FD"
SECTION_FD = "fd:"  # The number of the descriptor follows.

DATAGRAM_BYTES_MAX = 4096
SECTION_BYTES_MAX = 128 << 10
WATCHDOG_INTERVAL_S = 1.0

# The exit status of a process that has to play another role in a cluster: it is started again.
DEPOSED = 3

_last_watchdog = 0.0


def section(argument: str) -> str:
    """Return the settings of this process as JSON.

    Args:
        argument: The value of `--config`: `fd:N` for the file at descriptor N, or the JSON itself.

    Raises:
        ValueError: The descriptor cannot be read.
    """
    if not argument.startswith(SECTION_FD):
        return argument
    try:
        with open(int(argument.removeprefix(SECTION_FD)), "rb") as file:
            return file.read().decode()
    except OSError as error:
        raise ValueError(f"--config {argument}: {error.strerror}") from None


def ready(**info: str) -> None:
    """Tell the supervisor that this process can be used from now on.

    Args:
        info: Facts that the supervisor shows beside the state of the child. They are sent as
            X_KEY=value.
    """
    lines = [f"X_{key.upper()}={_one_line(value)}" for key, value in info.items()]
    _send("\n".join(["READY=1", *lines]), wait=True)


def watchdog() -> None:
    """Tell the supervisor that this process is alive. At most one message a second is sent.

    The first call asks the supervisor to watch this process: from then on the supervisor kills the
    process when it is silent for `supervision.watchdog_s` seconds.
    """
    global _last_watchdog
    now = time.monotonic()
    if now - _last_watchdog >= WATCHDOG_INTERVAL_S:
        _last_watchdog = now
        _send("WATCHDOG=1", wait=False)


def stopping() -> None:
    """Tell the supervisor that this process drains and that its exit is intended."""
    _send("STOPPING=1", wait=True)


def status(text: str) -> None:
    """Tell the supervisor what this process is busy with, as a text for people.

    Before the process is ready, each status also proves that the process is alive.
    """
    _send(f"STATUS={_one_line(text)}", wait=False)


def alarm(reason: str) -> None:
    """Tell the supervisor why this process holds publishers back; "" when it does not any more."""
    _send(f"X_ALARM={_one_line(reason)}", wait=False)


def failing(why: str) -> None:
    """Tell the supervisor the reason of the exit that follows.

    The reason appears in the log and in the status of the supervisor, which outlive this process.
    """
    _send(f"STATUS={_one_line(why)}\nX_FAILURE={_one_line(why)}", wait=True)


def new_section() -> str | None:
    """Return the settings that the supervisor has sent before a SIGHUP, as JSON.

    Of several sections that wait, the last one is returned. None means that none waits.
    """
    fd, found = _inherited_fd(NOTIFY_FD), None
    while fd is not None:
        try:
            datagram = _socket(fd).recv(SECTION_BYTES_MAX, socket.MSG_DONTWAIT)
        except OSError:
            break
        if not datagram:
            break
        found = datagram.decode()
    return found


def setting(key: str, value: str) -> None:
    """Ask the supervisor to change a setting until the next start.

    The supervisor sends SIGHUP when the setting has changed.

    Args:
        key: The path of the key, such as `memory.high_watermark`.
        value: The value as TOML.
    """
    _send(f"X_SET={_one_line(key)}={_one_line(value)}", wait=True)


def lifeline_fd() -> int | None:
    """Return the descriptor that reads end of file when the supervisor is gone.

    None means that no supervisor has started this process.
    """
    return _inherited_fd(LIFELINE_FD)


def _send(text: str, wait: bool) -> None:
    fd = _inherited_fd(NOTIFY_FD)
    if fd is None:
        return
    try:
        _socket(fd).send(text.encode()[:DATAGRAM_BYTES_MAX], 0 if wait else socket.MSG_DONTWAIT)
    except OSError:
        pass  # The supervisor is gone, which the lifeline tells, or is busy until the next message.


@cache
def _socket(fd: int) -> socket.socket:
    sock = socket.socket(fileno=os.dup(fd))
    sock.setblocking(True)
    return sock


def _inherited_fd(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def _one_line(text: str) -> str:
    return str(text).replace("\n", " ")
