"""How many bytes a second all scans together may write. Pure: time is an argument."""

from __future__ import annotations


class Pace:
    """A second's worth may go at once after a pause."""

    def __init__(self, bytes_per_s: int) -> None:
        """0: no bound."""
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def take(self, count: int, now: float) -> float:
        """Seconds to wait after `count` bytes were written."""
        if not self._bytes_per_s:
            return 0.0
        self._free_at = max(self._free_at, now - 1.0) + count / self._bytes_per_s
        return max(0.0, self._free_at - now)
