"""What systemd is told, in sd_notify's words; nothing when it did not start us with Type=notify."""

from __future__ import annotations

import os
import socket


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
