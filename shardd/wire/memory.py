"""How a process deals with its memory: each said once, at its start or when it is ready."""

from __future__ import annotations

import ctypes
import gc

# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


# Beyond the batches of a turn: what needs that much at once needs it seldom, as the hash of a password (16 MiB).
MAPPED_FROM_BYTES = 8 << 20


def keep_warm() -> None:
    """The memory of large messages: libzmq and Python allocate each, and by default glibc maps and unmaps it
    anew (measured: +20..50 %)."""
    libc = ctypes.CDLL(None)
    for option, value in (
        (M_MMAP_THRESHOLD, MAPPED_FROM_BYTES),
        (M_TRIM_THRESHOLD, 256 << 20),
        (M_TOP_PAD, 16 << 20),
    ):
        libc.mallopt(option, value)


# New objects that could be part of a cycle before the collector looks at them, and how many times before it looks at
# older ones: Python's 700 are gone through again and again while thousands of requests are on their way.
COLLECT_EACH, COLLECT_OLDER_EACH = 20_000, 20


def collect_seldom() -> None:
    """What is made per request ends by its last reference; the collector is for what is left."""
    gc.set_threshold(COLLECT_EACH, COLLECT_OLDER_EACH, COLLECT_OLDER_EACH)


# Changes of what exists after which a look at what they left in the heap pays.
BURST_CHANGES = 10_000


class AfterBursts:
    """Gives memory back when many things were made or removed, and that is over."""

    def __init__(self) -> None:
        self._seen = self._given_back = 0

    def look(self, version: int) -> None:
        """Now and then, with the number of changes there ever were."""
        if version == self._seen and version - self._given_back >= BURST_CHANGES:
            self._given_back = version
            give_back()
        self._seen = version


def give_back() -> None:
    """What is free to the operating system, holes too: once, after a start that needed much more than what stays."""
    ctypes.CDLL(None).malloc_trim(0)
