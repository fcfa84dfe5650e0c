"""Define the jobs that make written bytes last: the blocking part of a sync."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shardmq.shardd.store.errors import StoreFailed
from shardmq.shardd.store.files import Files, is_missing
from shardmq.shardd.store.manifest import ManifestSync
from shardmq.shardd.store.producers import Cover
from shardmq.shardd.store.reclaim import Spare
from shardmq.shardd.store.segment import Segment

AnySegment = TypeVar("AnySegment")


@dataclass(slots=True, eq=False, kw_only=True)
class Job(ABC):
    """A sync of written bytes and names that are not on stable storage yet.

    `run` may be called from any thread, once. A job is `synced` only after a `run` that succeeded.
    """

    files: Files
    directory: str
    with_directory: bool  # names in it have changed
    synced: bool = False
    done: bool = False  # the run is over, whether it succeeded or not
    error: Exception | None = None  # the error that the run met

    def run(self) -> None:
        """Block until all is on stable storage. Raises StoreFailed for any error."""
        try:
            self._make_last()
            self.synced = True
        except Exception as error:
            self.error = error
            raise StoreFailed(f"sync of {self.directory} failed: {error!r}") from error
        finally:
            self.done = True

    @abstractmethod
    def _make_last(self) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class MessageSync(Job, Generic[AnySegment]):
    """Makes messages last."""

    # Segment, its handle, position up to which it was written.
    segments: list[tuple[AnySegment, int, int]]
    cover: Cover | None = None  # written when all segments are on stable storage

    def _make_last(self) -> None:
        for _, handle, _ in self.segments:
            self.files.sync(handle)
        if self.with_directory:
            self.files.sync_directory(self.directory)
        if self.cover is not None:
            self.cover.run()


@dataclass(slots=True, eq=False, kw_only=True)
class SyncJob(MessageSync[Segment]):
    """Makes messages of a segment store last."""

    spares: list[Spare]  # their names last after the job
    # Segments that may go after the job: a merged segment has their messages.
    replaced: list[Segment]
    manifest: ManifestSync | None = None  # syncs the manifest without the spares

    def _make_last(self) -> None:
        MessageSync._make_last(self)  # super() does not know a class with slots
        if self.manifest is not None:
            self.manifest.run()


@dataclass(slots=True, eq=False, kw_only=True)
class SettledSync(Job):
    """Makes acks, or the offsets that consumers of a stream have stored, last.

    The files are known by their paths, because their owner goes on meanwhile. A file that was
    removed needs no sync.
    """

    paths: list[str]
    more: bool = False  # the job could not take all files: another job is to follow
    # Numbers of segments whose names last after the job.
    named: list[int] = field(default_factory=list)

    def _make_last(self) -> None:
        for path in self.paths:
            self._sync_file(path)
        if self.with_directory:
            try:
                self.files.sync_directory(self.directory)
            except OSError as error:
                if not is_missing(error):
                    raise

    def _sync_file(self, path: str) -> None:
        try:
            handle = self.files.open(path)
        except OSError as error:
            if is_missing(error):
                return
            raise
        try:
            self.files.sync(handle)
        finally:
            self.files.close(handle)
