"""Let the processes with messages in hand run first where processors are short.

The controller and the reader keep their share of the processor, but use it when it is convenient.
They preempt nobody when they wake (SCHED_BATCH), and any other process that wakes may preempt them,
because their slice is longer (Linux 6.12 and later). Both settings need no privilege, and cost
nothing where the kernel refuses them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from typing import Final

SLICE_NS: Final = 20_000_000  # may be 0.1 to 100 ms; the default of other processes is at most 3 ms
# The number of the system call: glibc has a function for it only from 2.41 on.
SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
# struct sched_attr: size, policy, flags, nice, priority, runtime (here the slice), deadline, period
ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")


def messages_first() -> None:
    """Let other processes run before this thread and the threads that it starts."""
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
