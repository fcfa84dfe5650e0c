"""Both sides of what a front door and a shard share to make a lane, in one process."""

from __future__ import annotations

import mmap
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from shardmq.shardd.wire.lane import Shared


def shared_by_two(memory: mmap.mmap) -> tuple[Shared, Shared]:
    """Return what each of two processes would have, with descriptors of its own."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (one, other):
        end.setblocking(False)
    first = Shared.make(one, memory)
    bells = os.dup(first.shard_bell), os.dup(first.door_bell)
    return first, Shared(other, memory, *bells)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Let this process open nothing more for a while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
