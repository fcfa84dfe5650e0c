"""When a store or stream may be used: not before it is open, and never again after a write or sync that failed, since
what is on disk is only known to the next recovery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shardd.store.errors import Closed, DiskFull, StoreError, StoreFailed
from shardd.store.files import is_full


class Syncing(Protocol):
    """A sync that runs, or ran, in another thread."""

    error: OSError | None


class Usable:
    """`what`: its name in errors."""

    def __init__(self, what: str, directory: str) -> None:
        self.directory = directory
        self._what = what
        self._state = "new"
        self._failure = ""
        self._job: Syncing | None = None

    def _check_usable(self) -> None:
        if self._state != "open":
            raise Closed(f"the {self._what} is not open")
        if self._job is not None and self._job.error is not None:
            self._fail(self._job.error)
        if self._failure:
            raise StoreFailed(self._failure)

    def _named(self, error: OSError) -> StoreError:
        if is_full(error):
            return DiskFull(f"no room in {self.directory}: {error}")
        return self._fail(error)

    def _fail(self, error: OSError) -> StoreFailed:
        self._failure = self._failure or f"{self.directory}: {error}"
        return StoreFailed(self._failure)

    def _quietly(self, act: Callable[..., None], *arguments: object) -> None:
        """Housekeeping: its failure is remembered and met by the next append or sync, not by whoever came by."""
        try:
            act(*arguments)
        except OSError as error:
            self._fail(error)
