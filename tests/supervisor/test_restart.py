"""When a child that died is started again, and when the broker stops trying."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardmq.supervisor.restart import LONGEST_WAIT_S, Restarts


def restarts(deaths_max: int = 10, within_s: float = 60, ready: bool = True) -> Restarts:
    policy = Restarts(deaths_max, within_s)
    if ready:
        policy.became_ready()
    return policy


def test_the_first_death_is_answered_at_once_and_the_next_ones_with_growing_patience() -> None:
    policy = restarts()
    assert [policy.wait_after_death(0) for _ in range(9)] == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]
    assert policy.wait_after_death(0) is None


def test_a_child_that_was_never_ready_is_given_up_soon() -> None:
    policy = restarts(ready=False)
    assert [policy.wait_after_death(0) for _ in range(3)] == [0, 0.1, None]


@given(st.lists(st.floats(7, 1000), max_size=200))
def test_deaths_far_enough_apart_are_never_given_up(gaps: list[float]) -> None:
    policy, now = restarts(), 0.0
    for gap in gaps:
        now += gap
        wait = policy.wait_after_death(now)
        assert wait is not None and 0 <= wait <= LONGEST_WAIT_S


@given(st.integers(1, 20), st.lists(st.floats(0, 100), max_size=100))
def test_it_gives_up_exactly_when_too_many_deaths_fall_within_the_window(
    most: int, gaps: list[float]
) -> None:
    policy, now, deaths = restarts(most, 60), 0.0, list[float]()
    for gap in gaps:
        now += gap
        deaths.append(now)
        recent = [death for death in deaths if death >= now - 60]
        assert (policy.wait_after_death(now) is None) == (len(recent) >= most)
