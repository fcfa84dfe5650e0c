"""Small reads that come fast share passes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.front_door.hot_state import (
    ALONE_PASSES,
    AT_ONCE_PASSES,
    COMPANY_PASSES,
    PASSES_HELD_MAX,
    TIMES_ITS_WORK,
    Pace,
    Reads,
)
from shardmq.broker.front_door.hot_state import (
    MUCH as MANY,
)
from tests.reference import pace as reference

TICK = 0.001
MUCH = TICK  # of the processor: half a core and more


def shared() -> Pace:
    """Return the pace of a front door that has just read two clients."""
    pace = Pace(TICK)
    pace.read_by(1)
    pace.read_by(2)
    return pace


def test_a_client_that_sends_rarely_never_waits() -> None:
    pace = shared()
    assert all(pace.distance(now, now) <= 0 for now in (1.0, 1.0 + 2 * TICK, 5.0))


def test_small_passes_that_take_much_keep_a_tick_between_them() -> None:
    pace = shared()
    assert pace.distance(1.0, MUCH) <= 0
    first = pace.distance(1.0 + TICK / 4, 2 * MUCH)
    assert abs(first - TICK * 3 / 4) < 1e-9
    pace.came(2)
    second = pace.distance(1.0 + TICK + TICK / 4, 3 * MUCH)  # the first one ended at 1 + TICK
    assert abs(second - TICK * 3 / 4) < 1e-9


def test_small_passes_that_take_little_wait_for_as_little() -> None:
    pace = shared()
    work = TICK / 4 / TIMES_ITS_WORK
    pace.distance(1.0, 7.0)
    assert abs(pace.distance(1.0 + TICK / 8, 7.0 + work) - TICK / 8) < 1e-9
    pace.came(2)
    assert pace.distance(1.0 + TICK, 7.0 + 2 * work) <= 0


def test_a_large_read_is_not_held_up() -> None:
    pace = shared()
    pace.distance(1.0, MUCH)
    pace.worth_a_pass()
    assert pace.distance(1.0 + TICK / 4, 2 * MUCH) <= 0


def test_who_waits_for_an_answer_to_each_message_waits_for_nobody_else() -> None:
    """Check how often a publisher that sends one message at a time has to wait.

    Each pass has one message, and the passes come within a tick. Only one pass in a while waits, to
    find out whether more messages would come.
    """
    pace = shared()
    now, waits = 1.0, []
    for number in range(1 + ALONE_PASSES + 9 * (AT_ONCE_PASSES + 1)):
        wait = max(pace.distance(now, number * MUCH), 0)
        waits.append(wait)
        pace.came(1)
        pace.read_by(number)
        now += wait + TICK / 4
    assert [wait > 0 for wait in waits] == [False] + ALONE_PASSES * [True] + 9 * (
        AT_ONCE_PASSES * [False] + [True]
    )


def test_what_came_together_once_is_waited_for_again() -> None:
    pace = shared()
    now, waits = 1.0, []
    for number in range(40):
        wait = max(pace.distance(now, number * MUCH), 0)
        waits.append(wait > 0)
        pace.came(1 + (wait > 0))
        pace.read_by(number)
        now += wait + TICK / 4
    assert waits == [False] + 39 * [True]


def test_a_client_that_is_alone_never_waits_and_one_with_company_does() -> None:
    pace, now = shared(), 1.0
    waits = []
    for number in range(COMPANY_PASSES + 8):
        wait = max(pace.distance(now, number * MUCH), 0)
        waits.append(wait > 0)
        pace.came(2)
        pace.read_by(1 if number == COMPANY_PASSES + 4 else 2)
        now += wait + TICK / 4
    alone = [False] * 5
    assert waits == [False, *[True] * (COMPANY_PASSES - 1), *alone, True, True, True]


def test_a_client_that_sends_much_waits_though_it_is_alone() -> None:
    pace, now, waits = Pace(TICK), 1.0, []
    for number, things in enumerate([MANY, MANY, MANY - 1, 1, MANY, MANY]):
        wait = max(pace.distance(now, number * MUCH), 0)
        waits.append(wait > 0)
        pace.came(things)
        now += wait + TICK / 4
    assert waits == [False, True, True, False, False, True]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.booleans()), max_size=40))
def test_batches_wait_for_few_passes_and_only_while_every_read_is_full(
    passes: list[tuple[int, int, bool]],
) -> None:
    reads, waited = Reads(), 0
    for full, short, is_small in passes:
        reads.full += full
        reads.short += short
        may_wait = reads.may_wait()
        assert not (may_wait and short) and (full or waited or not may_wait)
        if may_wait and is_small:
            waited += full > 0
        else:
            reads.held = waited = 0
        assert reads.held == waited <= PASSES_HELD_MAX


def test_after_so_many_passes_nothing_waits() -> None:
    reads, found = Reads(), []
    for _ in range(PASSES_HELD_MAX + 1):
        reads.full += 1
        found.append(reads.may_wait())
    assert found == [True] * PASSES_HELD_MAX + [False]


@pytest.mark.parametrize("seed", range(50))
def test_the_compiled_pace_is_the_one_in_plain_python(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    model, compiled = reference.Pace(TICK), Pace(TICK)
    reads = reference.Reads(), Reads()
    now = busy = 1.0
    for _ in range(200):
        now += rng.choice([TICK / 50, TICK / 8, TICK / 2, 3 * TICK])
        busy += rng.choice([TICK / 100, TICK / 10, TICK / 2])
        told = busy if rng.random() < 0.9 else None
        assert compiled.distance(now, told) == model.distance(now, told)
        for client in rng.choices([1, 2], [0.95, 0.05], k=rng.randint(0, 2)):
            model.read_by(client)
            compiled.read_by(client)
        things = rng.choice([0, 1, 1, 2, MANY, MANY - 1])
        model.came(things)
        compiled.came(things)
        if rng.random() < 0.1:
            model.worth_a_pass()
            compiled.worth_a_pass()
        full, short, held = rng.random() < 0.7, rng.random() < 0.1, rng.random() < 0.8
        for each in reads:
            each.full += full
            each.short += short
        waits = [each.may_wait() for each in reads]
        assert waits[0] == waits[1]
        if not (waits[0] and held):
            for each in reads:
                each.held = 0
