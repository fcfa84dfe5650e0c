"""What it takes to make written bytes last: the part of a sync that blocks, beside the store."""

from __future__ import annotations

from dataclasses import dataclass

from shardd.store.errors import StoreFailed
from shardd.store.files import Files
from shardd.store.producers import Cover
from shardd.store.reclaim import Spare
from shardd.store.segment import Segment


@dataclass(slots=True, eq=False)
class SyncJob:
    """What was written and is not on stable storage. `run` may be called from any thread, once."""

    files: Files
    directory: str
    segments: list[tuple[Segment, int, int]]  # segment, its handle, written up to
    spares: list[Spare]  # their names last afterwards
    replaced: list[Segment]  # may go afterwards: others have their messages
    with_directory: bool
    cover: Cover | None = None
    done: bool = False
    error: OSError | None = None

    def run(self) -> None:
        try:
            for _, handle, _ in self.segments:
                self.files.sync(handle)
            if self.with_directory:
                self.files.sync_directory(self.directory)
            if self.cover is not None:
                self.cover.run()
        except OSError as error:
            self.error = error
            raise StoreFailed(f"sync of {self.directory} failed: {error}") from error
        finally:
            self.done = True
