"""Keep whether a store or a stream may be used, and turn errors into those its owner gets.

A store or stream is used between its recovery and its close. After a write or a sync that failed
nothing is written any more: only the next recovery knows what is on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

from shardmq.shardd.store.errors import Closed, DiskFull, StoreError, StoreFailed
from shardmq.shardd.store.files import Files, is_full, is_missing
from shardmq.shardd.store.open_segment import StageState
from shardmq.shardd.store.sync import Noted, SyncJob


class StoreState(StageState, Generic[Noted]):
    """The state of one store or stream, shared by the objects it is made of.

    `what` names the store or stream in errors. `stage` is "new" before the recovery, then "open",
    then "closed". `job` is the sync of messages under way.
    """

    __slots__ = ("directory", "files", "has_directory", "what")

    def __init__(self, what: str, directory: str, files: Files) -> None:
        self.what = what
        self.directory = directory
        self.files = files
        self.stage = "new"
        self.failure = ""
        self.job: SyncJob[Noted] | None = None
        self.has_directory = False

    def find_directory(self) -> None:
        """Make the directory at the start, if the disk has room for it.

        On a full disk a new store begins without a directory. The store takes no message before it
        has one.
        """
        try:
            self.make_directory()
        except OSError as error:
            if not is_full(error):
                raise
            # An existing directory is read, even if the call failed.
            self.has_directory = not self.is_missing()

    def make_directory(self) -> None:
        if not self.has_directory:
            self.files.make_directory(self.directory)
            self.has_directory = True

    def is_missing(self) -> bool:
        """Return whether there is no directory."""
        try:
            self.files.list(self.directory)
        except OSError as error:
            if is_missing(error):
                return True
            raise
        return False

    def check_usable(self) -> None:
        """Raise Closed or StoreFailed unless the store can be written to."""
        if self.stage != "open":
            raise Closed(f"the {self.what} is not open")
        if self.job is not None and self.job.done:
            self.check_synced(self.job)
        if self.failure:
            raise StoreFailed(self.failure)

    def check_synced(self, job: SyncJob[Any]) -> None:
        """Raise StoreFailed unless the job was completed."""
        if not job.synced:
            raise self.fail(job.error or "a sync did not come to its end")

    def named(self, error: Exception) -> StoreError:
        """Return the exception for an error that was met before anything was half done."""
        if isinstance(error, StoreError):
            return error
        if isinstance(error, OSError) and is_full(error):
            return DiskFull(f"no room in {self.directory}: {error}")
        return self.fail(error)

    def fail(self, error: Exception | str) -> StoreFailed:
        """Return the exception for an error after which it is not known what is on disk.

        Nothing is written any more. Any exception counts: the disk's, the memory's, our own
        mistake.
        """
        what = error if isinstance(error, (OSError, str)) else repr(error)
        self.failure = self.failure or f"{self.directory}: {what}"
        return StoreFailed(self.failure)

    def quietly(self, act: Callable[..., object], *arguments: object) -> None:
        """Do housekeeping; keep its failure for the next append or sync.

        The current caller did not ask for the housekeeping, so the failure is not raised here.
        """
        try:
            act(*arguments)
        except Exception as error:
            self.fail(error)
