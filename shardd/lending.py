"""Know the bodies that front doors have lent to this shard: where they lie, and which can be freed.

A shard maps the memory of each front door that lends bodies (wire/bodies.pxi). The store keeps the
place of such a body until the bytes are needed in its segment, or the segment needs no bytes any
more. Then the store gives the *hold* of the body back, and the front door hears of it in a FREED
message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

PLACE_BYTES: Final = 16
_SIZES = struct.Struct("<II")
_OFFSET = struct.Struct("<Q")


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

    def let_go(self, run: int, holds: int = 1) -> None:
        """Give holds of a run back."""
        if not self._freed:
            self._on_freed()
        self._freed[run] = self._freed.get(run, 0) + holds

    def let_all_go(self, runs: list[int]) -> None:
        for run in runs:
            self.let_go(run)

    def take_freed(self) -> dict[int, int]:
        """Return how many holds of each run the front door is to be told of."""
        freed, self._freed = self._freed, {}
        return freed


class LentMessages:
    """Stored messages on their way to consumers, whose bodies stay where a front door has them.

    `places` has each message with the place of its body instead of the body (wire/bodies.pxi). The
    length is what the messages weigh in windows and passes.
    """

    __slots__ = ("_places", "_weight", "lender")

    def __init__(self, lender: Lender, places: bytes, weight: int) -> None:
        self.lender = lender
        self._places = places
        self._weight = weight

    def __len__(self) -> int:
        return self._weight

    def seen_by(self, lender: Lender | None) -> tuple[bytes, bool]:
        """Return what a DELIVER to a front door has, and whether that has places of bodies.

        A front door that did not lend these bodies gets copies of them.
        """
        return (self._places, True) if lender is self.lender else (self._joined(), False)

    def _joined(self) -> bytes:
        places, memory, at = self._places, self.lender.memory, 0
        parts: list[bytes | memoryview] = []
        while at < len(places):
            body_bytes, props_bytes = _SIZES.unpack_from(places, at)
            end = at + _SIZES.size
            end += 1 + places[end]
            end += 1 + places[end] + props_bytes
            (offset,) = _OFFSET.unpack_from(places, end)
            parts += (places[at:end], memory[offset : offset + body_bytes])
            at = end + PLACE_BYTES
        return b"".join(parts)
