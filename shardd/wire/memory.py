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


# Changes of the catalog, and bytes of messages, after which it pays to give free memory back.
BURST_CHANGES = 10_000
BURST_BYTES = 16 << 20


class AfterBursts:
    """Gives free memory back when a process is quiet again after much work.

    While the work goes on, the process needs the same memory again.
    """

    def __init__(self, burst: int) -> None:
        """`burst` is the least amount of work after which it pays, in units of the caller."""
        self._burst = burst
        self._seen = self._given_back = 0

    def give_back_if_over(self, work: int) -> None:
        """Give memory back if no work was done since the last call, and a burst before it.

        `work` is the amount of all work so far. A process calls this each second.
        """
        if work == self._seen and abs(work - self._given_back) >= self._burst:
            self._given_back = work
            give_back()
        self._seen = work


def give_back() -> None:
    """Give free memory back to the operating system, also from holes in the heap."""
    ctypes.CDLL(None).malloc_trim(0)
