"""Counters of what the clients of each vhost did, of those that have left too.

A channel and a connection count for themselves. When one of them ends, its counters are added up
here, so that the counters of a vhost never fall.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardmq.broker.front_door.counts import OF_CHANNEL, OF_CONNECTION

_NAMES = (*OF_CHANNEL, *OF_CONNECTION)


class VhostCounts:
    """Counters by vhost, in the order of OF_CHANNEL and OF_CONNECTION."""

    def __init__(self, ended: VhostCounts | None = None) -> None:
        """Begin with the counters of `ended`, or with none."""
        self._counts: dict[str, list[int]] = {}
        if ended is not None:
            self._counts = {vhost: [*counts] for vhost, counts in ended._counts.items()}

    def add_channel(self, vhost: str, counted: Sequence[int]) -> None:
        """Add the counters of a channel, in the order of OF_CHANNEL."""
        counts = self._of(vhost)
        counts[: len(counted)] = [sum(pair) for pair in zip(counts, counted, strict=False)]

    def add_connection(self, vhost: str, received_bytes: int, written_bytes: int) -> None:
        counts = self._of(vhost)
        counts[-2] += received_bytes
        counts[-1] += written_bytes

    def _of(self, vhost: str) -> list[int]:
        counts = self._counts.get(vhost)
        if counts is None:
            counts = self._counts[vhost] = [0] * len(_NAMES)
        return counts

    def forget_all_but(self, vhosts: Mapping[str, object]) -> None:
        for vhost in self._counts.keys() - vhosts.keys():
            del self._counts[vhost]

    def report(self) -> dict[str, dict[str, int]]:
        """Return the counters by vhost and name."""
        return {
            vhost: dict(zip(_NAMES, counts, strict=True)) for vhost, counts in self._counts.items()
        }
