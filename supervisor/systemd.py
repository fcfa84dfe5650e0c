"""What systemd is told, in sd_notify's words, and the sockets it has opened for us; without it nothing."""

from __future__ import annotations

import os
import socket
import time

FIRST_SOCKET = 3  # SD_LISTEN_FDS_START


def tell(*lines: str) -> None:
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    target = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.sendto("\n".join(lines).encode(), socket.MSG_DONTWAIT, target)
    except OSError:
        pass  # systemd restarting itself: the next line will reach it


def watchdog_interval_s() -> float | None:
    """Half of what the unit's WatchdogSec allows."""
    text = os.environ.get("WATCHDOG_USEC", "")
    if not text.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(text) / 2_000_000


def reloading() -> None:
    """To be followed by READY=1. The time tells systemd which of two reloads it is."""
    tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def sockets() -> dict[str, list[socket.socket]]:
    """Those of socket activation by their names (FileDescriptorName=); {} when they are not for this process."""
    count = os.environ.get("LISTEN_FDS", "")
    if not count.isdigit() or os.environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    found: dict[str, list[socket.socket]] = {}
    for at in range(int(count)):
        fd = FIRST_SOCKET + at
        os.set_inheritable(fd, False)
        name = names[at] if at < len(names) else "unknown"
        # systemd names what has no FileDescriptorName= after its unit.
        name = name.removesuffix(".socket").removeprefix("shardmq-")
        found.setdefault(name, []).append(socket.socket(fileno=fd))
    return found
