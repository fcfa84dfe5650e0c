"""Where the record of copies lies: etcd in a cluster, something simpler in tests."""

from __future__ import annotations

from typing import Protocol

from shardmq.cluster.rules import Record, Swap


class RecordAway(Exception):
    """The record could not be read in time."""


class RecordStore(Protocol):
    async def read(self) -> tuple[Record | None, int]:
        """Return the record and its revision, as a majority of the store has it.

        Without a record the revision is that of the whole store. Raises RecordAway, in bounded
        time.
        """

    async def swap(self, record: Record, revision: int) -> int | Swap:
        """Put the record if the present one has this revision (0: there is none).

        Returns the new revision, REFUSED, or UNKNOWN when no answer came in bounded time. It is
        sent once.
        """
