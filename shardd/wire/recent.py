"""Remember which of the last few processes have been logged, so that a line is not a flood."""

from __future__ import annotations

from collections import deque

KEPT = 64


class RecentKeys:
    """The last KEPT keys that were added."""

    def __init__(self) -> None:
        self._keys: deque[tuple[int, ...]] = deque(maxlen=KEPT)

    def add(self, key: tuple[int, ...]) -> bool:
        """Return whether the key is new."""
        if key in self._keys:
            return False
        self._keys.append(key)
        return True
