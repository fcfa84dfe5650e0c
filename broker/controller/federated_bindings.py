"""Tells the process of bridges the bindings of federated exchanges, and each change of them.

Links make these bindings at their upstreams. The process forgets the bindings of an exchange that
is not federated any more, so one that comes back is told anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final

from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    AnyChange,
    BindingDelete,
    BindingPut,
    ExchangeDelete,
    QueueDelete,
)
from shardmq.broker.model.federation import ExchangeLink, Link
from shardmq.broker.model.upstream_bindings import Binding, Wanted
from shardmq.broker.shared.bridging import Bindings, line

# Changes that may change the bindings of an exchange.
_CHANGES: Final = frozenset((BindingPut, BindingDelete, QueueDelete, ExchangeDelete))
# To read the bindings takes at most one part in so many of a processor while they change.
REST_SHARE: Final = 20
REST_S_MAX: Final = 10.0
# So many bindings are read before others have the processor.
AT_A_TIME: Final = 500

Place = tuple[str, str]  # of an exchange: vhost and name


class FederatedBindings:
    """The exchanges that links bring messages to, and what the process is to be told of them."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._federated: frozenset[Place] = frozenset()
        self._forgotten: set[Place] = set()  # which the process may not know any more
        self._rebound: set[Place] = set()  # whose bindings may have changed since they were told
        self._has_rebound = asyncio.Event()

    def federate(self, links: Iterable[Link]) -> None:
        """Take the exchanges of these links, and no others."""
        federated = frozenset(
            (link.vhost, link.exchange) for link in links if isinstance(link, ExchangeLink)
        )
        new = federated - self._federated
        self._federated = federated
        self._forgotten = (self._forgotten | new) & federated
        self._rebind(new)

    def changed(self, changes: list[AnyChange], kinds: set[type[AnyChange]]) -> None:
        """Follow changes of the catalog, which are of these kinds."""
        if self._federated and not _CHANGES.isdisjoint(kinds):
            for change in changes:
                self._rebind(self._rebound_by(change))

    async def tell(self, writer: asyncio.StreamWriter) -> None:
        """Tell the process all, and then what changes, until cancelled or the process is gone."""
        told: dict[Place, bytes] = {}  # the digest of the line that said it
        self._rebind(self._federated)
        while not writer.is_closing():
            await self._has_rebound.wait()
            self._has_rebound.clear()
            took_s = 0.0
            told = {place: digest for place, digest in told.items() if place in self._federated}
            rebound, self._rebound = self._rebound, set()
            for place in rebound & self._federated:
                text, steps = b"", self._steps(place)
                while not text:
                    began = time.monotonic()
                    text = next(steps)
                    took_s += time.monotonic() - began
                    await asyncio.sleep(0)
                if place not in self._federated:
                    continue
                digest = hashlib.sha256(text).digest()
                if told.get(place) != digest or place in self._forgotten:
                    self._forgotten.discard(place)
                    told[place] = digest
                    writer.write(text)
                    with suppress(OSError):  # the loop ends then
                        await writer.drain()
            await asyncio.sleep(min(REST_SHARE * took_s, REST_S_MAX))

    def _steps(self, place: Place) -> Iterator[bytes]:
        """Yield b"" after each `AT_A_TIME` bindings of an exchange, and then the line for all.

        The line says the bindings as they were at the first step. Each change of them since then
        has them read once more.
        """
        vhost, exchange = place
        found = self._catalog.vhosts.get(vhost)
        puts = iter([] if found is None else list(found.bindings_from(exchange)))
        read = Wanted()
        while part := list(islice(puts, AT_A_TIME)):
            if not read.add(part):
                yield line(Bindings(vhost, exchange, None))
                return
            yield b""
        wanted, in_order = list[Binding](), read.in_order()
        while some := list(islice(in_order, AT_A_TIME)):
            wanted += some
            yield b""
        yield line(Bindings(vhost, exchange, wanted))

    def _rebind(self, places: Iterable[Place]) -> None:
        """See to it that the process is told the bindings of these exchanges again."""
        self._rebound.update(places)
        if self._rebound:
            self._has_rebound.set()

    def _rebound_by(self, change: AnyChange) -> Iterable[Place]:
        """Return the federated exchanges whose bindings a change may have changed."""
        match change:
            case BindingPut() | BindingDelete():
                place = change.vhost, change.source
                return (place,) if place in self._federated else ()
            case QueueDelete() | ExchangeDelete():
                return [place for place in self._federated if place[0] == change.vhost]
        return ()
