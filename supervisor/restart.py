"""A child died: start it again now, wait first, or give up. Pure: the time is an argument."""

from __future__ import annotations

from collections import deque

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0
STILLBIRTHS_MAX = 3  # a child that never became ready will hardly do so at the tenth try


class Restarts:
    """The deaths of one child within the last `within_s` seconds, and what follows from them."""

    def __init__(self, deaths_max: int, within_s: float) -> None:
        self.deaths_max = deaths_max
        self.within_s = within_s
        self._deaths: deque[float] = deque(maxlen=deaths_max)
        self._ever_ready = False

    def became_ready(self) -> None:
        self._ever_ready = True

    def wait_after_death(self, now: float) -> float | None:
        """Seconds to wait before the next start; None: give up."""
        self._deaths.append(now)
        while self._deaths[0] < now - self.within_s:
            self._deaths.popleft()
        deaths = len(self._deaths)
        if deaths >= self.deaths_max or (not self._ever_ready and deaths >= STILLBIRTHS_MAX):
            return None
        if deaths == 1:
            return 0.0
        return min(FIRST_WAIT_S * 2.0 ** (deaths - 2), LONGEST_WAIT_S)
