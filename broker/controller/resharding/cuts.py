"""Cuts: where a reshard cuts the streams of an exchange, so that consumers read keys in order.

A stream is read again and again, so nobody can wait until it is empty. Instead each reshard leaves
a cut in each stream of the exchange: an offset (`changes.Cut`, in the catalog with the queue). What
was routed by the old bindings lies below the cut of a stream that loses keys. What was routed by
the new bindings lies at or above the cut of a stream that gains keys.

So a group of consumers gets each key in order if it reads no stream that gains keys beyond its cut
before it has settled all streams that lose keys up to theirs (`Crossing`). This holds for one
reshard after the other, because a key may move twice without a message in between. The cuts of one
stream rise, so no group waits for what it is kept from.

While a reshard is under way the cuts of the streams that lose keys are not known. Until then no
group reads beyond the cuts of the streams that gain keys.

Nothing here waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from shardmq.broker.controller.resharding.states import hold_of
from shardmq.broker.model.changes import Cut, QueuePut

# The most cuts that a stream keeps. The oldest are forgotten: a consumer that reads so far back may
# meet keys that have moved out of order.
CUTS_MAX: Final = 256


class Move(NamedTuple):
    """The cuts of one reshard, by queue id; `losing` is None while the reshard is under way."""

    number: int
    gaining: Mapping[int, int]
    losing: Mapping[int, int] | None


class Bounds(NamedTuple):
    """The bounds within which a consumer may read a stream.

    stop: the consumer gets nothing from this offset on.
    mark: the consumer's front door reports when everything below this offset is settled.
    """

    stop: int | None = None
    mark: int | None = None


FREE: Final = Bounds()


def is_stream(queue: QueuePut) -> bool:
    return queue.arguments.get("x-queue-type") == "stream"


def cuts_of(queue: QueuePut) -> tuple[Cut, ...]:
    return queue.part.cuts if queue.part is not None else ()


def with_cuts(queue: QueuePut, cuts: tuple[Cut, ...]) -> QueuePut:
    assert queue.part is not None
    return msgspec.structs.replace(queue, part=msgspec.structs.replace(queue.part, cuts=cuts))


def with_cut(queue: QueuePut, cut: Cut) -> QueuePut:
    """Add a cut, in place of the cut that the same reshard has left before.

    A stream that loses keys after all did not gain any.
    """
    others = tuple(each for each in cuts_of(queue) if each.number != cut.number)
    return with_cuts(queue, (*others, cut)[-CUTS_MAX:])


def cut_at(
    parts: Iterable[QueuePut], number: int, offsets: Mapping[int, int], gains: bool
) -> list[QueuePut]:
    """Return the shard queues that have an offset here, by queue id, with a cut at that offset."""
    return [
        with_cut(queue, Cut(number, offsets[queue.id], gains))
        for queue in parts
        if queue.id in offsets and queue.part is not None
    ]


def moves(parts: Sequence[QueuePut]) -> tuple[Move, ...]:
    """Return the reshards that left cuts in the shard queues of one exchange, the oldest first."""
    cuts = [(cut, queue.id) for queue in parts for cut in cuts_of(queue)]
    if not cuts:
        return ()
    under_way = number_under_way(parts)
    found = []
    for number in sorted({cut.number for cut, _ in cuts}):
        gaining = {id: cut.offset for cut, id in cuts if cut.number == number and cut.gains}
        losing = {id: cut.offset for cut, id in cuts if cut.number == number and not cut.gains}
        found.append(Move(number, gaining, None if number == under_way else losing))
    return tuple(found)


def number_under_way(parts: Sequence[QueuePut]) -> int | None:
    """Return the number of the reshard under way; None if there is none or it has left no cut yet.

    A reshard that was called off before the bindings changed left cuts in streams that would have
    gained keys, and none in others. Nothing is waited for then.
    """
    latest = max((cut.number for queue in parts for cut in cuts_of(queue)), default=0)
    of_latest = [(cut, queue) for queue in parts for cut in cuts_of(queue) if cut.number == latest]
    lost = any(not cut.gains for cut, _ in of_latest)
    holds = any(hold_of(queue) for _, queue in of_latest)
    return latest if holds and not lost else None


def number_of(parts: Sequence[QueuePut]) -> int:
    """Return the number of the reshard under way, also if it has left no cut yet."""
    latest = max((cut.number for queue in parts for cut in cuts_of(queue)), default=0)
    return number_under_way(parts) or latest + 1


def begun(queue: QueuePut, parts: Iterable[QueuePut]) -> QueuePut:
    """Return a queue that is about to gain keys without the cuts of reshards that were called off.

    Otherwise such a cut would be taken for one of the reshard that begins.
    """
    if not cuts_of(queue):
        return queue
    lost = {cut.number for each in parts for cut in cuts_of(each) if not cut.gains}
    return with_cuts(queue, tuple(cut for cut in cuts_of(queue) if cut.number in lost))


def without_cut(parts: Sequence[QueuePut], closing: Iterable[QueuePut]) -> list[QueuePut]:
    """Return the streams among `closing` in which the reshard under way has left no cut yet."""
    number = number_under_way(parts)
    return [
        queue
        for queue in closing
        if is_stream(queue)
        and (number is None or all(cut.number != number for cut in cuts_of(queue)))
    ]


class Crossing:
    """The progress of one group of consumers over the reshards of its exchange."""

    def __init__(self) -> None:
        self.given_up: set[int] = set()  # reshards whose order is not waited for any more
        self._settled: dict[int, int] = {}  # by queue id: all below this offset is settled
        self._crossed: set[int] = set()  # reshards that the group has crossed
        self._since: dict[int, float] = {}  # when a reshard was first seen to be waited for, in s

    def passed(self, queue: int, offset: int) -> None:
        """Note that the group has settled everything in a stream below this offset."""
        self._settled[queue] = max(offset, self._settled.get(queue, 0))

    def waits_for(self, move: Move, queues: Collection[int]) -> dict[int, int] | None:
        """Return which of the existing `queues` the group has to settle first, and up to where.

        The answer is None while the cuts of the streams that lose keys are not known.
        """
        if move.losing is None:
            return None
        return {
            id: offset
            for id, offset in move.losing.items()
            if id in queues and self._settled.get(id, 0) < offset
        }

    def open(self, moves: Sequence[Move], queues: Collection[int]) -> list[Move]:
        """Return the reshards that the group has not crossed.

        One that is not crossed keeps all later ones open.
        """
        found: list[Move] = []
        # The number of a reshard that was called off is used again.
        numbers = {move.number for move in moves}
        self._crossed &= numbers
        self.given_up &= numbers
        for move in moves:
            if move.number in self._crossed or move.number in self.given_up:
                continue
            waits_for = self.waits_for(move, queues)
            if found or waits_for is None or waits_for:
                found.append(move)
            else:
                self._crossed.add(move.number)
        return found

    def bounds(self, open: Iterable[Move], queue: int) -> Bounds:
        """Return how far the group may read a stream while these reshards are not crossed."""
        stops = [move.gaining[queue] for move in open if queue in move.gaining]
        losing = [
            move.losing[queue] for move in open if move.losing is not None and queue in move.losing
        ]
        marks = [offset for offset in losing if self._settled.get(queue, 0) < offset]
        return Bounds(min(stops, default=None), min(marks, default=None))

    def overdue(self, open: Sequence[Move], now: float, wait_ms: int) -> set[int]:
        """Return the reshards that the group has waited for longer than `wait_ms`.

        The time counts from the first call that saw the group wait. `now` is in seconds of a clock
        that only goes forward.
        """
        # Only the first: what keeps the group from crossing a later one may be the first alone.
        first = [move.number for move in open[:1] if move.losing is not None]
        since = {number: self._since.get(number, now) for number in first}
        self._since = since
        return {number for number, at in since.items() if (now - at) * 1000 >= wait_ms}
