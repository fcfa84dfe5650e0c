"""Count values in classes of powers of two, cheaply enough for each batch and each sync.

A process reports its histograms among its numbers (`StatsReply.process`, `DoorReport.counters`),
under names with a dot:

    NAME.K     count of values above 2^(K-1) and not above 2^K; K = 0: not above 1.
               Empty classes are left out.
    NAME.sum   sum of all values
"""

from __future__ import annotations

from collections.abc import Mapping

from shardmq.shardd.wire.codec import Tally

SUM = "sum"


class Histogram(Tally):
    """A histogram of integers from 0 on, below 2^64; `add` counts one value."""

    __slots__ = ()

    def report(self, name: str) -> dict[str, float]:
        told = {f"{name}.{k}": float(count) for k, count in enumerate(self.counts) if count}
        if told:
            told[f"{name}.{SUM}"] = float(self.sum)
        return told


def parts_of(numbers: Mapping[str, float], name: str) -> dict[str, float]:
    """Return the numbers reported under NAME.something, by something."""
    start = f"{name}."
    return {key[len(start) :]: value for key, value in numbers.items() if key.startswith(start)}


def cumulative(
    parts: Mapping[str, float], first: int, last: int
) -> tuple[list[tuple[int, float]], float, float]:
    """Return a histogram in the form of Prometheus.

    `parts` is one histogram, or the sum of several. The result has (upper bound, count of values
    not above it) for the bounds 2^first to 2^last, then the count and the sum of all values.
    """
    counts = {int(k): value for k, value in parts.items() if k != SUM}
    bounds = [
        (1 << k, sum(count for at, count in counts.items() if at <= k))
        for k in range(first, last + 1)
    ]
    return bounds, sum(counts.values()), parts.get(SUM, 0.0)
