"""Each step of a large removal is a small one: front doors carry messages between them."""

from __future__ import annotations

import pytest

from broker.catalog import Catalog
from broker.changes import BindingPut, ExchangePut, QueuePut, VhostPut
from broker.control import ExchangeRemove, QueueRemove
from broker.controller.decisions import BINDINGS_AT_ONCE_MAX, Decisions

MANY = BINDINGS_AT_ONCE_MAX + 1


@pytest.mark.parametrize("bindings", [3, MANY])
@pytest.mark.parametrize(
    "ask", [QueueRemove("/", "q", if_unused=False, if_empty=False), ExchangeRemove("/", "e", if_unused=False)]
)
def test_no_single_change_takes_many_bindings_along(ask: QueueRemove | ExchangeRemove, bindings: int) -> None:
    catalog = Catalog()
    things = [VhostPut("/"), ExchangePut("/", "e", "direct"), ExchangePut("/", "f", "fanout"), QueuePut("/", "q", 1, 0)]
    keys = [BindingPut("/", "e", "queue", "q", str(key)) for key in range(bindings)]
    for change in [*things, *keys, BindingPut("/", "f", "exchange", "e", ""), BindingPut("/", "f", "queue", "q", "")]:
        catalog.apply(change)
    vhost = catalog.vhosts["/"]
    left = len(list(vhost.bindings()))
    decision = Decisions(catalog, lambda: 2, lambda: "name", lambda vhost, name: 0).decide(ask, "")
    for change in decision.changes:
        before, left = left, len(list(vhost.bindings()))
        catalog.apply(change)
        assert before - left <= BINDINGS_AT_ONCE_MAX
    assert ask.name not in (vhost.queues if isinstance(ask, QueueRemove) else vhost.exchanges)
    assert len(list(vhost.bindings())) == 1  # of the exchange, or of the queue, that stays
