"""Ask which descriptors can be read, also above 1023, where select() ends."""

from __future__ import annotations

import select
from collections.abc import Iterable
from typing import Protocol


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def readable(files: Iterable[int | HasDescriptor], within_s: float = 0.0) -> list[int]:
    """Return the descriptors that have bytes or an end, as soon as one has or the time is over."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [fd for fd, _ in poll.poll(within_s * 1000)]


def is_readable(file: int | HasDescriptor, within_s: float = 0.0) -> bool:
    return bool(readable([file], within_s))
