"""Remember the damage of one stream: what recovery and readers found, and which offsets it costs."""

from __future__ import annotations

from collections.abc import Callable

from shardmq.shardd.store.recovery import LOSSES, Damage

# Places of damage that are told in full; the others are counted.
DAMAGE_MAX = 100


class KnownDamage:
    """`places`: the first DAMAGE_MAX. `lossy`: how many places cost messages; `torn`: the others.

    `heard` is called with each place that is found from now on.
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
        """Return offsets whose messages are known to be lost, [from, to) each, ascending."""
        return sorted(one.offsets for one in self.places if one.offsets is not None)
