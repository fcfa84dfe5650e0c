"""What it takes to make written bytes last: what of a sync blocks, beside a store or a stream."""

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
    """What was written and is not on stable storage. `run` may be called from any thread, once.

    A job that was not run, or whose run did not come to its end, whatever the reason, is not
    `synced`.
    """

    files: Files
    directory: str
    with_directory: bool  # names in it have changed
    synced: bool = False
    done: bool = False  # the run is over, well or not
    error: Exception | None = None  # what it met

    def run(self) -> None:
        """Block until all is on stable storage. Raises StoreFailed, whatever went wrong."""
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

    segments: list[tuple[AnySegment, int, int]]  # segment, its handle, written up to
    cover: Cover | None = None  # to be written when all that is on stable storage

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

    spares: list[Spare]  # their names last afterwards
    replaced: list[Segment]  # may go afterwards: others have their messages
    manifest: ManifestSync | None = None  # the spares are no longer listed in it

    def _make_last(self) -> None:
        MessageSync._make_last(self)  # super() does not know a class with slots
        if self.manifest is not None:
            self.manifest.run()


@dataclass(slots=True, eq=False, kw_only=True)
class SettledSync(Job):
    """Makes last what queues need no more, or where readers are.

    The files are known by their paths, since their owner goes on meanwhile. A file that has gone
    by then has nothing to tell any more.
    """

    paths: list[str]
    more: bool = False  # there is more than the job takes: another is to follow
    named: list[int] = field(default_factory=list)  # segments whose names last afterwards

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
