"""Find the delivery of a shard that a delivery tag of a channel stands for, until it is settled.

A shard numbers the deliveries of each consumer 1, 2, 3 ...; a channel numbers all its deliveries.
`Unacked` keeps both numbers as runs (neighbouring tags of one consumer), so that a burst costs one
entry and a cumulative ack a few comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from shardmq.broker.front_door.hot_state import UnackedState

C = TypeVar("C")  # a consumer; nothing but its identity is looked at


class Run(NamedTuple, Generic[C]):
    """Neighbouring delivery tags of one consumer and one epoch of its shard."""

    first_tag: int
    last_tag: int
    consumer: C
    epoch: int
    first_number: int
    at: float  # loop time of the first of them; the others came at most RUN_S_MAX later


class UnknownTag(Exception):
    """Raised for an ack of a tag that is not outstanding."""

    def __init__(self, tag: int) -> None:
        super().__init__(tag)
        self.tag = tag


class Unacked(UnackedState, Generic[C]):
    """The deliveries of one channel that wait for their ack, by tag."""

    __slots__ = ()

    def take_through(self, tag: int) -> list[Run[C]]:
        """Take all deliveries up to `tag`, which must be outstanding; 0 means all there are."""
        taken = self.cut_through(tag)
        if taken is None:
            raise UnknownTag(tag)
        return [Run(*run) for run in taken]

    def take(self, first: int, last: int) -> Iterator[Run[C]]:
        """Take each tag of first..last. Raises UnknownTag behind the tags that were taken."""
        while first <= last:
            taken = self.cut_from(first, last)
            if taken is None:
                raise UnknownTag(first)
            run = Run(*taken)
            yield run
            first = run.last_tag + 1

    def runs(self) -> Iterator[Run[C]]:
        """Return all runs, by tag."""
        return (Run(*run) for run in self.all_runs())

    def of(self, consumer: C) -> Iterator[Run[C]]:
        return (run for run in self.runs() if run.consumer is consumer)

    def put_back(self, run: Run[C]) -> None:
        """Put back what a rolled back transaction had taken."""
        self.insert(*run)


def subsumed(
    ranges: list[tuple[int, int, int, bool]], is_outstanding: Callable[[int], bool]
) -> list[tuple[int, int, int, bool]]:
    """Drop cumulative settles that the next one includes.

    This holds for those of one kind at the beginning, as long as each goes further than the one
    before and its tag is outstanding: the last of them settles the same deliveries. A settle that
    is an error stays, and so does the one before it.
    """
    if len(ranges) < 2 or not ranges[0][3] or not is_outstanding(ranges[0][1]):
        return ranges
    at = 0
    kind, tag, _, _ = ranges[0]
    for next_kind, next_tag, _, multiple in ranges[1:]:
        if not (multiple and next_kind == kind and next_tag > tag and is_outstanding(next_tag)):
            break
        tag = next_tag
        at += 1
    return ranges[at:] if at else ranges
