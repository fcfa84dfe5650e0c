"""The rules by which a child that has died is started again.

The first restart comes at once, the next ones after 0.1 s, 0.2 s, 0.4 s and so on up to 5 s. The
broker gives up when a child dies too often. This module does no I/O: the time is an argument.
"""

from __future__ import annotations

from collections import deque

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0
# The number of deaths after which a child that has never been ready is given up. A child that fails
# three times before it is ready fails for a reason that further starts do not remove.
STILLBIRTHS_MAX = 3


class Restarts:
    """The recent deaths of one child.

    Args:
        deaths_max: The number of deaths within `within_s` at which the child is given up.
        within_s: The seconds for which a death counts.
    """

    def __init__(self, deaths_max: int, within_s: float) -> None:
        self.deaths_max = deaths_max
        self.within_s = within_s
        self._deaths: deque[float] = deque(maxlen=deaths_max)
        self._ever_ready = False

    def became_ready(self) -> None:
        """Note that the child has been ready once, so that it is not given up as a stillbirth."""
        self._ever_ready = True

    def wait_after_death(self, now: float) -> float | None:
        """Count a death and return the seconds to wait before the next start.

        Args:
            now: The time of the death in seconds, on a clock that never goes back.

        Returns:
            The seconds to wait, or None if the child is to be given up.
        """
        self._deaths.append(now)
        while self._deaths[0] < now - self.within_s:
            self._deaths.popleft()
        deaths = len(self._deaths)
        if deaths >= self.deaths_max or (not self._ever_ready and deaths >= STILLBIRTHS_MAX):
            return None
        if deaths == 1:
            return 0.0
        return min(FIRST_WAIT_S * 2.0 ** (deaths - 2), LONGEST_WAIT_S)
