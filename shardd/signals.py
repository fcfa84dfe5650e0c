"""Turn signals into something that our own loop can wait for.

SIGTERM and SIGINT ask the process to stop, SIGHUP asks it to read the settings again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

WAKES_BYTES = 4096


class Signals:
    """The signals of the process, from the moment this object is made.

    `fd` becomes readable when a signal came, and then `take` must be called. `stop` is set at once,
    and `stopping` is called then, also while the process waits for something else.
    """

    def __init__(self) -> None:
        self.stop = False
        self.stopping: Callable[[], None] = lambda: None
        self._reload = False
        self.fd, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_reload)

    def take(self) -> bool:
        """Read what made `fd` readable; return whether the settings must be read again."""
        os.read(self.fd, WAKES_BYTES)
        reload, self._reload = self._reload, False
        return reload

    def _on_stop(self, number: int, frame: object) -> None:
        self.stop = True
        self.stopping()

    def _on_reload(self, number: int, frame: object) -> None:
        self._reload = True
