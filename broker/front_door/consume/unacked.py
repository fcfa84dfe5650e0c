"""Find the delivery of a shard that a delivery tag of a channel stands for, until it is settled.

A shard numbers the deliveries of each consumer 1, 2, 3 ...; a channel numbers all its deliveries.
`Unacked` keeps both numbers as runs (neighbouring tags of one consumer), so that a burst costs one
entry and a cumulative ack a few comparisons.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

# Deliveries of one consumer within this time may be one run, which has one age.
RUN_S_MAX = 1.0

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


class Unacked(Generic[C]):
    """The deliveries of one channel that wait for their ack, by tag."""

    def __init__(self) -> None:
        self._runs: list[Run[C]] = []
        self._firsts: list[int] = []  # first tag of each run
        self.count = 0

    def add(
        self,
        first_tag: int,
        count: int,
        consumer: C,
        epoch: int,
        first_number: int,
        at: float = 0.0,
    ) -> None:
        """Add deliveries that came from a shard at loop time `at`."""
        self.count += count
        if self._runs:
            run = self._runs[-1]
            follows = run.first_number + run.last_tag + 1 - run.first_tag == first_number
            follows = (
                follows
                and run.consumer is consumer
                and run.epoch == epoch
                and run.last_tag + 1 == first_tag
            )
            if follows and at - run.at < RUN_S_MAX:
                self._runs[-1] = Run(
                    run.first_tag, first_tag + count - 1, consumer, epoch, run.first_number, run.at
                )
                return
        self._runs.append(Run(first_tag, first_tag + count - 1, consumer, epoch, first_number, at))
        self._firsts.append(first_tag)

    def has(self, tag: int) -> bool:
        """Return whether the tag is outstanding."""
        at = bisect_right(self._firsts, tag) - 1
        return at >= 0 and self._runs[at].last_tag >= tag

    def take_through(self, tag: int) -> list[Run[C]]:
        """Take all deliveries up to `tag`, which must be outstanding; 0 means all there are."""
        if tag == 0:
            taken, self._runs, self._firsts = self._runs, [], []
            self.count = 0
            return taken
        at = self._find(tag)
        run = self._runs[at]
        taken = self._runs[:at]
        if run.last_tag == tag:
            taken.append(run)
            del self._runs[: at + 1], self._firsts[: at + 1]
        else:
            taken.append(Run(run.first_tag, tag, run.consumer, run.epoch, run.first_number, run.at))
            self._runs[at] = _from(run, tag + 1)
            self._firsts[at] = tag + 1
            del self._runs[:at], self._firsts[:at]
        for each in taken:
            self.count -= each.last_tag + 1 - each.first_tag
        return taken

    def take(self, first: int, last: int) -> Iterator[Run[C]]:
        """Take each tag of first..last. Raises UnknownTag behind the tags that were taken."""
        while first <= last:
            at = self._find(first)
            run = self._runs[at]
            end = min(last, run.last_tag)
            pieces = []
            if run.first_tag < first:
                pieces.append(run._replace(last_tag=first - 1))
            if end < run.last_tag:
                pieces.append(_from(run, end + 1))
            self._runs[at : at + 1] = pieces
            self._firsts[at : at + 1] = [piece.first_tag for piece in pieces]
            self.count -= end - first + 1
            yield _from(run, first)._replace(last_tag=end)
            first = end + 1

    def runs(self) -> Iterator[Run[C]]:
        """Return all runs, by tag."""
        return iter(self._runs)

    def of(self, consumer: C) -> Iterator[Run[C]]:
        return (run for run in self._runs if run.consumer is consumer)

    def put_back(self, run: Run[C]) -> None:
        """Put back what a rolled back transaction had taken."""
        at = bisect_right(self._firsts, run.first_tag)
        self._runs.insert(at, run)
        self._firsts.insert(at, run.first_tag)
        self.count += run.last_tag - run.first_tag + 1

    def _find(self, tag: int) -> int:
        at = bisect_right(self._firsts, tag) - 1
        if at < 0 or self._runs[at].last_tag < tag:
            raise UnknownTag(tag)
        return at


def _from(run: Run[C], tag: int) -> Run[C]:
    """Return the run without the tags before `tag`."""
    return Run(
        tag, run.last_tag, run.consumer, run.epoch, run.first_number + tag - run.first_tag, run.at
    )


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
