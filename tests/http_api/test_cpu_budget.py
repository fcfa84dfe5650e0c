"""Long answers take no more than their share of a processor.

Short answers wait for nothing.
"""

from __future__ import annotations

import asyncio
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.controller.management.responses.cpu_budget import (
    AT_ONCE_S,
    REST_S_MAX,
    REST_SHARE,
    RESTS_S_MAX,
    SLICE_S,
    WAITED_SHARE,
    CpuBudget,
    Passes,
    SlicedWork,
)

pieces = st.lists(st.tuples(st.integers(0, 4), st.floats(0.0001, 0.01)), min_size=1, max_size=300)


class Machine:
    """One thread: who works takes its time, who rests lets the others work."""

    def __init__(self) -> None:
        self.now = self.worked = 0.0

    def sliced(self, budget: CpuBudget) -> SlicedWork:
        work = SlicedWork(worked=lambda: self.worked, clock=lambda: self.now)
        work.budget = budget
        return work

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.worked += seconds


@given(pieces)
def test_together_they_take_their_share(work: list[tuple[int, float]]) -> None:
    machine, budget = Machine(), CpuBudget()
    answers = [machine.sliced(budget) for _ in range(5)]
    awake = [0.0] * len(answers)  # when each goes on
    for number, seconds in work:
        machine.now = max(machine.now, awake[number])
        machine.work(seconds)
        awake[number] = machine.now + answers[number].rest_s()
        answers[number].resume()
        if min(awake) > machine.now:
            machine.now = min(awake)
    rested_out = any(answer.left_s <= 0 for answer in answers)
    share = 1 / (1 + REST_SHARE)
    # The last piece of each is not rested for yet, and debts end at a second's rest.
    slack = AT_ONCE_S + 0.01 * len(answers)
    assert rested_out or machine.worked <= share * max(machine.now, *awake) + slack


@given(st.floats(0, AT_ONCE_S * 0.99), st.floats(0, 100))
def test_who_asks_now_and_then_waits_for_nothing(seconds: float, since: float) -> None:
    machine = Machine()
    machine.now = since
    work = machine.sliced(CpuBudget())
    machine.work(seconds)
    assert work.rest_s() == 0


def test_no_answer_rests_for_ever_and_none_for_long_at_a_time() -> None:
    machine = Machine()
    work = machine.sliced(CpuBudget())
    rests = []
    for _ in range(100):
        machine.work(1.0)
        rests.append(work.rest_s())
        work.resume()
    assert max(rests) <= REST_S_MAX
    assert sum(rests) <= RESTS_S_MAX


PIECE_S = SLICE_S / 5


async def test_the_processor_is_offered_after_each_piece_and_the_event_loop_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, offered, looped = Machine(), 0, 0

    def offer() -> None:
        nonlocal offered
        offered += 1

    async def beside() -> None:
        nonlocal looped
        while True:
            await asyncio.sleep(0)
            looped += 1

    monkeypatch.setattr(os, "sched_yield", offer)
    work, other = machine.sliced(CpuBudget()), asyncio.create_task(beside())
    await asyncio.sleep(0)
    offered = looped = 0
    for _ in range(100):
        machine.work(PIECE_S)
        await work.yield_to_others()
    other.cancel()
    assert offered == 100
    assert 10 <= looped <= 50


@given(st.floats(0.001, 0.1))
def test_where_processors_are_always_wanted_a_long_answer_has_its_share(wait_s: float) -> None:
    machine = Machine()

    def others_work() -> None:
        machine.now += wait_s

    async def answer() -> None:
        work = machine.sliced(CpuBudget())
        for _ in range(round(2 * AT_ONCE_S / PIECE_S)):
            machine.work(PIECE_S)
            await work.yield_to_others()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "sched_yield", others_work)
        asyncio.run(answer())
    assert machine.worked >= WAITED_SHARE / (1 + WAITED_SHARE) * machine.now - wait_s


class Pass:
    """Counts the passes of the event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._next)

    def _next(self) -> None:
        self.number += 1
        self._loop.call_soon(self._next)


@pytest.mark.parametrize("works", [1, 2, 50])
async def test_all_long_works_together_do_one_slice_in_a_pass(works: int) -> None:
    passes, at, slices = Passes(), Pass(), 4
    done: list[tuple[int, int]] = []  # which work, in which pass

    async def work(number: int) -> None:
        for _ in range(slices):
            await passes.wait()
            done.append((at.number, number))

    await asyncio.gather(*map(work, range(works)))
    assert len({number for number, _ in done}) == len(done) == works * slices
    assert [number for _, number in done] == [*range(works)] * slices, (
        "they have their turn one after the other"
    )


async def test_a_work_that_is_cancelled_while_it_waits_takes_no_pass_from_others() -> None:
    passes, done = Passes(), []

    async def work(number: int) -> None:
        await passes.wait()
        done.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(10)]
    await asyncio.sleep(0)
    for task in tasks[:9]:
        task.cancel()
    await asyncio.wait(tasks)
    assert 9 in done
    await asyncio.wait_for(passes.wait(), 60)


def test_passes_of_an_event_loop_that_ended_hold_up_no_other() -> None:
    passes = Passes()

    async def ends_early() -> None:
        waiting = asyncio.ensure_future(passes.wait())
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(ends_early())
    asyncio.run(asyncio.wait_for(passes.wait(), 60))
