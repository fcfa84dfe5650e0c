"""Latencies of a load, counted in a histogram without work for each message."""

from __future__ import annotations

import math
from collections import deque

# Each bucket is this factor wider than the one before it, so that a percentile is right to 2 %.
GROWTH = 1.02
LEAST_S = 1e-6
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


class Histogram:
    """Counts of latencies in buckets that grow by GROWTH."""

    def __init__(self) -> None:
        self.count = 0
        self._buckets: dict[int, int] = {}
        self._max_s = 0.0
        self._shown: dict[int, int] = {}  # The buckets as the last line showed them.

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a latency of some messages."""
        bucket = math.ceil(math.log(max(seconds, LEAST_S) / LEAST_S, GROWTH))
        self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self._max_s = max(self._max_s, seconds)
        self.count += count

    def row(self) -> dict[str, float | None]:
        """Return the percentiles in milliseconds by name, or None for each without a latency."""
        return _percentiles(self._buckets, self._max_s)

    def text_since_last(self) -> str:
        """Return the percentiles of the latencies since the call before, as a text."""
        added = {at: n - self._shown.get(at, 0) for at, n in self._buckets.items()}
        self._shown = dict(self._buckets)
        row = _percentiles({at: n for at, n in added.items() if n}, math.inf)
        names = [name for name in PERCENTILES if name != "max"]
        shown = "/".join("-" if row[name] is None else f"{row[name]:.3g}" for name in names)
        return f"{'/'.join(names)} {shown}"


def _percentiles(buckets: dict[int, int], max_s: float) -> dict[str, float | None]:
    total, found, seen = sum(buckets.values()), dict[str, float | None](), 0
    ordered = iter(sorted(buckets.items()))
    upper_s = 0.0
    for name, part in PERCENTILES.items():
        while total and seen < part * total:
            bucket, count = next(ordered)
            seen += count
            upper_s = LEAST_S * GROWTH**bucket
        found[name] = round(1000 * min(upper_s, max_s), 3) if total else None
    return found


class UnderWay:
    """Messages that are under way, in the order in which they must arrive.

    A queue and a channel keep their order. So the message that arrives as number N is the one that
    left as number N, and no message needs a stamp. Several publishers and consumers of one queue
    count together.
    """

    def __init__(self) -> None:
        self._runs: deque[list[float]] = deque()  # The number of messages and when they left.

    def left(self, count: int, now: float) -> None:
        """Note that messages leave at a time in seconds."""
        self._runs.append([count, now])

    def arrived(self, count: int, now: float, histogram: Histogram) -> None:
        """Count the latencies of the oldest messages. Messages of another load are left out."""
        while count > 0 and self._runs:
            run = self._runs[0]
            taken = min(count, int(run[0]))
            histogram.add(now - run[1], taken)
            run[0] -= taken
            count -= taken
            if not run[0]:
                self._runs.popleft()
