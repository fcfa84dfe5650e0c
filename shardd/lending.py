"""Know the bodies that front doors have lent to this shard: where they lie, and which can be freed.

A shard maps the memory of each front door that lends bodies (wire/bodies.pyx). The store keeps the
place of such a body until the bytes are needed in its segment, or the segment needs no bytes any
more. Then the store gives the *hold* of the body back, and the front door hears of it in a FREED
message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Lender:
    """One front door that lends bodies to this shard.

    `memory` is what it has lent. `on_freed` is called when holds wait to be given back. A lender
    whose process is gone stays as long as some store needs its bodies: nobody changes them any
    more.
    """

    __slots__ = ("_freed", "_on_freed", "memory")

    def __init__(self, memory: memoryview, on_freed: Callable[[], None]) -> None:
        self.memory = memory
        self._on_freed = on_freed
        self._freed: dict[int, int] = {}  # holds to give back, by their run

    def let_go(self, run: int) -> None:
        """Give one hold of a run back."""
        if not self._freed:
            self._on_freed()
        self._freed[run] = self._freed.get(run, 0) + 1

    def let_all_go(self, runs: list[int]) -> None:
        for run in runs:
            self.let_go(run)

    def take_freed(self) -> dict[int, int]:
        """Return how many holds of each run the front door is to be told of."""
        freed, self._freed = self._freed, {}
        return freed


class LentBody(NamedTuple):
    """A body that lies in the memory of a front door, and the place that waits for it in a segment.

    `record`, `message` and `body` are positions in the segment. `size` is in bytes. `offset` and
    `run` say where the body lies in the memory of `lender`.
    """

    record: int
    message: int
    body: int
    size: int
    offset: int
    run: int
    lender: Lender


class LentMessages:
    """Stored messages on their way to consumers, whose bodies stay where a front door has them.

    `places` has each message with the place of its body instead of the body (wire/bodies.pyx). The
    length is that of the messages with their bodies.
    """

    __slots__ = ("_bodies", "_heads", "_size", "lender")

    def __init__(self, lender: Lender, heads: list[bytes], bodies: Sequence[LentBody]) -> None:
        """`heads` are the messages as `places` has them."""
        self.lender = lender
        self._heads = heads
        self._bodies = bodies
        self._size = sum([body.body - body.message + body.size for body in bodies])

    def __len__(self) -> int:
        return self._size

    @property
    def places(self) -> bytes:
        return b"".join(self._heads)

    def joined(self) -> bytes:
        """Return the messages with copies of their bodies."""
        memory, parts = self.lender.memory, []
        for head, body in zip(self._heads, self._bodies, strict=True):
            parts += (head[: body.body - body.message], memory[body.offset :][: body.size])
        return b"".join(parts)
