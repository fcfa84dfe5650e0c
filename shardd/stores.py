"""Define what a shard needs of the stores of its vhosts, and of the object that opens them.

disk_home.py fulfils these protocols with shardd.store.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from shardmq.shardd.lending import Lender
from shardmq.shardd.queues import Arrival
from shardmq.shardd.queues import Store as QueueStore
from shardmq.shardd.streams import StreamHome
from shardmq.shardd.upkeep import Store as UpkeepStore

# A store or a stream that is synced.
Keeper = TypeVar("Keeper")

# Reports the recovery of one store: bytes of message files gone through, bytes in all, and messages
# found so far.
Progress = Callable[[int, int, int], None]


# The counters among the numbers of a store. The other numbers may fall.
COUNTERS = (
    "appended_messages", "appended_bytes", "written_bytes", "merged_segments", "merge_bytes",
)  # fmt: skip


class NoRoom(Exception):
    """The disk of the store is full.

    The store took no message of the batch; reading and settling go on.
    """


class SyncJob(Protocol):
    def run(self) -> None: ...


class AckWait(Protocol):
    """A wait of a store for acks: see `segments/ack_waits.py`."""

    is_over: bool
    is_refused: bool


class Store(QueueStore, UpkeepStore, Protocol):
    """A store as a shard needs it.

    `append` raises NoRoom (or what `Shard.no_room` names) when the disk is full.
    """

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
    def append_lent(
        self, records: memoryview, lender: Lender, indexes: bool = False
    ) -> Sequence[Arrival]:
        """Append a batch of which bodies are lent, and hold these as long as they are needed."""

    def note_time(self, now: int) -> None:
        """Note that the messages that are there came until `now`, in ms since the epoch.

        The shard calls this each second.
        """

    def own_lent(self) -> None:
        """Copy lent bodies that have been here for long. The shard calls this each second."""

    def screen(
        self, records: memoryview, rooms: Mapping[int, tuple[int, int | None, int, int | None]]
    ) -> Screened:
        """Return the part of IN_SEQUENCE records that is to be appended."""

    def unscreen(self) -> None:
        """Forget the last `screen`, because its records were not appended."""

    def forget_producers(self, heard_before: int) -> int: ...
    def has_producers(self, queue_id: int) -> bool:
        """Return whether the store knows how far producers have come in this queue."""

    def letters(self, entries: array[int], to: int, bytes_max: int) -> tuple[bytes, int]:
        """Return records of the queue `to` with the first messages of `entries`, and their count.

        The records have the times, priorities and flags with which the messages came. As many
        messages are taken as fit in `bytes_max` bytes, but at least one.
        """

    def set_returns(self, queue_id: int, entries: array[int], times: Sequence[int]) -> None:
        """Note how often each of these messages was returned to the queue."""

    directory: str

    def flush(self) -> None:
        """Write all that is only in memory to the files."""

    def growing(self) -> Mapping[str, None]:
        """Return the names of segments that are written to again, for a snapshot."""

    def begin_sync(self) -> Any: ...
    def finish_sync(self, job: Any) -> None: ...
    @property
    def settled_held_back(self) -> bool:
        """Return whether the last sync of settled messages left some out, because of a merge."""

    def wait_for_acks(self, queue_ids: Collection[int]) -> AckWait:
        """Return a wait until the acks of these queues are on stable storage."""

    def has_unwritten_acks(self) -> bool:
        """Return whether the acks until now can last only behind another sync of messages."""

    def begin_settled_sync(self, waits: Sequence[Any] = (), everything: bool = True) -> Any:
        """Return the job of a sync of acks, or None.

        Without `everything`, only the acks that somebody waits for are written and synced.
        """

    def finish_settled_sync(self, job: Any) -> None: ...
    def close(self, live: dict[int, array[int]] | None = None) -> None: ...
    def delete_all(self) -> None: ...
    def stats(self) -> Mapping[str, int]: ...


class Screened(Protocol):
    """A batch without the messages that are not to be stored.

    `origins` has the ordinals in the batch of the messages that are left. `repeated` counts
    repeated messages by queue id. `refused` has the ordinals of refused messages, and `known` those
    of repeated messages. `altered` has the ordinals in `known` whose message differs from the
    earlier one.
    """

    records: bytes | bytearray | memoryview
    origins: array[int] | None
    repeated: dict[int, int]
    refused: list[int]
    known: list[int]
    altered: list[int]


class StoreHome(StreamHome, Protocol):
    """The place where the stores of all vhosts lie."""

    def open(self, vhost: str) -> Store: ...
    def remove(self, vhost: str) -> None:
        """Remove the files of a vhost whose store is not open."""

    def keep_only(self, vhosts: Collection[str]) -> None:
        """Remove the stores of all other vhosts."""

    def recovered(self, vhost: str, store: Any) -> None:
        """Note that a store, made by `open`, has been recovered."""

    def progress(self, vhost: str, bytes_done: int, bytes_total: int, messages: int) -> None:
        """Report how far the recovery of a store is."""


class Sync(Generic[Keeper]):
    """One sync of stores and streams, with the job of each: call `run` in any thread, then end it.

    When the sync has ended well, batches may be confirmed that wait for the sync with this
    `number`, or for an earlier one. A `number` of None confirms nothing: some store or stream had
    no room to begin, or no messages are synced.
    """

    def __init__(self, jobs: list[tuple[Keeper, SyncJob]], number: int | None) -> None:
        self.jobs = jobs
        self.number = number

    def run(self) -> None:
        for _, job in self.jobs:
            job.run()


def counters_of(store: Store) -> dict[str, int]:
    """Return the counters of a store by name; a store without files has none."""
    numbers = store.stats()
    return {name: numbers[name] for name in COUNTERS if name in numbers}
