"""The election of a copy that may lack what was confirmed, as an operator asks for it.

A shard whose in-sync members have all lost their disks is never led again by the rules: the other
copies may lack messages that were confirmed. An operator may give these messages up. Then a copy
that is whole leads in a higher term, alone in the in-sync set, and all others are compared with it.

These are decisions without I/O. Whoever carries them out

- looks at the copies of all nodes that answer (`elected`);
- has the copy promise the new term, so that nothing which a dead leader has sent still changes it;
- puts the record by compare-and-swap, in a transaction that also compares that the members which
  were not alive are absent still.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple, Protocol

import msgspec

from shardmq.cluster.rules import Held, Position, Record

# How long a node may take to say what its copy is.
STATE_S_MAX: Final = 5.0


class NotElected(Exception):
    """A copy must not be elected. The text says why, for the operator."""


class OutcomeUnknown(Exception):
    """Etcd may have put the record, or may yet do so. The text says why nobody knows."""


class Ask(msgspec.Struct, frozen=True):
    """Ask a node for the state of its copy.

    promise: a term. If it is above 0, no leader of a lower term changes the copy any more.
    """

    promise: int = 0


class CopyState(msgspec.Struct, frozen=True):
    """A copy, as the process says that follows with it.

    life: the number of the process.
    position: the last operation that the copy has; None if the process has not applied any.
    confirmed: the last operation that the process has heard to be confirmed; None if none.
    """

    life: int
    held: Held
    position: Position | None = None
    confirmed: Position | None = None


class NoCopies(Exception):
    """The shard has no record of copies."""


class Prospect(NamedTuple):
    """An election as it would be, or as it was: the next record, and how much may be lost."""

    record: Record
    loss: str


Announce = Callable[[Prospect], None]


class Elections(Protocol):
    """The elections of a controller; both calls raise NotElected and NoCopies."""

    async def look(self, shard: int, node: str) -> Prospect:
        """Return what the election of the copy of a node would be."""

    async def elect(self, shard: int, node: str, announce: Announce) -> Prospect:
        """Let the copy of a node lead a shard. Raises OutcomeUnknown too.

        announce: called with the election right before the record is put, so that the log has it
            whatever happens then.
        """


def elected(
    record: Record, node: str, states: Mapping[str, CopyState], alive: Collection[str]
) -> Record:
    """Return the record with which the copy of a node leads. Raises NotElected.

    states: of the copies of the nodes that have answered, by node.
    alive: the nodes whose leases hold.
    """
    for name, copy in sorted(record.in_sync.items()):
        state = states.get(name)
        if state is None and name in alive:
            raise NotElected(f"{name} is in sync and alive, and does not say what it has")
        if state is not None and state.held.is_whole and state.held.copy == copy:
            raise NotElected(f"{name} is in sync and alive: it leads, or will lead by itself")
    state = states.get(node)
    if state is None:
        raise NotElected(f"{node} does not answer, or has no copy of the shard")
    if not state.held.is_whole or state.held.store != record.store:
        raise NotElected(f"the copy of {node} is of no use: it is torn, or of another store")
    known = (max(each.held.term, each.held.promised) for each in states.values())
    term = max(record.term, *known) + 1
    return Record(term, node, state.life, record.store, {node: state.held.copy})


def has_kept(record: Record, state: CopyState) -> bool:
    """Return whether a copy that has promised the term of a record can still lead with it."""
    held = state.held
    return (
        held.is_whole and held.copy == record.in_sync[record.leader] and state.life == record.life
    )


def loss(record: Record, node: str, states: Mapping[str, CopyState]) -> str:
    """Return how much may be lost if the copy of a node leads, as text for the operator."""
    return (
        f"{_lacking(record, node, states)}. Stop shardmq on {_named(record)} first, or cut its "
        f"clients off: a node that is only cut off from etcd may go on confirming, and what it "
        f"confirms is lost, too"
    )


def _lacking(record: Record, node: str, states: Mapping[str, CopyState]) -> str:
    """Return what the copy of a node may lack."""
    copy = states[node].position
    if copy is None:
        return (
            f"nobody knows where the copy of {node} ends, because its process has started again: "
            f"all that was confirmed since {node} was in sync may be lost"
        )
    ends = f"the copy of {node} ends at operation {copy.number} of term {copy.term}"
    known = max(
        at
        for state in states.values()
        for at in (state.position, state.confirmed)
        if at is not None
    )
    if max(record.term, known.term) > copy.term:
        return (
            f"{ends}, and the shard was led in later terms, up to term "
            f"{max(record.term, known.term)}: all that was confirmed in them may be lost"
        )
    if known.number > copy.number:
        return (
            f"{ends}, and operation {known.number} is known: {known.number - copy.number} "
            "operations, and what was confirmed behind them, may be lost"
        )
    return f"{ends}, behind which none is known: what only {_named(record)} had may be lost"


def _named(record: Record) -> str:
    return " and ".join(sorted(record.in_sync))
