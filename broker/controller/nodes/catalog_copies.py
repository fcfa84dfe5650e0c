"""The copies of the definitions: which files they are, and where their record lies in etcd."""

from __future__ import annotations

from typing import Final

import msgspec

from shardmq.broker.controller.stored.definitions import FILES_NAME, LOG_NAME
from shardmq.broker.controller.stored.rows import JSON_FILES
from shardmq.cluster import pairs
from shardmq.cluster.etcd import Etcd
from shardmq.cluster.pairs import Compare, EtcdAway, EtcdRefused, Put
from shardmq.cluster.record_store import RecordAway
from shardmq.cluster.rules import Record, Swap

# Beside the definitions, and no part of them: what this node knows of its copy.
HELD_NAME: Final = "definitions.copy"
COPIED: Final = frozenset(
    name + ending
    for name in (LOG_NAME, FILES_NAME, *(f"{each}.json" for each in JSON_FILES))
    for ending in ("", ".new")
)


def belongs(path: str) -> bool:
    """Return whether a path in the data directory is part of the copies."""
    return path in COPIED


class EtcdRecord:
    """The record of the copies at one key of etcd, as `shardmq.cluster.record_store` wants it."""

    def __init__(self, etcd: Etcd, key: str) -> None:
        self._etcd = etcd
        self._key = key

    async def read(self) -> tuple[Record | None, int]:
        """Return the record with its revision. Raises RecordAway."""
        try:
            listing = await self._etcd.range(self._key)
        except (EtcdAway, EtcdRefused) as error:
            raise RecordAway(str(error)) from None
        return record_in(listing, self._key)

    async def swap(self, record: Record, revision: int) -> int | Swap:
        """Put the record in the place of the one with this revision, 0 if there is none."""
        unchanged = (
            Compare(self._key, mod_revision=revision)
            if revision
            else Compare(self._key, create_revision=0)
        )
        try:
            outcome = await self._etcd.transact(
                [unchanged], [Put(self._key, msgspec.json.encode(record))]
            )
        except EtcdAway as error:
            return Swap.UNKNOWN if error.unknown else Swap.REFUSED
        except EtcdRefused:
            return Swap.REFUSED
        return outcome.revision if outcome.succeeded else Swap.REFUSED


def record_in(listing: pairs.Listing, key: str) -> tuple[Record | None, int]:
    """Return the record in a listing with its revision; without one, that of the store."""
    for pair in listing.pairs:
        if pair.key == key:
            return msgspec.json.decode(pair.value, type=Record), pair.mod_revision
    return None, listing.revision
