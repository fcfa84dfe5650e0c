from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.queues.state import Unacked


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 80), st.integers(0, 30)), max_size=60))
def test_any_range_is_settled_once_in_any_order(steps: list[tuple[bool, int, int]]) -> None:
    unacked, model, last = Unacked(), dict[int, int](), 0
    for add, a, b in steps:
        if add:
            numbers = range(last + 1, last + 1 + b)
            assert (
                unacked.add(array("Q", [n * 16 for n in numbers]), array("I", numbers)) == last + 1
            )
            model.update((n, n * 16) for n in numbers)
            last += b
        else:
            gone = [n for n in range(a, a + b + 1) if n in model]
            entries, size = unacked.settle(a, a + b)
            assert list(entries) == [model.pop(n) for n in gone]
            assert size == sum(gone)
        assert list(unacked.held()) == [model[n] for n in sorted(model)]
        assert unacked.count == len(model)
