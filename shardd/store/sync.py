"""What it takes to make written bytes last: the part of a sync that blocks, beside a store or a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from shardd.store.errors import StoreFailed
from shardd.store.files import Files
from shardd.store.producers import Cover
from shardd.store.reclaim import Spare
from shardd.store.segment import Segment

AnySegment = TypeVar("AnySegment")


@dataclass(slots=True, eq=False, kw_only=True)
class Job(Generic[AnySegment]):
    """What was written and is not on stable storage. `run` may be called from any thread, once.

    A job that was not run, or whose run did not come to its end for whatever reason, is not `synced`.
    """

    files: Files
    directory: str
    segments: list[tuple[AnySegment, int, int]]  # segment, its handle, written up to
    with_directory: bool
    cover: Cover | None = None  # to be written when all that is on stable storage
    synced: bool = False
    done: bool = False  # the run is over, well or not
    error: Exception | None = None  # what it met

    def run(self) -> None:
        """Block until all is on stable storage. Raises StoreFailed, whatever went wrong."""
        try:
            for _, handle, _ in self.segments:
                self.files.sync(handle)
            if self.with_directory:
                self.files.sync_directory(self.directory)
            if self.cover is not None:
                self.cover.run()
            self.synced = True
        except Exception as error:
            self.error = error
            raise StoreFailed(f"sync of {self.directory} failed: {error!r}") from error
        finally:
            self.done = True


@dataclass(slots=True, eq=False, kw_only=True)
class SyncJob(Job[Segment]):
    """Of a segment store."""

    spares: list[Spare]  # their names last afterwards
    replaced: list[Segment]  # may go afterwards: others have their messages
