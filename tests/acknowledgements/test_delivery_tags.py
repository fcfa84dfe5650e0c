"""A channel's delivery tags stand for the shards' delivery numbers, whatever the order of acks."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.front_door.consume.unacked import Run, Unacked, UnknownTag

CONSUMERS: list[Any] = ["a", "b"]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("deliver"), st.integers(0, 1), st.integers(1, 6)),
        st.tuples(st.just("ack"), st.integers(0, 40), st.integers(0, 6)),
        st.tuples(st.just("through"), st.integers(0, 40), st.just(0)),
    ),
    max_size=60,
)


def spread(runs: list[Run]) -> list[tuple[int, str, int]]:
    return [
        (tag, str(run.consumer), run.first_number + tag - run.first_tag)
        for run in runs
        for tag in range(run.first_tag, run.last_tag + 1)
    ]


@given(steps)
def test_runs_behave_like_a_table_of_single_tags(history: list[tuple[str, int, int]]) -> None:
    unacked = Unacked()
    table: dict[int, tuple[str, int]] = {}
    next_tag, next_number = 1, [1, 1]
    for what, first, count in history:
        if what == "deliver":
            unacked.add(next_tag, count, CONSUMERS[first], 1, next_number[first])
            for step in range(count):
                table[next_tag + step] = (CONSUMERS[first], next_number[first] + step)
            next_tag += count
            next_number[first] += count
        elif what == "through":
            if first == 0 or first in table:
                expected = [
                    (tag, *table.pop(tag)) for tag in sorted(table) if first == 0 or tag <= first
                ]
                assert spread(unacked.take_through(first)) == expected
            else:
                assert refuses(lambda first=first: unacked.take_through(first), first)
        else:
            last = first + count
            known = []
            for tag in range(first, last + 1):
                if tag not in table:
                    break
                known.append((tag, *table.pop(tag)))
            if len(known) == count + 1:
                assert spread(list(unacked.take(first, last))) == known
            else:
                assert refuses(
                    lambda first=first, last=last: list(unacked.take(first, last)),
                    first + len(known),
                )
        assert unacked.count == len(table)


def refuses(act: Any, tag: int) -> bool:
    try:
        act()
    except UnknownTag as unknown:
        return unknown.tag == tag
    return False


def test_an_unknown_tag_leaves_later_ones_alone() -> None:
    unacked = Unacked()
    unacked.add(1, 3, CONSUMERS[0], 1, 1)
    assert refuses(lambda: list(unacked.take(4, 4)), 4)
    assert refuses(lambda: unacked.take_through(9), 9)
    assert spread(unacked.take_through(0)) == [(1, "a", 1), (2, "a", 2), (3, "a", 3)]
