"""The supervisor's side of systemd: messages by the protocol of sd_notify, and socket activation.

The functions do nothing in a process that systemd has not started.
"""

from __future__ import annotations

import os
import socket
import time

FIRST_SOCKET = 3  # SD_LISTEN_FDS_START


def tell(*lines: str) -> None:
    """Send lines such as `READY=1` to systemd. A message that cannot be sent is dropped."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    target = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.sendto("\n".join(lines).encode(), socket.MSG_DONTWAIT, target)
    except OSError:
        pass  # systemd is restarting. The next message reaches it.


def watchdog_interval_s() -> float | None:
    """Return the seconds between two `WATCHDOG=1`: half of WatchdogSec of the unit.

    None means that systemd does not watch this process.
    """
    text = os.environ.get("WATCHDOG_USEC", "")
    if not text.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(text) / 2_000_000


def reloading() -> None:
    """Tell systemd that a reload begins. The caller sends `READY=1` when the reload is over.

    The time in the message lets systemd tell two reloads apart.
    """
    tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def sockets() -> dict[str, list[socket.socket]]:
    """Return the sockets that systemd has opened, by name (FileDescriptorName= of the socket unit).

    The dictionary is empty if systemd has opened no sockets or has opened them for another process.
    """
    count = os.environ.get("LISTEN_FDS", "")
    if not count.isdigit() or os.environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    found: dict[str, list[socket.socket]] = {}
    for at in range(int(count)):
        fd = FIRST_SOCKET + at
        os.set_inheritable(fd, False)
        name = names[at] if at < len(names) else "unknown"
        # A socket unit without FileDescriptorName= gives its own name, such as shardmq-amqp.socket.
        name = name.removesuffix(".socket").removeprefix("shardmq-")
        found.setdefault(name, []).append(socket.socket(fileno=fd))
    return found
