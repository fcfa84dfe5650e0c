"""A shard hears of every settled delivery once.

It hears of acks as soon as there are enough of them for a batch.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.front_door.consume.settling import (
    ACKS_TOGETHER_MAX,
    NO_HURRY,
    NO_HURRY_WAITS,
    RANGES_MAX,
    Settles,
    acks_together,
)
from shardmq.broker.front_door.consume.unacked import Run, Unacked, UnknownTag, subsumed
from shardmq.shardd.wire import messages as wire

CONSUMERS: list[Any] = ["a", "b"]

steps = st.lists(
    st.tuples(
        st.sampled_from(["ack", "requeue", "take"]),
        st.integers(1, 3),
        st.integers(1, 9),
        st.booleans(),
    ),
    max_size=60,
)


@given(steps, st.integers(1, 40))
def test_what_was_settled_is_told_once_and_each_number_as_it_was(
    history: list[tuple[str, int, int, bool]], together: int
) -> None:
    settles = Settles()
    said: dict[tuple[int, int], int] = {}
    told: dict[tuple[int, int], int] = {}
    numbers = {1: 1, 2: 1, 3: 1}

    def take() -> None:
        for consumer, kind, first, last in settles.take():
            for number in range(first, last + 1):
                assert (consumer, number) not in told
                told[consumer, number] = kind

    for what, consumer, count, gap in history:
        if what == "take":
            take()
            assert not settles and not settles.due
            continue
        first = numbers[consumer] + gap
        numbers[consumer] = first + count
        kind = wire.ACK if what == "ack" else wire.REQUEUE
        said |= dict.fromkeys([(consumer, number) for number in range(first, first + count)], kind)
        if what == "ack":
            settles.ack(consumer, first, first + count - 1, together)
        else:
            settles.add(consumer, kind, first, first + count - 1)
            assert settles.due
    take()
    assert told == said


@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), st.integers(1, 40), st.booleans())
def test_acks_wait_until_there_are_enough_of_them_in_whatever_order(
    counts: list[int], together: int, backwards: bool
) -> None:
    settles = Settles()
    at = 1000
    waiting = 0
    for count in counts:
        at += -count if backwards else count
        settles.ack(7, at, at + count - 1, together)
        waiting += count
        assert settles.due == (waiting >= together)


def test_a_shard_hears_of_credit_behind_the_acks_and_only_the_last_word() -> None:
    settles = Settles()
    settles.ack(1, 1, 5, NO_HURRY)
    assert settles and not settles.due
    settles.allot(100, 7, wire.KEEP)
    settles.allot(100, 9, wire.DRAIN)
    assert settles.due
    assert settles.take() == [(1, wire.ACK, 1, 5), (100, wire.ALLOT, 9, wire.DRAIN)]
    assert not settles and not settles.due and settles.take() == []


def test_acks_that_make_no_room_where_they_are_wait_longer_but_not_for_ever() -> None:
    settles = Settles()
    settles.ack(1, 1, 5, NO_HURRY)
    assert settles.may_wait_on()
    settles.ack(9, 1, 1, 100)  # somebody else's
    assert not settles.may_wait_on()
    settles.take()
    settles.ack(1, 6, 9, NO_HURRY)
    assert [settles.may_wait_on() for _ in range(NO_HURRY_WAITS)] == [True] * (
        NO_HURRY_WAITS - 1
    ) + [False]


def test_neighbours_are_one_range() -> None:
    settles = Settles()
    for consumer, first, last in (
        (1, 1, 5),
        (2, 1, 3),
        (1, 6, 9),
        (2, 4, 4),
        (1, 11, 11),
        (1, 12, 13),
    ):
        settles.ack(consumer, first, last, 100)
    ack = wire.ACK
    assert settles.take() == [(1, ack, 1, 9), (2, ack, 1, 4), (1, ack, 11, 13)]


def test_nobody_waits_who_has_few_deliveries_or_whose_keys_others_wait_for() -> None:
    assert [acks_together(prefetch, False) for prefetch in (1, 2, 3, 10, 5000, 0)] == [
        1,
        1,
        1,
        5,
        ACKS_TOGETHER_MAX,
        ACKS_TOGETHER_MAX,
    ]
    assert acks_together(1000, True) == 1


def test_what_waits_has_a_bound() -> None:
    settles = Settles()
    for consumer in range(RANGES_MAX):
        assert not settles.due
        settles.ack(consumer, 1, 1, 100)
    assert settles.due


ranges = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from([wire.ACK, wire.REQUEUE]), st.integers(0, 30), st.just(0), st.just(True)
        ),
        st.tuples(
            st.sampled_from([wire.ACK, wire.REQUEUE]),
            st.integers(1, 30),
            st.integers(0, 3),
            st.just(False),
        ),
    ),
    max_size=6,
)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 8)), max_size=6), ranges)
def test_cumulative_acks_together_do_what_they_do_one_by_one(
    deliveries: list[tuple[int, int]], said: list[tuple[int, int, int, bool]]
) -> None:
    asked = [
        (kind, first, first if multiple else first + last, multiple)
        for kind, first, last, multiple in said
    ]

    def settled(together: bool) -> tuple[dict[int, int], int | None]:
        unacked, tag, numbers = Unacked(), 1, [1, 1]
        for consumer, count in deliveries:
            unacked.add(tag, count, CONSUMERS[consumer], 1, numbers[consumer])
            tag, numbers[consumer] = tag + count, numbers[consumer] + count
        found: dict[int, int] = {}

        def note(kind: int, runs: list[Run]) -> None:
            found.update(
                {tag: kind for run in runs for tag in range(run.first_tag, run.last_tag + 1)}
            )

        try:
            for kind, first, last, multiple in subsumed(asked, unacked.has) if together else asked:
                if multiple:
                    note(kind, unacked.take_through(first))
                else:
                    for run in unacked.take(first, last):
                        note(kind, [run])
        except UnknownTag as unknown:
            return found, unknown.tag
        return found, None

    assert settled(together=True) == settled(together=False)
