"""Order of keys over a change of the number of shards that are streams: what of each stream lies before it. Pure.

A stream is read again and again, so nobody can wait until it is empty: a change leaves a *cut* in each stream of its
exchange (`changes.Cut`, in the catalog with the queue), an offset. What was routed by the old bindings lies below the
cut of a stream that loses keys; what was routed by the new ones lies at or above that of a stream that gains some. So
keys stay in order for a group of consumers if it reads no stream that gains beyond its cut before it has read and
settled all that lose up to theirs (`Crossing`), change after change: a key may have moved twice, and nothing of it have
come between. Since the cuts of a stream rise nobody waits for what he is kept from.

While a change is under way the cuts of those that lose are not known: until then nobody reads those that gain beyond
theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from shardmq.broker.model.changes import OPEN, Cut, QueuePut

# Of each stream; the oldest are forgotten: then who reads that far back may meet keys that have moved out of order.
CUTS_MAX: Final = 256


class Move(NamedTuple):
    """One change: cuts by queue id. `losing` None: it is under way."""

    number: int
    gaining: Mapping[int, int]
    losing: Mapping[int, int] | None


class Bounds(NamedTuple):
    """Of a reader: it gets nothing from offset `stop` on, and says when all below `mark` is settled."""

    stop: int | None = None
    mark: int | None = None


FREE: Final = Bounds()


def is_stream(queue: QueuePut) -> bool:
    return queue.arguments.get("x-queue-type") == "stream"


def cuts_of(queue: QueuePut) -> tuple[Cut, ...]:
    return queue.part.cuts if queue.part is not None else ()


def with_cut(queue: QueuePut, cut: Cut) -> QueuePut:
    """Of each change one: who lost after all did not gain."""
    assert queue.part is not None
    others = tuple(each for each in queue.part.cuts if each.number != cut.number)
    part = msgspec.structs.replace(queue.part, cuts=(*others, cut)[-CUTS_MAX:])
    return msgspec.structs.replace(queue, part=part)


def moves(parts: Sequence[QueuePut]) -> tuple[Move, ...]:
    """All changes that left cuts in these shard queues of one exchange, the oldest first."""
    cuts = [(cut, queue.id) for queue in parts for cut in cuts_of(queue)]
    if not cuts:
        return ()
    open = number_under_way(parts)
    found = []
    for number in sorted({cut.number for cut, _ in cuts}):
        gaining = {id: cut.offset for cut, id in cuts if cut.number == number and cut.gains}
        losing = {id: cut.offset for cut, id in cuts if cut.number == number and not cut.gains}
        found.append(Move(number, gaining, None if number == open else losing))
    return tuple(found)


def number_under_way(parts: Sequence[QueuePut]) -> int | None:
    """Of the change that is; None: none is, or it has left no cut yet. One that was given up before the bindings
    changed left cuts to those that would have gained, and none to others: nothing is waited for."""
    latest = max((cut.number for queue in parts for cut in cuts_of(queue)), default=0)
    of_latest = [(cut, queue) for queue in parts for cut in cuts_of(queue) if cut.number == latest]
    lost = any(not cut.gains for cut, _ in of_latest)
    held = any(queue.part is not None and queue.part.held != OPEN for _, queue in of_latest)
    return latest if held and not lost else None


def number_of(parts: Sequence[QueuePut]) -> int:
    """Of the change that is under way, also if it has left no cut yet."""
    latest = max((cut.number for queue in parts for cut in cuts_of(queue)), default=0)
    return number_under_way(parts) or latest + 1


def begun(queue: QueuePut, parts: Iterable[QueuePut]) -> QueuePut:
    """It is about to gain keys: without cuts of changes that came to nothing, which this one must not be taken for."""
    if not cuts_of(queue):
        return queue
    assert queue.part is not None
    lost = {cut.number for each in parts for cut in cuts_of(each) if not cut.gains}
    kept = tuple(cut for cut in queue.part.cuts if cut.number in lost)
    return msgspec.structs.replace(queue, part=msgspec.structs.replace(queue.part, cuts=kept))


def without_cut(parts: Sequence[QueuePut], closing: Iterable[QueuePut]) -> list[QueuePut]:
    """Those of the streams that are about to gain keys where the change has left no cut yet."""
    number = number_under_way(parts)
    return [
        queue
        for queue in closing
        if is_stream(queue)
        and (number is None or all(cut.number != number for cut in cuts_of(queue)))
    ]


class Crossing:
    """How far one group of consumers is on its way over the changes of its exchange."""

    def __init__(self) -> None:
        self.given_up: set[int] = set()  # changes whose order is not waited for any more
        self._passed: dict[int, int] = {}  # by queue id: below that offset all is settled
        self._over: set[int] = set()  # changes that need no look any more
        self._since: dict[int, float] = {}  # when changes were first seen to be waited for, s

    def passed(self, queue: int, offset: int) -> None:
        self._passed[queue] = max(offset, self._passed.get(queue, 0))

    def waits_for(self, move: Move, queues: Collection[int]) -> dict[int, int] | None:
        """Queues, of those that are there, that it has to read on up to an offset; None: they are not known yet."""
        if move.losing is None:
            return None
        return {
            id: offset
            for id, offset in move.losing.items()
            if id in queues and self._passed.get(id, 0) < offset
        }

    def open(self, moves: Sequence[Move], queues: Collection[int]) -> list[Move]:
        """Those which it has not crossed."""
        found: list[Move] = []
        there = {
            move.number for move in moves
        }  # the number of a change that came to nothing is used again
        self._over &= there
        self.given_up &= there
        for move in moves:
            if move.number in self._over or move.number in self.given_up:
                continue
            waits_for = self.waits_for(move, queues)
            if found or waits_for is None or waits_for:
                found.append(move)
            else:
                self._over.add(move.number)
        return found

    def bounds(self, open: Iterable[Move], queue: int) -> Bounds:
        stops = [move.gaining[queue] for move in open if queue in move.gaining]
        losing = [
            move.losing[queue] for move in open if move.losing is not None and queue in move.losing
        ]
        marks = [offset for offset in losing if self._passed.get(queue, 0) < offset]
        return Bounds(min(stops, default=None), min(marks, default=None))

    def overdue(self, open: Sequence[Move], now: float, wait_ms: int) -> set[int]:
        """Changes it waits for longer than that, counted from the first call that saw so; seconds, of any clock that
        only goes forward."""
        first = [
            move.number for move in open[:1] if move.losing is not None
        ]  # the others are not kept by theirs alone
        since = {number: self._since.get(number, now) for number in first}
        self._since = since
        return {number for number, at in since.items() if (now - at) * 1000 >= wait_ms}
