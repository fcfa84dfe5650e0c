"""What a shard needs of the stores of its vhosts, and of whoever opens them; server.py meets it with shardd.store."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from shardmq.shardd.queues import Arrival
from shardmq.shardd.queues import Store as QueueStore
from shardmq.shardd.streams import Home as StreamHome

# What a sync is of: a store, or a stream.
Keeper = TypeVar("Keeper")

# Of one store: bytes of message files gone through, of how many; messages found in them so far.
Progress = Callable[[int, int, int], None]


class NoRoom(Exception):
    """The store's disk is full: nothing of the batch was taken; reading and settling go on."""


class SyncJob(Protocol):
    def run(self) -> None: ...


class Store(QueueStore, Protocol):
    """What a shard needs of a store; `append` raises NoRoom (or what `Shard.no_room` names) when the disk is full."""

    def recover(
        self,
        queue_ids: Collection[int],
        timed: Collection[int] = (),
        progress: Progress | None = None,
    ) -> Mapping[int, Arrival]: ...
    def append(
        self,
        records: bytes | bytearray | memoryview,
        indexes: bool = False,
        in_sequence: bool = False,
    ) -> Sequence[Arrival]: ...
    def screen(
        self, records: memoryview, rooms: Mapping[int, tuple[int, int | None, int, int | None]]
    ) -> Screened:
        """What of records IN_SEQUENCE is to be appended."""

    def unscreen(self) -> None:
        """It was not."""

    def forget_producers(self, heard_before: int) -> int: ...
    def begin_sync(self) -> Any: ...
    def finish_sync(self, job: Any) -> None: ...
    @property
    def settled_held_back(self) -> bool:
        """Whether the last of these syncs left something out, because of a merge."""

    def begin_settled_sync(self) -> Any: ...
    def finish_settled_sync(self, job: Any) -> None: ...
    @property
    def written_bytes(self) -> int: ...
    def begin_reclaim(self) -> Any: ...
    def finish_reclaim(self, job: Any) -> int: ...
    def close(self, live: dict[int, array[int]] | None = None) -> None: ...
    def delete_all(self) -> None: ...
    def stats(self) -> Mapping[str, int]: ...


class Screened(Protocol):
    """A batch without messages that are not to be stored: repeated ones by queue id, and ordinals of refused ones.
    `origins`: of those left, which they were in the batch. `known`: ordinals of repeated ones, `altered`: of those of
    them that were other messages before."""

    records: bytes | bytearray | memoryview
    origins: array[int] | None
    repeated: dict[int, int]
    refused: list[int]
    known: list[int]
    altered: list[int]


class Home(StreamHome, Protocol):
    """Where the stores of all vhosts lie."""

    def open(self, vhost: str) -> Store: ...
    def remove(self, vhost: str) -> None:
        """Of a vhost whose store is not open."""

    def keep_only(self, vhosts: Collection[str]) -> None:
        """Stores of other vhosts go."""

    def recovered(self, vhost: str, store: Any) -> None:
        """That store, as `open` gave it."""

    def progress(self, vhost: str, bytes_done: int, bytes_total: int, messages: int) -> None:
        """A store recovers."""


class Sync(Generic[Keeper]):
    """One sync of stores and streams, with the job of each: `run` in any thread, then end it.

    `number`: batches that wait for it, or for an earlier one, may be confirmed when it ended well.
    None: some store or stream had no room to begin, or no messages are synced, so nothing may be
    confirmed by it.
    """

    def __init__(self, jobs: list[tuple[Keeper, SyncJob]], number: int | None) -> None:
        self.jobs = jobs
        self.number = number

    def run(self) -> None:
        for _, job in self.jobs:
            job.run()
