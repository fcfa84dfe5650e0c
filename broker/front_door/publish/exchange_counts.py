"""Counters of each exchange at this front door: messages that came, messages to queues.

The packer counts messages that take a learnt route, once for neighbours of the same line. The
caller adds messages that were decided about one by one.
"""

from __future__ import annotations

from collections.abc import Callable

from shardmq.broker.model.catalog import Catalog
from shardmq.shardd.wire.codec import Published


class ExchangeCounts:
    """Counters since the start of this front door, of exchanges that are there."""

    def __init__(self) -> None:
        self._by_vhost: dict[str, Published] = {}

    def of(self, vhost: str) -> Published:
        """Return the counters that the routes of all users of this vhost share."""
        published = self._by_vhost.get(vhost)
        if published is None:
            published = self._by_vhost[vhost] = Published()
        return published

    def report(self) -> list[tuple[str, str, int, int]]:
        """Return a row for each exchange that was published to.

        A row is vhost, exchange, messages that came, messages that went to queues.
        """
        return [
            (vhost, exchange.decode(), came, left)
            for vhost, published in self._by_vhost.items()
            for exchange, (came, left) in published.report().items()
        ]

    def forget(self, catalog: Catalog, in_use: Callable[[str], bool]) -> None:
        """Forget what is not in the catalog any more. All routes were emptied before.

        `in_use` tells whether the routes of some user of a vhost hold its counters.
        """
        for vhost, published in list(self._by_vhost.items()):
            found = catalog.vhost(vhost)
            if found is None and not in_use(vhost):
                del self._by_vhost[vhost]
                continue
            names = found.exchanges if found is not None else {}
            published.forget(lambda exchange, names=names: exchange.decode() not in names)  # type: ignore[misc]
