"""Test the decisions on changes of the catalog.

A large removal is done in small steps, so that front doors carry messages between them. Many binds
requested at once have the same result as the same binds one after the other.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.controller.decisions.bindings import BINDINGS_AT_ONCE_MAX
from shardmq.broker.controller.decisions.decisions import Decisions
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import AnyChange, BindingPut, ExchangePut, QueuePut, VhostPut
from shardmq.broker.model.checks import Refusal
from shardmq.broker.routing.placement import Placement
from shardmq.broker.shared.control import Bind, BindMany, ExchangeRemove, QueueRemove

MANY = BINDINGS_AT_ONCE_MAX + 1


@pytest.mark.parametrize("bindings", [3, MANY])
@pytest.mark.parametrize(
    "ask",
    [
        QueueRemove("/", "q", if_unused=False, if_empty=False),
        ExchangeRemove("/", "e", if_unused=False),
    ],
)
def test_no_single_change_takes_many_bindings_along(
    ask: QueueRemove | ExchangeRemove, bindings: int
) -> None:
    catalog = Catalog()
    things = [
        VhostPut("/"),
        ExchangePut("/", "e", "direct"),
        ExchangePut("/", "f", "fanout"),
        QueuePut("/", "q", 1, 0),
    ]
    keys = [BindingPut("/", "e", "queue", "q", str(key)) for key in range(bindings)]
    for change in [
        *things,
        *keys,
        BindingPut("/", "f", "exchange", "e", ""),
        BindingPut("/", "f", "queue", "q", ""),
    ]:
        catalog.apply(change)
    vhost = catalog.vhosts["/"]
    left = len(list(vhost.bindings()))
    decision = Decisions(catalog, lambda: 2, lambda: "name", Placement([0])).decide(ask, "")
    for change in decision.changes:
        before, left = left, len(list(vhost.bindings()))
        catalog.apply(change)
        assert before - left <= BINDINGS_AT_ONCE_MAX
    assert ask.name not in (vhost.queues if isinstance(ask, QueueRemove) else vhost.exchanges)
    assert len(list(vhost.bindings())) == 1  # of the exchange, or of the queue, that stays


END = (
    st.sampled_from(["direct", "weighted", "missing", ""]),
    st.sampled_from(["q", "theirs", "missing", "mine"]),
)
ENDS = st.tuples(*END, st.sampled_from(["1", "2", "none", "k" * 300]))


@given(
    st.lists(ENDS | st.tuples(st.just("direct"), st.just("q"), st.sampled_from("ab")), max_size=12)
)
def test_many_binds_are_done_up_to_the_first_that_is_refused(
    binds: list[tuple[str, str, str]],
) -> None:
    catalogs = [Catalog(), Catalog()]
    for catalog in catalogs:
        catalog.apply_all([
            VhostPut("/"), ExchangePut("/", "direct", "direct"),
            ExchangePut("/", "weighted", "x-consistent-hash"),
            QueuePut("/", "q", 1, 0),
            QueuePut("/", "mine", 2, 0, owner="me"), QueuePut("/", "theirs", 3, 0, owner="you"),
        ])  # fmt: skip
    single, many = (
        Decisions(catalog, lambda: 2, lambda: "name", Placement([0])) for catalog in catalogs
    )
    changes: list[AnyChange] = []
    refused: Refusal | None = None
    done = 0
    try:
        for source, queue, key in binds:
            decision = single.decide(Bind("/", source, "queue", queue, key, {}), "me")
            catalogs[0].apply_all(decision.changes)
            changes += decision.changes
            done += 1
    except Refusal as refusal:
        refused = refusal
    if any(len(key) > 255 for *_, key in binds):
        with pytest.raises(Refusal, match="255 bytes"):
            many.decide(BindMany("/", binds), "me")
        return
    decision = many.decide(BindMany("/", binds), "me")
    assert decision.changes == changes
    assert str(decision.refused) == str(refused)
    assert decision.result == ({} if refused is None else {"done": done})
