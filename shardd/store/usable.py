"""When a store or stream may be used: not before it is open, and never again after a write or sync that failed, since
what is on disk is only known to the next recovery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shardmq.shardd.store.errors import Closed, DiskFull, StoreError, StoreFailed
from shardmq.shardd.store.files import Files, is_full, is_missing


class Syncing(Protocol):
    """A sync that runs, or ran, in another thread."""

    @property
    def synced(self) -> bool: ...
    @property
    def done(self) -> bool: ...
    @property
    def error(self) -> Exception | None: ...


class Usable:
    """`what`: its name in errors."""

    def __init__(self, what: str, directory: str, files: Files) -> None:
        self.directory = directory
        self._what = what
        self._state = "new"
        self._failure = ""
        self._job: Syncing | None = None
        self._files = files
        self._has_directory = False

    def _find_directory(self) -> None:
        """At the start: on a full disk what is new begins without a directory, and takes nothing before it has one."""
        try:
            self._make_directory()
        except OSError as error:
            if not is_full(error):
                raise
            self._has_directory = (
                not self._is_missing()
            )  # what is there is read, whatever the call said

    def _make_directory(self) -> None:
        if not self._has_directory:
            self._files.make_directory(self.directory)
            self._has_directory = True

    def _is_missing(self) -> bool:
        try:
            self._files.list(self.directory)
        except OSError as error:
            if is_missing(error):
                return True
            raise
        return False

    def _check_usable(self) -> None:
        if self._state != "open":
            raise Closed(f"the {self._what} is not open")
        if self._job is not None and self._job.done:
            self._check_synced(self._job)
        if self._failure:
            raise StoreFailed(self._failure)

    def _check_synced(self, job: Syncing) -> None:
        """Raise StoreFailed unless the job came to its end."""
        if not job.synced:
            raise self._fail(job.error or "a sync did not come to its end")

    def _named(self, error: Exception) -> StoreError:
        """Return what to raise for an error that was met before anything was half done."""
        if isinstance(error, StoreError):
            return error
        if isinstance(error, OSError) and is_full(error):
            return DiskFull(f"no room in {self.directory}: {error}")
        return self._fail(error)

    def _fail(self, error: Exception | str) -> StoreFailed:
        """Return what to raise for an error after which nobody knows what is on disk.

        Nothing is written any more. Any exception counts: the disk's, the memory's, our mistake.
        """
        what = error if isinstance(error, (OSError, str)) else repr(error)
        self._failure = self._failure or f"{self.directory}: {what}"
        return StoreFailed(self._failure)

    def _quietly(self, act: Callable[..., None], *arguments: object) -> None:
        """Housekeeping: its failure is remembered and met by the next append or sync, not by whoever came by."""
        try:
            act(*arguments)
        except Exception as error:
            self._fail(error)
