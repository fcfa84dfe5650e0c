"""Remember the damage of one stream, and which offsets the damage costs.

Recovery and readers report what they find.
"""

from __future__ import annotations

from collections.abc import Callable

from shardmq.shardd.store.recovery import LOSSES, Damage

# Places of damage that are kept in full; the others are only counted.
DAMAGE_MAX = 100


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
