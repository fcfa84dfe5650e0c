"""Keep the memory of large messages: said once at the start of a process that sends or receives them."""

from __future__ import annotations

import ctypes

# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def keep_warm() -> None:
    """libzmq and Python allocate each large message; by default glibc maps and unmaps it anew (measured: +20..50 %)."""
    libc = ctypes.CDLL(None)
    for option, value in ((M_MMAP_THRESHOLD, 1 << 30), (M_TRIM_THRESHOLD, 256 << 20), (M_TOP_PAD, 16 << 20)):
        libc.mallopt(option, value)


def give_back() -> None:
    """What is free to the operating system, holes too: once, after a start that needed much more than what stays."""
    ctypes.CDLL(None).malloc_trim(0)
