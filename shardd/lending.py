"""Know the bodies that front doors have lent to this shard: where they lie, and which can be freed.

A shard maps the memory of each front door that lends bodies (wire/bodies.pyx). The store keeps the
place of such a body until the bytes are needed in its segment, or the segment needs no bytes any
more. Then the store gives the *hold* of the body back, and the front door hears of it in a FREED
message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

# A lent body weighs this part of its bytes in the window of deliveries.
LENT_SHARE = 4


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

    @property
    def weight(self) -> int:
        """Return what the message weighs in windows and passes.

        A lent body weighs a part of its bytes: it takes no room in a ring, and no time to copy.
        """
        return self.body - self.message + self.size // LENT_SHARE


class LentMessages:
    """Stored messages on their way to consumers, whose bodies stay where a front door has them.

    The length is what the messages weigh in windows and passes.
    """

    __slots__ = ("_bodies", "_heads", "_weight", "lender")

    def __init__(self, lender: Lender, heads: list[bytes], bodies: Sequence[LentBody]) -> None:
        """`heads` are the messages with the places of their bodies in place of the bodies."""
        self.lender = lender
        self._heads = heads
        self._bodies = bodies
        self._weight = sum([body.weight for body in bodies])

    def __len__(self) -> int:
        return self._weight

    def seen_by(self, lender: Lender | None) -> tuple[bytes, bool]:
        """Return what a DELIVER to a front door has, and whether that has places of bodies.

        A front door that did not lend these bodies gets copies of them.
        """
        if lender is self.lender:
            return b"".join(self._heads), True
        memory = self.lender.memory
        parts: list[bytes | memoryview] = []
        for head, body in zip(self._heads, self._bodies, strict=True):
            parts += (head[: body.body - body.message], memory[body.offset :][: body.size])
        return b"".join(parts), False
