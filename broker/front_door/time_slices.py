"""Time slices: how long a front door works for one client before it works for the others.

A client may send what takes long to handle: messages that each need a decision in Python, or
methods by the ten thousand. A slice ends after a time. Whatever is left then waits for the client's
next slice, and between two slices of one client every other client that has sent something gets its
own. So a client that sends little waits about as long as one round over all clients takes, which
`ROUND_S` aims at.

Times are in seconds, of the clock that is given.
"""

from __future__ import annotations

from collections.abc import Callable

# What the slices of one round take together, if as many clients are busy as in the round before.
ROUND_S = 0.010
# Shorter slices cost more for changing between clients than they save.
SLICE_S_MIN = 0.00025
# A longer slice makes a client that is alone no faster.
SLICE_S_MAX = 0.005


class TimeSlices:
    """The slices of one front door. One is under way at a time."""

    __slots__ = ("_begun", "_call_soon", "_clock", "_ends", "_length")

    def __init__(
        self, clock: Callable[[], float], call_soon: Callable[[Callable[[], None]], object]
    ) -> None:
        """Take a clock and an event loop.

        `call_soon` calls what it is given behind all that is already to be called.
        """
        self._clock = clock
        self._call_soon = call_soon
        self._begun = 0  # slices of this round
        self._length = SLICE_S_MAX
        self._ends = 0.0

    def begin(self) -> None:
        """Begin the slice of a client."""
        if not self._begun:
            self._call_soon(self._end_round)
        self._begun += 1
        self._ends = self._clock() + self._length

    def _end_round(self) -> None:
        """Divide the next round among as many clients as this one served."""
        self._length = max(SLICE_S_MIN, min(SLICE_S_MAX, ROUND_S / self._begun))
        self._begun = 0

    def is_over(self) -> bool:
        """Return whether the slice under way has had its time."""
        return self._clock() >= self._ends
