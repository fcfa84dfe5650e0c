"""Remove files in a thread: the removal of half a gigabyte takes a quarter of a second."""

from __future__ import annotations

import logging
import queue
import threading

from shardmq.shardd.disk import WatchedFiles

log = logging.getLogger(__name__)


class Remover:
    """A thread that removes files in the order of the calls."""

    def __init__(self, files: WatchedFiles) -> None:
        self._files = files
        self._paths: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="remove", daemon=True).start()

    def remove(self, path: str) -> None:
        self._paths.put((path, False))

    def remove_directory(self, path: str) -> None:
        """Remove a directory if it exists and is empty."""
        self._paths.put((path, True))

    def _run(self) -> None:
        while True:
            path, is_directory = self._paths.get()
            try:
                (self._files.remove_directory if is_directory else self._files.remove)(path)
            except FileNotFoundError:
                pass  # the directory has gone with its last file
            except OSError as error:  # nobody needs the file: the next start tries again
                log.warning("%s stays: %s", path, error)
