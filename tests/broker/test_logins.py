"""Guesses have a budget, the loop waits for no hash, and who was let in before is let in again at once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import logins as logins_module
from broker import passwords
from broker.changes import UserPut
from broker.controller.access import hash_password
from broker.logins import (
    ADDRESSES_MAX,
    BUSY,
    FAILURE_S,
    FAILURES_MAX,
    THREADS,
    TOO_MANY,
    WRONG,
    Failures,
    Logins,
    TakesLong,
    source_of,
)

SHA256 = "rabbit_password_hashing_sha256"
QUICK = UserPut("q", hash_password("right", algorithm=SHA256), SHA256)
SLOW = UserPut("s", hash_password("right"), passwords.SCRYPT)
HERE, THERE = "10.0.0.1", "10.0.0.2"


def ask(logins: Logins, user: UserPut, password: str, address: str = HERE, now: float = 0.0) -> str:
    return logins.at_once(user, user.name, password, address, now)


@pytest.mark.row("I2")
@pytest.mark.parametrize("algorithm", [pytest.param(name, id=f"I2 {name}") for name in passwords.HASHES])
def test_every_algorithm_takes_the_right_password_alone(algorithm: str) -> None:
    user = UserPut("u", hash_password("pässword", algorithm=algorithm), algorithm)
    assert passwords.matches(user, "pässword")
    assert not passwords.matches(user, "password")
    assert not passwords.matches(user, "")


@pytest.mark.row("I2", "I3")
@pytest.mark.parametrize("stored", ["", "not base64!", "AAAA", "////"])
@pytest.mark.parametrize("algorithm", [*passwords.HASHES, "unknown"])
def test_what_is_no_hash_takes_no_password(stored: str, algorithm: str) -> None:
    for given_password in ("", "x", "\udcff"):
        assert not passwords.matches(UserPut("u", stored, algorithm), given_password)


def test_a_new_user_is_hashed_slowly_with_a_salt_of_its_own() -> None:
    assert passwords.is_slow(SLOW) and passwords.is_slow(None) and not passwords.is_slow(QUICK)
    assert hash_password("p") != hash_password("p")


async def test_a_slow_hash_is_asked_for_elsewhere_and_remembered() -> None:
    logins = Logins()
    with pytest.raises(TakesLong):
        ask(logins, SLOW, "right")
    assert await logins.slowly(SLOW, "right", HERE, 0.0) == ""
    assert ask(logins, SLOW, "right") == ""
    with pytest.raises(TakesLong):
        ask(logins, SLOW, "wrong")
    assert await logins.slowly(SLOW, "wrong", HERE, 0.0) == WRONG
    assert await logins.slowly(None, "right", HERE, 0.0) == WRONG


@pytest.mark.row("I6")
async def test_a_changed_password_is_forgotten_at_once() -> None:
    logins = Logins()
    assert await logins.slowly(SLOW, "right", HERE, 0.0) == ""
    changed = UserPut("s", hash_password("other"), passwords.SCRYPT)
    with pytest.raises(TakesLong):
        ask(logins, changed, "right")
    assert await logins.slowly(changed, "right", HERE, 0.0) == WRONG


async def test_many_who_come_back_together_cost_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []

    def matches(user: Any, password: str) -> bool:
        hashed.append(password)
        return True

    monkeypatch.setattr(passwords, "matches", matches)
    logins = Logins()
    assert await asyncio.gather(*(logins.slowly(SLOW, "right", HERE, 0.0) for _ in range(100))) == [""] * 100
    assert hashed == ["right"]


async def test_many_users_of_one_address_come_back_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "matches", lambda user, password: True)
    logins = Logins()
    users = [UserPut(f"u{n}", "x", passwords.SCRYPT) for n in range(10 * FAILURES_MAX)]
    assert set(await asyncio.gather(*(logins.slowly(user, "p", HERE, 0.0) for user in users))) == {""}


async def test_guesses_side_by_side_are_paid_for_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "matches", lambda user, password: False)
    logins = Logins()
    count = 3 * FAILURES_MAX
    guesses = await asyncio.gather(*(logins.slowly(SLOW, f"guess {n}", HERE, 0.0) for n in range(count)))
    assert guesses == [WRONG] * count
    assert ask(logins, SLOW, "another", now=FAILURE_S * (count - FAILURES_MAX)) == TOO_MANY
    with pytest.raises(TakesLong):
        ask(logins, SLOW, "another", now=FAILURE_S * (count - FAILURES_MAX + 1))


async def test_an_answer_nobody_waits_for_any_more_is_not_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = [], threading.Event()

    def matches(user: Any, password: str) -> bool:
        begun.append(password)
        return go_on.wait(60)

    monkeypatch.setattr(passwords, "matches", matches)
    logins = Logins()
    asking = [asyncio.create_task(logins.slowly(SLOW, f"p{n}", HERE, 0.0)) for n in range(20)]
    while len(begun) < THREADS:
        await asyncio.sleep(0.001)
    for task in asking[THREADS:]:
        task.cancel()
    await asyncio.gather(*asking[THREADS:], return_exceptions=True)
    go_on.set()
    assert await asyncio.gather(*asking[:THREADS]) == [""] * THREADS
    assert len(begun) == THREADS


async def test_who_gave_up_finds_it_done_when_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def matches(user: Any, password: str) -> bool:
        begun.set()
        return go_on.wait(60)

    monkeypatch.setattr(passwords, "matches", matches)
    logins = Logins()
    first = asyncio.create_task(logins.slowly(SLOW, "p", HERE, 0.0))
    other = asyncio.create_task(logins.slowly(SLOW, "p", HERE, 0.0))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    first.cancel()
    go_on.set()
    assert await other == ""
    assert ask(logins, SLOW, "p") == ""


async def test_what_waits_for_a_thread_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins_module, "PENDING_MAX", 1)
    monkeypatch.setattr(passwords, "matches", lambda user, password: True)
    logins = Logins()
    assert await asyncio.gather(*(logins.slowly(SLOW, f"p{n}", HERE, 0.0) for n in range(2))) == ["", BUSY]


def test_an_address_that_guesses_is_refused_unseen_and_only_it() -> None:
    logins = Logins()
    for _ in range(FAILURES_MAX):
        assert ask(logins, QUICK, "wrong") == WRONG
    assert ask(logins, QUICK, "right") == TOO_MANY
    assert ask(logins, QUICK, "right", THERE) == ""
    assert ask(logins, QUICK, "right", now=FAILURE_S) == "", "the budget fills again"


async def test_who_was_let_in_before_is_let_in_although_a_neighbour_guesses() -> None:
    logins = Logins()
    await logins.slowly(SLOW, "right", HERE, 0.0)
    for _ in range(FAILURES_MAX):
        ask(logins, QUICK, "wrong")
    assert ask(logins, SLOW, "right") == ""
    assert ask(logins, SLOW, "wrong") == TOO_MANY


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(-1, 1)), max_size=200))
def test_no_more_guesses_than_the_budget_and_what_time_gave(steps: list[tuple[float, int]]) -> None:
    failures, now, taken = Failures(), 0.0, 0
    for pause, _ in steps:
        now += pause
        if failures.may_try(HERE, now):
            failures.failed(HERE, now)
            taken += 1
    assert taken <= FAILURES_MAX + now / FAILURE_S + 1e-6


def test_addresses_remembered_are_bounded() -> None:
    failures = Failures()
    for number in range(ADDRESSES_MAX + 10):
        failures.failed(str(number), 0.0)
    assert len(failures._used) == ADDRESSES_MAX


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"), ("fe80::1%eth0", "fe80::/64"), ("", ""), ("no address", "no address"),
    ],
)  # fmt: skip
def test_a_subscribers_addresses_share_one_budget(address: str, source: str) -> None:
    assert source_of(address) == source
