"""Remember when the messages of a store came, without a word in memory for each of them.

The store is asked to note the time about once a second while messages come. A note is the place
behind the last message that is there, and the time. The time of a message is that of the first note
with a later place: it is right to a second, and for old messages to 5 % of their age.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Final

NOTES_MAX: Final = 512  # enough for more than a month
# Old notes are at most this part of their age apart, if messages came meanwhile.
GAP_OF_AGE: Final = 0.05


class Ages:
    """The notes of one store; at most 8 KB."""

    __slots__ = ("_places", "_times")

    def __init__(self) -> None:
        self._places = array("Q")
        self._times = array("Q")

    def note(self, end: int, now: int) -> None:
        """Note that all messages before the entry `end` are there at `now` (ms since the epoch)."""
        if self._places and end <= self._places[-1]:
            return
        if len(self._places) >= NOTES_MAX:
            self._drop_some()
        self._places.append(end)
        self._times.append(max(now, self._times[-1] if self._times else 0))

    def _drop_some(self) -> None:
        """Drop each note whose neighbours are no further apart than GAP_OF_AGE of its age."""
        places, times = array("Q"), array("Q")
        now, before, last = self._times[-1], 0, len(self._times) - 1
        for at, time in enumerate(self._times):
            behind = self._times[at + 1] if at < last else now
            if at == last or behind - before > GAP_OF_AGE * (now - time):
                places.append(self._places[at])
                times.append(time)
                before = time
        # If all are far apart, the first ones go: hardly a message can be so old.
        spare = max(0, len(places) - NOTES_MAX + 1)
        self._places, self._times = places[spare:], times[spare:]

    def came_at(self, entry: int) -> int | None:
        """Return when a message came (ms since the epoch); None if after the last note."""
        at = bisect_right(self._places, entry)
        return self._times[at] if at < len(self._places) else None
