"""Set how a process uses its memory.

A process calls each function once, at its start or when it is ready.
"""

from __future__ import annotations

import ctypes
import gc

# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


# Larger than the batches of a pass. Larger allocations are rare, such as a password hash (16 MiB).
MAPPED_FROM_BYTES = 8 << 20


def keep_warm() -> None:
    """Keep the memory of large messages mapped.

    libzmq and Python allocate memory for each large message, and by default glibc maps and unmaps
    that memory each time (measured: +20 to 50 %).
    """
    libc = ctypes.CDLL(None)
    for option, value in (
        (M_MMAP_THRESHOLD, MAPPED_FROM_BYTES),
        (M_TRIM_THRESHOLD, 256 << 20),
        (M_TOP_PAD, 16 << 20),
    ):
        libc.mallopt(option, value)


# The number of new container objects after which the collector runs, and the number of runs after
# which it looks at older objects. With Python's default of 700 the collector would go through the
# objects of thousands of requests under way again and again.
COLLECT_EACH, COLLECT_OLDER_EACH = 20_000, 20


def collect_seldom() -> None:
    """Make the garbage collector run seldom.

    The objects of a request end with their last reference, so the collector finds few cycles.
    """
    gc.set_threshold(COLLECT_EACH, COLLECT_OLDER_EACH, COLLECT_OLDER_EACH)


# Changes of the catalog after which it pays to give free memory back.
BURST_CHANGES = 10_000


class AfterBursts:
    """Gives memory back after many things were made or removed."""

    def __init__(self) -> None:
        self._seen = self._given_back = 0

    def give_back_if_over(self, version: int) -> None:
        """Give memory back if a burst of changes is over; `version` counts all changes so far."""
        if version == self._seen and version - self._given_back >= BURST_CHANGES:
            self._given_back = version
            give_back()
        self._seen = version


def give_back() -> None:
    """Give free memory back to the operating system, also from holes in the heap.

    A process calls this once, after a start that needed much more memory than serving does.
    """
    ctypes.CDLL(None).malloc_trim(0)
