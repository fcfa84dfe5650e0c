"""The thread of an event loop, for objects that other threads use, too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


class LoopThread:
    """The running loop, and the thread of it, which makes this object."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    @property
    def is_present(self) -> bool:
        """Return whether the caller is in this thread."""
        return threading.get_ident() == self._thread

    def call(self, act: Callable[..., None], *arguments: Any) -> None:
        """Call this in the thread of the loop, at once if it is the present one."""
        if self.is_present:
            act(*arguments)
        else:
            self.call_soon(act, *arguments)

    def call_soon(self, act: Callable[..., None], *arguments: Any) -> None:
        """Let the loop call this soon. A loop that has ended calls nothing any more."""
        try:
            self._loop.call_soon_threadsafe(act, *arguments)
        except RuntimeError:
            pass  # the loop has ended
