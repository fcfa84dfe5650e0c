"""Define damage, and remember the damage of one stream with the offsets that it costs.

Recovery and readers report what they find.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# Places of damage that are kept in full; the others are only counted.
DAMAGE_MAX = 100


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged place in a file of a store or a stream.

    The values of `what`: "torn": the end of a segment, which was cut off. "corrupt": bad bytes
    between good records, which are kept in damaged.N. "header": no good record can be told; the
    file is kept as lost.N. "mendable": a header that the index can restore, without loss.
    "unreadable": the disk does not return these bytes; only tools that inspect a store report this,
    and a start fails. "missing": the whole file is gone. "untrue": an index that contradicts its
    segment, which only tools report.

    `offsets` is for a stream: the first lost offset and the one behind the last, as far as they are
    known.
    """

    file: str
    what: str
    start: int
    stop: int
    offsets: tuple[int, int] | None = field(default=None, compare=False)


# The kinds of damage that cost messages that were stored.
LOSSES = frozenset(("corrupt", "header", "missing"))


class KnownDamage:
    """Remembers the places of damage of one stream.

    `places` holds the first DAMAGE_MAX places. `lossy` counts the places that cost messages, `torn`
    the others. `heard` is called with each place that is found from now on.
    """

    def __init__(self) -> None:
        self.places: list[Damage] = []
        self.lossy = 0
        self.torn = 0
        self.heard: Callable[[Damage], None] | None = None

    def report(self, damage: Damage) -> None:
        """Remember a place of damage, unless another reader found it before."""
        if damage in self.places:
            return
        if damage.what in LOSSES:
            self.lossy += 1
        else:
            self.torn += 1
        if len(self.places) < DAMAGE_MAX:
            self.places.append(damage)
        if self.heard is not None:
            self.heard(damage)

    def gaps(self) -> list[tuple[int, int]]:
        """Return the offsets whose messages are known to be lost, as [from, to), ascending."""
        return sorted(one.offsets for one in self.places if one.offsets is not None)
