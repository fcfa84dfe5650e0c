"""The growing waits of what is tried again for ever."""

from __future__ import annotations


class Backoff:
    """Waits that double from `first_s` to `longest_s` seconds, until a success resets them."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def reset(self) -> None:
        """Begin with the first wait again."""
        self._next_s = self._first_s

    def wait_s(self) -> float:
        """Return the seconds to wait now. The next wait is twice as long, up to the longest."""
        wait_s = min(self._next_s, self._longest_s)
        self._next_s = 2 * wait_s
        return wait_s
