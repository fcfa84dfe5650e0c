"""Decide for how long a process may look at its rings and sockets again before it sleeps.

To fall asleep and be woken takes several microseconds of two processes, often more than the pause
until the next message. So a process to which something came may look again for up to `spin_us`
(ring.look_again). Three rules bound what the looks cost:

- Looks take at most SHARE of the time. What was not used is kept, up to KEPT_NS.
- Looks that find nothing are given up: behind FRUITLESS of them in a row, only one in SKIPPED + 1
  chances to look is taken, until a look finds something. Looks are counted by what was done before:
  a front door that has passed publishes on will soon hear of them, and one that has written
  deliveries may hear nothing for long.
- Nobody looks while as many threads of the machine want to run as this process may use cores: the
  look would take the time of the one that is waited for. This is found out once a second.

A process to which nothing comes does not look at all. Times are in nanoseconds of one clock.
"""

from __future__ import annotations

import os
from pathlib import Path

SHARE = 8  # one part of so many
KEPT_NS = 2_000_000
FRUITLESS = 4
SKIPPED = 31

_LOAD = Path("/proc/loadavg")


class Spin:
    """The looks of one process. `is_on` says whether it may look at all at present."""

    def __init__(self, spin_us: int) -> None:
        self.is_on = False
        self._most_ns = 0
        self._left_ns = 0
        self._counted_at = 0
        # By what was done before: looks in a row, and chances since the last look.
        self._fruitless = [0, 0]
        self._skipped = [0, 0]
        self.change(spin_us)

    def change(self, spin_us: int) -> None:
        """Take another setting, 0 for none."""
        self._most_ns = spin_us * 1000
        self.is_on = spin_us > 0

    def tick(self) -> None:
        """Find out whether a core is idle. The caller does this once a second."""
        if self._most_ns:
            self.is_on = _running() < len(os.sched_getaffinity(0))

    def most_ns(self, now_ns: int, behind: int = 0) -> int:
        """Return for how long to look now, 0 to sleep at once.

        `behind` says what was done before: 1 if clients were read, else 0.
        """
        self._left_ns = min(KEPT_NS, self._left_ns + (now_ns - self._counted_at) // SHARE)
        self._counted_at = now_ns
        if self._fruitless[behind] >= FRUITLESS and self._skipped[behind] < SKIPPED:
            self._skipped[behind] += 1
            return 0
        self._skipped[behind] = 0
        return self._most_ns if self._left_ns >= self._most_ns else 0

    def looked(self, took_ns: int, found: bool, behind: int = 0) -> None:
        """Note a look."""
        self._left_ns -= took_ns
        self._fruitless[behind] = 0 if found else self._fruitless[behind] + 1


def _running() -> int:
    """Return how many threads of the machine run or want to run, this one among them.

    Without /proc the answer is so large that nobody looks.
    """
    try:
        return int(_LOAD.read_text().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        return 1 << 30
