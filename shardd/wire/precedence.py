"""Whom the scheduler lets go first where processors are short: who has messages in hand.

Controller and reader keep their share of the processor's time, but take it when it is convenient: they take a
processor from nobody when they wake (SCHED_BATCH), and whoever else wakes may take theirs, since their slice is longer
(Linux 6.12 and later). Both are asked of the kernel without any right, and cost nothing where they are refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from typing import Final

SLICE_NS: Final = 20_000_000  # of 0.1 to 100 ms; what others have by default is 3 ms at the most
# glibc has a function for it from 2.41 on only.
SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
# struct sched_attr: its size, policy, flags, nice, priority, runtime (here the slice), deadline, period
ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")


def messages_first() -> None:
    """Of this thread, and of those it starts."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        call = SCHED_SETATTR.get(platform.machine())
        if call is not None:
            attributes = ATTRIBUTES.pack(
                ATTRIBUTES.size,
                os.SCHED_BATCH,
                0,
                os.getpriority(os.PRIO_PROCESS, 0),
                0,
                SLICE_NS,
                0,
                0,
            )
            ctypes.CDLL(None).syscall(call, 0, attributes, 0)
