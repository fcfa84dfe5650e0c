"""How often something was how large: counts in classes of powers of two, cheap enough for each batch and each sync.

A process tells them among its numbers (`StatsReply.process`, `DoorReport.counters`), under names with a dot:

    NAME.K     how many were above 2^(K-1) and not above 2^K; K = 0: not above 1. Classes nothing fell into are left out
    NAME.sum   all values together
"""

from __future__ import annotations

from collections.abc import Mapping

from shardmq.shardd.wire.tally import Tally

SUM = "sum"


class Histogram(Tally):
    """Of integers from 0 on, below 2^64: `add` each."""

    __slots__ = ()

    def report(self, name: str) -> dict[str, float]:
        told = {f"{name}.{k}": float(count) for k, count in enumerate(self.counts) if count}
        if told:
            told[f"{name}.{SUM}"] = float(self.sum)
        return told


def parts_of(numbers: Mapping[str, float], name: str) -> dict[str, float]:
    """What was told under NAME.something, by something."""
    start = f"{name}."
    return {key[len(start) :]: value for key, value in numbers.items() if key.startswith(start)}


def cumulative(
    parts: Mapping[str, float], first: int, last: int
) -> tuple[list[tuple[int, float]], float, float]:
    """As Prometheus has it: (upper bound, how many not above it) for 2^first .. 2^last, how many in all, their sum.
    `parts`: of one histogram, or of several added up."""
    counts = {int(k): value for k, value in parts.items() if k != SUM}
    bounds = [
        (1 << k, sum(count for at, count in counts.items() if at <= k))
        for k in range(first, last + 1)
    ]
    return bounds, sum(counts.values()), parts.get(SUM, 0.0)
