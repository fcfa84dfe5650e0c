"""Watch how much is free on the disk of the data directory, for a node that leads no shard."""

from __future__ import annotations

import os
import threading


class DiskWatch:
    """Looks at the disk in a thread, because a disk may hang; nothing waits for it.

    free_bytes: -1 as long as it is not known.
    """

    def __init__(self, directory: str) -> None:
        self.free_bytes = -1
        self._directory = directory
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin to look, unless a look is still under way."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="disk", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        try:
            found = os.statvfs(self._directory)
        except OSError:
            self.free_bytes = -1
        else:
            self.free_bytes = found.f_bavail * found.f_frsize
