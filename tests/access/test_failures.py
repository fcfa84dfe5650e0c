"""Test the budgets of wrong passwords beside a model that forgets nothing, with a fake clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.shared import failures as module
from shardmq.broker.shared.failures import (
    ADDRESS_FAILURE_S,
    ADDRESS_FAILURES_MAX,
    ADDRESSES_MAX,
    SAID_MAX,
    SAY_EACH_S,
    TOO_MANY,
    TOO_MANY_OF_USER,
    USER_FAILURE_S,
    USER_FAILURES_MAX,
    USERS_MAX,
    Failures,
    Unseen,
)

ADDRESSES, USERS = ("10.0.0.1", "10.0.0.2"), ("alice", "bob", "nobody\0", "")


class Model:
    """Keeps every failure there was, and works out anew each time how many of them still count."""

    def __init__(self) -> None:
        self.failures: dict[tuple[str, ...], list[float]] = defaultdict(list)

    def used(self, key: tuple[str, ...], now: float, refill_s: float) -> float:
        used = at = 0.0
        for then in self.failures[key]:
            used, at = max(0.0, used - (then - at) / refill_s) + 1, then
        return max(0.0, used - (now - at) / refill_s)

    def refusal(self, address: str, user: str, now: float) -> str:
        if USER_FAILURES_MAX - self.used((address, user), now, USER_FAILURE_S) < 1:
            return TOO_MANY_OF_USER
        if ADDRESS_FAILURES_MAX - self.used((address,), now, ADDRESS_FAILURE_S) < 1:
            return TOO_MANY
        return ""

    def failed(self, address: str, user: str, now: float) -> None:
        self.failures[address, user].append(now)
        self.failures[address,].append(now)


# Bursts of wrong passwords: after a pause (in eighths of a second, which floats hold), of whom, how
# many.
BURSTS = st.lists(
    st.tuples(
        st.integers(0, 400), st.sampled_from(ADDRESSES), st.sampled_from(USERS), st.integers(1, 60)
    ),
    max_size=30,
)


@given(BURSTS)
def test_any_history_is_judged_as_by_a_model_that_forgets_nothing(
    history: list[tuple[int, str, str, int]],
) -> None:
    failures, model, eighths = Failures(), Model(), 0
    for pause, address, user, count in history:
        eighths += pause
        for _ in range(count):
            refusal = failures.refusal(address, user, eighths / 8)
            assert refusal == model.refusal(address, user, eighths / 8)
            if refusal:
                break
            failures.failed(address, user, eighths / 8)
            model.failed(address, user, eighths / 8)


@given(BURSTS)
def test_no_more_guesses_than_the_budgets_and_what_time_gave(
    history: list[tuple[int, str, str, int]],
) -> None:
    failures, taken, now = Failures(), Counter[tuple[str, ...]](), 0.0
    for pause, address, user, count in history:
        now += pause / 8
        for _ in range(count):
            if not failures.refusal(address, user, now):
                failures.failed(address, user, now)
                taken.update([(address, user), (address,)])
    for key, count in taken.items():
        most, refill_s = (
            (USER_FAILURES_MAX, USER_FAILURE_S)
            if len(key) == 2
            else (ADDRESS_FAILURES_MAX, ADDRESS_FAILURE_S)
        )
        assert count <= most + now / refill_s + 1e-6


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 200)), max_size=60))
def test_one_user_takes_nothing_from_the_others_however_often_it_fails(
    history: list[tuple[int, int]],
) -> None:
    failures, now = Failures(), 0.0
    for pause, count in history:
        now += pause / 8
        for _ in range(count):
            if not failures.refusal("10.0.0.1", "stale", now):
                failures.failed("10.0.0.1", "stale", now)
            assert failures.refusal("10.0.0.1", "other", now) == ""


def test_nine_stale_users_take_nothing_from_the_others_for_an_hour() -> None:
    failures = Failures()
    stale = [f"stale {number}" for number in range(9)]
    for second in range(3600):
        for user in stale:
            for _ in range(10):
                if not failures.refusal("10.0.0.1", user, float(second)):
                    failures.failed("10.0.0.1", user, float(second))
        assert failures.refusal("10.0.0.1", "other", float(second)) == ""


def test_guesses_under_way_count_as_if_they_were_wrong() -> None:
    failures = Failures()
    assert failures.refusal("a", "u", 0.0, USER_FAILURES_MAX - 1) == ""
    assert failures.refusal("a", "u", 0.0, USER_FAILURES_MAX) == TOO_MANY_OF_USER


def test_what_is_remembered_is_bounded() -> None:
    failures, unseen = Failures(), Unseen()
    for number in range(USERS_MAX + 10):
        failures.failed(str(number % (ADDRESSES_MAX + 10)), str(number), 0.0)
        unseen.refused("a", str(number), TOO_MANY_OF_USER, 0.0)
    assert len(failures._users) == USERS_MAX and len(failures._addresses) == ADDRESSES_MAX
    assert len(unseen._said) == SAID_MAX


def test_a_budget_forgets_whom_it_did_not_hear_of_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "USERS_MAX", 2)
    failures = Failures()
    for _ in range(USER_FAILURES_MAX):
        for user in ("a", "b"):
            failures.failed("x", user, 0.0)
    failures.failed("x", "c", 0.0)
    assert [failures.refusal("x", user, 0.0) for user in ("a", "b")] == ["", TOO_MANY_OF_USER]


@given(
    st.lists(
        st.tuples(st.integers(0, 800), st.sampled_from(ADDRESSES), st.sampled_from(USERS)),
        max_size=200,
    )
)
def test_what_is_refused_is_counted_and_said_at_most_once_in_a_while(
    history: list[tuple[int, str, str]],
) -> None:
    unseen, now, said = Unseen(), 0.0, defaultdict[tuple[str, str], list[float]](list)
    for pause, address, user in history:
        now += pause / 8
        if unseen.refused(address, user, TOO_MANY_OF_USER, now):
            said[address, user].append(now)
    assert unseen.count == len(history)
    assert said.keys() == {(address, user) for _, address, user in history}, "each is said at once"
    for times in said.values():
        assert all(later - earlier >= SAY_EACH_S for earlier, later in pairwise(times))
