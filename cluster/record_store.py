"""The record of copies, which lies at a key of etcd."""

from __future__ import annotations

import logging
from typing import Final, Protocol

import msgspec

from shardmq.cluster.pairs import (
    Compare,
    EtcdAway,
    EtcdRefused,
    Get,
    Operation,
    Outcome,
    Pair,
    Put,
)
from shardmq.cluster.records import BAD_JSON
from shardmq.cluster.rules import Record, RecordError, Swap

log = logging.getLogger(__name__)


class RecordAway(Exception):
    """The record could not be read in time, or is none."""


class RecordStore(Protocol):
    async def read(self) -> tuple[Record | None, int]:
        """Return the record and its revision, as a majority of the store has it.

        Without a record the revision is that of the whole store. Raises RecordAway, in bounded
        time.
        """

    async def swap(self, record: Record, revision: int) -> int | Swap:
        """Put the record if the present one has this revision (0: there is none).

        Returns the new revision, REFUSED, or UNKNOWN when no answer came in bounded time. The
        request is sent once.
        """


class Transactor(Protocol):
    """The part of `etcd.Etcd` that is needed here."""

    async def transact(
        self,
        compares: list[Compare],
        then: list[Operation],
    ) -> Outcome: ...


class EtcdRecord:
    """The record at one key, as JSON."""

    def __init__(self, etcd: Transactor, key: str) -> None:
        self.key: Final = key
        self._etcd = etcd

    async def read(self) -> tuple[Record | None, int]:
        try:
            outcome = await self._etcd.transact([], [Get(self.key)])
        except (EtcdAway, EtcdRefused) as error:
            raise RecordAway(str(error)) from None
        (pair,) = outcome.pairs
        return (None, outcome.revision) if pair is None else (decoded(pair), pair.mod_revision)

    async def swap(self, record: Record, revision: int) -> int | Swap:
        put = Put(self.key, msgspec.json.encode(record))
        try:
            outcome = await self._etcd.transact([Compare(self.key, mod_revision=revision)], [put])
        except EtcdAway as error:
            log.warning("copies: etcd does not answer: %s", error)
            return Swap.UNKNOWN if error.unknown else Swap.REFUSED
        except EtcdRefused as error:
            log.error("copies: etcd refuses %s: %s", self.key, error)
            return Swap.REFUSED
        return outcome.revision if outcome.succeeded else Swap.REFUSED


def decoded(pair: Pair) -> Record:
    """Return the record of a pair, as a watch has it. Raises RecordAway if it is none."""
    try:
        return msgspec.json.decode(pair.value, type=Record)
    except (*BAD_JSON, RecordError) as error:
        raise RecordAway(f"{pair.key}: {error}") from None
