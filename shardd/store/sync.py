"""Define the job that makes written bytes last: the blocking part of every sync."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from shardmq.shardd.store.errors import StoreFailed
from shardmq.shardd.store.files import Files, is_missing, sync_file

# What the owner of a job has to know when the job ends.
Noted = TypeVar("Noted")


class LastStep(Protocol):
    """A step that may begin only when all files of a job are on stable storage."""

    def run(self) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class SyncJob(Generic[Noted]):
    """A sync of written bytes and names that are not on stable storage yet.

    `run` may be called from any thread, once. A job is `synced` only after a `run` that succeeded.
    The files of messages are held open in `handles`. The files of acks, and of the offsets that
    consumers of a stream have stored, are known by their `paths`, because their owner goes on
    meanwhile: a file, or a whole directory, that was removed needs no sync then.
    """

    files: Files
    directory: str
    with_directory: bool  # names in it have changed
    noted: Noted
    handles: list[int] | None = None
    paths: list[str] = field(default_factory=list)
    last_steps: list[LastStep] = field(default_factory=list)
    more: bool = False  # the job could not take all paths: another job is to follow
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

    def _make_last(self) -> None:
        for handle in self.handles or ():
            self.files.sync(handle)
        for path in self.paths:
            sync_file(self.files, path, if_there=True)
        if self.with_directory:
            try:
                self.files.sync_directory(self.directory)
            except OSError as error:
                if self.handles is not None or not is_missing(error):
                    raise
        for step in self.last_steps:
            step.run()
