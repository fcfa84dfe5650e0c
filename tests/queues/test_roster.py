"""A queue that was not used yet answers as any other, and costs next to nothing until then."""

from __future__ import annotations

import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.queues import Kind, Queue, Roster, limits_of
from tests.support.dict_store import DictStore

ARGUMENTS = st.sampled_from(
    [{}, {}, {"x-max-length": 5}, {"x-expires": 1000}, {"x-message-ttl": 7}]
)
IDS = st.integers(1, 8)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), IDS, st.integers(0, 1), st.booleans(), ARGUMENTS),
        st.tuples(st.just("get"), IDS),
        st.tuples(st.just("pop"), IDS),
    ),
    max_size=40,
)


@given(STEPS)
def test_what_was_declared_is_there_with_its_arguments_whenever_it_is_asked_for(
    steps: list[tuple[Any, ...]],
) -> None:
    stores = [DictStore(), DictStore()]
    roster = Roster()
    known: dict[int, tuple[int, bool, Any]] = {}
    seen: dict[int, Queue] = {}
    for now, (step, id, *of) in enumerate(steps, 1000):
        if step == "put":
            at, durable, arguments = of
            if id in known:  # a declare of one that exists changes only its limits
                at, durable, _ = known[id]
            roster.put(id, Kind(stores[at], limits_of(arguments), durable, False), now)
            known[id] = (at, durable, limits_of(arguments))
        elif step == "get":
            queue = roster.get(id)
            assert (queue is not None) == (id in known)
            if queue is not None:
                assert seen.setdefault(id, queue) is queue
        else:
            popped = roster.pop(id)
            assert popped is not None or id not in seen
            known.pop(id, None)
            seen.pop(id, None)
        assert len(roster) == len(known)
        assert sorted(roster.ids()) == sorted(known)
        assert all(id in roster for id in known)
    for at, store in enumerate(stores):
        assert sorted(roster.of(store)) == sorted(
            id for id, (where, _, _) in known.items() if where == at
        )
    for id, (at, durable, limits) in known.items():
        queue = roster[id]
        assert (queue.id, queue.store, queue.backlog.durable, queue.backlog.limits) == (
            id,
            stores[at],
            durable,
            limits,
        )


def test_one_that_expires_counts_from_its_declaration() -> None:
    roster = Roster()
    queue = roster.put(1, Kind(DictStore(), limits_of({"x-expires": 1000}), True, False), 5000)
    assert queue is not None
    assert queue.next_due() == 6000


def test_a_hundred_thousand_unused_queues_cost_little() -> None:
    store = DictStore()
    tracemalloc.start()
    try:
        roster = Roster()
        for id in range(100_000, 200_000):
            roster.put(id, Kind(store, limits_of({}), True, False), 0)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 150 * 100_000
