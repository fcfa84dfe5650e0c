"""The child's side of what supervisor and child tell each other: ready, alive, stopping, a line of status.

The words are sd_notify's, one datagram each, over a socket the supervisor left open (its number in SHARDMQ_NOTIFY_FD).
The lifeline is the read end of a pipe whose only write end the supervisor holds: its end of file means the supervisor
is gone, and the child drains as if told to stop. Every call of these does nothing in a process no supervisor started,
and none raises: a child that cannot be heard still has its work to do.

Before all that the child reads its `section` of the settings, which comes by a descriptor too: a command line is there
for every user of the host to read, and the settings hold a password.
"""

from __future__ import annotations

import os
import socket
import time
from functools import cache

NOTIFY_FD = "SHARDMQ_NOTIFY_FD"
LIFELINE_FD = "SHARDMQ_LIFELINE_FD"
SECTION_FD = "fd:"  # before the number of the descriptor

DATAGRAM_BYTES_MAX = 4096
SECTION_BYTES_MAX = 128 << 10
WATCHDOG_INTERVAL_S = 1.0

_last_watchdog = 0.0


def section(argument: str) -> str:
    """The JSON that `--config` means: `fd:N` is what descriptor N holds, else it is the JSON itself, as given by hand.

    Raises ValueError when there is nothing to be read there.
    """
    if not argument.startswith(SECTION_FD):
        return argument
    try:
        with open(int(argument.removeprefix(SECTION_FD)), "rb") as file:
            return file.read().decode()
    except OSError as error:
        raise ValueError(f"--config {argument}: {error.strerror}") from None


def ready(**info: str) -> None:
    """May be used from now on. `info` is kept beside the child's state, upper-cased, as X_KEY=value."""
    lines = [f"X_{key.upper()}={_one_line(value)}" for key, value in info.items()]
    _send("\n".join(["READY=1", *lines]), wait=True)


def watchdog() -> None:
    """Still turning. Call it as often as is handy: no more than one a second is sent.

    The first call asks to be watched: from then on a silence of `supervision.watchdog_s` is answered with SIGKILL.
    """
    global _last_watchdog
    now = time.monotonic()
    if now - _last_watchdog >= WATCHDOG_INTERVAL_S:
        _last_watchdog = now
        _send("WATCHDOG=1", wait=False)


def stopping() -> None:
    """Draining; the exit that follows is meant."""
    _send("STOPPING=1", wait=True)


def status(text: str) -> None:
    """What the child is busy with, for people. While it is not ready it also says that it gets on."""
    _send(f"STATUS={_one_line(text)}", wait=False)


def failing(why: str) -> None:
    """The exit that follows is for this reason: for the supervisor's log and status, which outlive the process."""
    _send(f"STATUS={_one_line(why)}\nX_FAILURE={_one_line(why)}", wait=True)


def new_section() -> str | None:
    """After SIGHUP: the settings as they are from now on, the last of those the supervisor has sent; None without."""
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
    """Ask for a setting to be another until the next start; SIGHUP tells when it is."""
    _send(f"X_SET={_one_line(key)}={_one_line(value)}", wait=True)


def lifeline_fd() -> int | None:
    """Becomes readable (end of file) when the supervisor is gone; None without one."""
    return _inherited_fd(LIFELINE_FD)


def _send(text: str, wait: bool) -> None:
    fd = _inherited_fd(NOTIFY_FD)
    if fd is None:
        return
    try:
        _socket(fd).send(text.encode()[:DATAGRAM_BYTES_MAX], 0 if wait else socket.MSG_DONTWAIT)
    except OSError:
        pass  # the supervisor is gone (the lifeline says so) or is busy, and the next call says it again


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
