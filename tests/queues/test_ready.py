from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from shardd.queues.ready import Ready, marked, same_mark, total


@given(st.lists(st.tuples(st.sampled_from(["push", "take", "back", "many"]), st.integers(0, 40)), max_size=60))
def test_entries_come_in_order_and_go_back_to_their_place(steps: list[tuple[str, int]]) -> None:
    ready, model, out, last = Ready(), list[int](), list[int](), 0
    for step, count in steps:
        if step in ("push", "many"):
            more = [last + 16 * (i + 1) for i in range(count * (500 if step == "many" else 1))]
            last = more[-1] if more else last
            ready.push_many(array("Q", more))
            model += more
        elif step == "take":
            taken = list(ready.peek(count))
            ready.drop(count)
            assert taken == model[:count]
            model = model[count:]
            out += taken
        else:
            back, out = sorted(out[::2]), out[1::2]
            ready.merge(array("Q", back))
            model = sorted(model + back)
        assert len(ready) == len(model)
        assert ready.first() == (model[0] if model else 0)
    assert list(ready.take_all()) == model
    assert len(ready) == 0


def test_marks_and_sums() -> None:
    assert list(marked(array("Q", [16, 33, 48]))) == [17, 33, 49]
    assert same_mark(array("Q", [16, 32, 49]), 0) == 2
    assert total(array("I", [0xFFFFFFFF, 1])) == 1 << 32
