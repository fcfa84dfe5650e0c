"""Limit the bytes per second that all scans together may write. The time is an argument."""

from __future__ import annotations


class Pace:
    """A limit of bytes per second. After a pause, one second's worth may go at once."""

    def __init__(self, bytes_per_s: int) -> None:
        """Set the limit; 0 is no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def take(self, count: int, now: float) -> float:
        """Return how many seconds to wait after `count` bytes were written. `now` is in seconds."""
        if not self._bytes_per_s:
            return 0.0
        self._free_at = max(self._free_at, now - 1.0) + count / self._bytes_per_s
        return max(0.0, self._free_at - now)
