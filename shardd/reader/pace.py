"""Limit the bytes per second that all scans together may write."""

from __future__ import annotations

import threading
import time

# The pace is checked this many times per second, or after this many bytes without a limit.
LOOKS_PER_S = 32
UNSEEN_BYTES_MAX = 64 << 20


class Pacer:
    """A limit that all threads share. After a pause, one second's worth may go at once."""

    def __init__(self, bytes_per_s: int) -> None:
        """Set the limit; 0 is no limit."""
        # The bytes that may be sent between two calls.
        self.unseen_bytes = (
            min(bytes_per_s // LOOKS_PER_S, UNSEEN_BYTES_MAX) if bytes_per_s else UNSEEN_BYTES_MAX
        )
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0  # on the monotonic clock
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        """Wait as long as the limit asks for after `count` bytes were written."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - 1.0) + count / self._bytes_per_s
            wait_s = self._free_at - now
        if wait_s > 0:
            time.sleep(wait_s)
