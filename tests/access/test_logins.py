"""Guesses have a budget, the loop waits for no hash, and known clients get in again at once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from shardmq.broker.controller.access import hash_password
from shardmq.broker.model import passwords
from shardmq.broker.model.changes import UserPut
from shardmq.broker.shared import logins as logins_module
from shardmq.broker.shared.failures import (
    ADDRESS_FAILURE_S,
    ADDRESS_FAILURES_MAX,
    ADDRESS_GUESSES_MAX,
    SAY_EACH_S,
    TOO_MANY,
    TOO_MANY_AT_ONCE,
    TOO_MANY_OF_USER,
    USER_FAILURE_S,
    USER_FAILURES_MAX,
)
from shardmq.broker.shared.logins import BUSY, THREADS, WRONG, Logins, TakesLong, source_of

SHA256 = "rabbit_password_hashing_sha256"
QUICK = UserPut("q", hash_password("right", algorithm=SHA256), SHA256)
OTHER = UserPut("other", QUICK.password_hash, SHA256)
SLOW = UserPut("s", hash_password("right"), passwords.SCRYPT)
HERE, THERE = "10.0.0.1", "10.0.0.2"


def ask(logins: Logins, user: UserPut, password: str, address: str = HERE, now: float = 0.0) -> str:
    return logins.at_once(user, user.name, password, address, now)


@pytest.mark.row("I2")
@pytest.mark.parametrize("algorithm", list(passwords.HASHES))
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
    assert await logins.slowly(SLOW, "s", "right", HERE, 0.0) == ""
    assert ask(logins, SLOW, "right") == ""
    with pytest.raises(TakesLong):
        ask(logins, SLOW, "wrong")
    assert await logins.slowly(SLOW, "s", "wrong", HERE, 0.0) == WRONG
    assert await logins.slowly(None, "x", "right", HERE, 0.0) == WRONG


@pytest.mark.row("I6")
async def test_a_changed_password_is_forgotten_at_once() -> None:
    logins = Logins()
    assert await logins.slowly(SLOW, "s", "right", HERE, 0.0) == ""
    changed = UserPut("s", hash_password("other"), passwords.SCRYPT)
    with pytest.raises(TakesLong):
        ask(logins, changed, "right")
    assert await logins.slowly(changed, "s", "right", HERE, 0.0) == WRONG


async def test_many_who_come_back_together_cost_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []

    def matches(user: Any, password: str) -> bool:
        hashed.append(password)
        return True

    monkeypatch.setattr(passwords, "matches", matches)
    logins = Logins()
    assert (
        await asyncio.gather(*(logins.slowly(SLOW, "s", "right", HERE, 0.0) for _ in range(100)))
        == [""] * 100
    )
    assert hashed == ["right"]


async def test_many_users_of_one_address_come_back_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passwords, "matches", lambda user, password: True)
    logins = Logins()
    asked = (
        logins.slowly(user, user.name, "p", HERE, 0.0) for user in users(10 * USER_FAILURES_MAX)
    )
    assert set(await asyncio.gather(*asked)) == {""}


async def test_guesses_side_by_side_are_no_more_than_those_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passwords, "matches", lambda user, password: False)
    logins = Logins()
    count = 3 * USER_FAILURES_MAX
    guesses = await asyncio.gather(
        *(logins.slowly(SLOW, "s", f"guess {n}", HERE, 0.0) for n in range(count))
    )
    assert guesses == [WRONG] * USER_FAILURES_MAX + [TOO_MANY_OF_USER] * (count - USER_FAILURES_MAX)
    assert ask(logins, SLOW, "another", now=USER_FAILURE_S - 0.01) == TOO_MANY_OF_USER
    with pytest.raises(TakesLong):
        ask(logins, SLOW, "another", now=USER_FAILURE_S)


def users(count: int, begun: str = "u") -> list[UserPut]:
    return [UserPut(f"{begun}{n}", "x", passwords.SCRYPT) for n in range(count)]


async def test_guesses_for_many_users_side_by_side_gain_nothing_in_the_long_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each 10 s 500 connections of one address try a password of another user each, all at once."""
    monkeypatch.setattr(passwords, "matches", lambda user, password: False)
    logins, tried, seconds, side_by_side = Logins(), 0, 300, 500
    for second in range(0, seconds + 1, 10):
        names = users(side_by_side, f"{second}-")
        asked = (logins.slowly(user, user.name, "guess", HERE, float(second)) for user in names)
        said = await asyncio.gather(*asked)
        assert set(said) <= {WRONG, TOO_MANY}
        tried += said.count(WRONG)
    earned = ADDRESS_FAILURES_MAX + seconds / ADDRESS_FAILURE_S
    assert earned - side_by_side <= tried <= earned + side_by_side


async def test_no_more_than_so_many_passwords_from_one_address_are_looked_at_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()

    def matches(user: Any, password: str) -> bool:
        may_end.wait(60)
        return password == "right"

    monkeypatch.setattr(passwords, "matches", matches)
    logins = Logins()
    guesses = [
        asyncio.ensure_future(logins.slowly(user, user.name, "wrong", HERE, 0.0))
        for user in users(ADDRESS_GUESSES_MAX + 500)
    ]
    right = asyncio.ensure_future(logins.slowly(SLOW, "s", "right", THERE, 0.0))
    await asyncio.sleep(0)
    assert sum(guess.done() for guess in guesses) == 500
    may_end.set()
    said = await asyncio.gather(*guesses)
    assert (said.count(WRONG), said.count(TOO_MANY_AT_ONCE)) == (ADDRESS_GUESSES_MAX, 500)
    assert logins.refused_unseen == 500
    assert await right == "", "another address"
    assert ask(logins, QUICK, "wrong") == TOO_MANY, "all of them are charged"
    made_up_for = (ADDRESS_GUESSES_MAX - ADDRESS_FAILURES_MAX + 1) * ADDRESS_FAILURE_S
    assert ask(logins, QUICK, "wrong", now=made_up_for - 0.01) == TOO_MANY
    assert ask(logins, QUICK, "wrong", now=made_up_for) == WRONG


async def test_a_thousand_clients_with_one_stale_password_made_one_guess(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passwords, "matches", lambda user, password: False)
    logins = Logins()
    stale = await asyncio.gather(
        *(logins.slowly(SLOW, "s", "stale", HERE, 0.0) for _ in range(1000))
    )
    assert stale == [WRONG] * 1000
    with pytest.raises(TakesLong):
        ask(logins, SLOW, "right")


async def test_an_answer_nobody_waits_for_any_more_is_not_worked_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = [], threading.Event()

    def matches(user: Any, password: str) -> bool:
        begun.append(password)
        return go_on.wait(60)

    monkeypatch.setattr(passwords, "matches", matches)
    logins = Logins()
    asking = [asyncio.create_task(logins.slowly(SLOW, "s", f"p{n}", HERE, 0.0)) for n in range(20)]
    while len(begun) < THREADS:
        await asyncio.sleep(0.001)
    for task in asking[THREADS:]:
        task.cancel()
    await asyncio.gather(*asking[THREADS:], return_exceptions=True)
    go_on.set()
    assert await asyncio.gather(*asking[:THREADS]) == [""] * THREADS
    assert len(begun) == THREADS


async def test_who_gave_up_finds_it_done_when_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def matches(user: Any, password: str) -> bool:
        begun.set()
        return go_on.wait(60)

    monkeypatch.setattr(passwords, "matches", matches)
    logins = Logins()
    first = asyncio.create_task(logins.slowly(SLOW, "s", "p", HERE, 0.0))
    other = asyncio.create_task(logins.slowly(SLOW, "s", "p", HERE, 0.0))
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
    assert await asyncio.gather(
        *(logins.slowly(SLOW, "s", f"p{n}", HERE, 0.0) for n in range(2))
    ) == ["", BUSY]


def test_a_user_whose_password_is_guessed_is_refused_unseen_and_nobody_else() -> None:
    logins = Logins()
    for _ in range(USER_FAILURES_MAX):
        assert ask(logins, QUICK, "wrong") == WRONG
    assert ask(logins, QUICK, "right") == TOO_MANY_OF_USER
    assert ask(logins, QUICK, "right", THERE) == ""
    assert ask(logins, OTHER, "right") == ""
    assert ask(logins, QUICK, "right", now=USER_FAILURE_S) == "", "the budget fills again"


def test_an_address_that_tries_many_users_is_refused_unseen_and_only_it() -> None:
    logins = Logins()
    for number in range(ADDRESS_FAILURES_MAX):
        assert logins.at_once(QUICK, f"user {number}", "wrong", HERE, 0.0) == WRONG
    assert ask(logins, OTHER, "right") == TOO_MANY
    assert ask(logins, OTHER, "right", THERE) == ""
    assert ask(logins, OTHER, "right", now=ADDRESS_FAILURE_S) == "", "the budget fills again"


def test_a_stale_password_that_comes_ten_times_a_second_locks_out_nobody_else() -> None:
    """The guesses go on for an hour.

    A client that comes for the first time from the same address gets in at any moment of it.
    """
    logins = Logins()
    for tenth in range(36_000):
        now = tenth / 10
        assert ask(logins, QUICK, "stale", now=now) in (WRONG, TOO_MANY_OF_USER)
        if tenth % 10 == 0:
            assert ask(logins, OTHER, "right", now=now) == ""
    assert logins.refused_unseen > 34_000


async def test_who_was_let_in_before_is_let_in_although_a_neighbour_guesses() -> None:
    logins = Logins()
    await logins.slowly(SLOW, "s", "right", HERE, 0.0)
    for number in range(ADDRESS_FAILURES_MAX):
        logins.at_once(QUICK, f"user {number}", "wrong", HERE, 0.0)
    assert ask(logins, SLOW, "right") == ""
    assert ask(logins, SLOW, "wrong") == TOO_MANY


def test_what_is_refused_unseen_is_counted_each_time_and_said_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logins = Logins()
    for tenth in range(int(10 * (SAY_EACH_S + 1)) + USER_FAILURES_MAX):
        ask(logins, QUICK, "stale", now=tenth / 10)
    said = [record.getMessage() for record in caplog.records]
    assert [
        line
        for line in said
        if not line.startswith("login of user 'q' from 10.0.0.1 refused unseen: ")
    ] == []
    assert len(said) == 2 and said[1].endswith(" more since this was last said)")
    assert logins.refused_unseen > 500


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"), ("fe80::1%eth0", "fe80::/64"), ("", ""),
        ("no address", "no address"),
    ],
)  # fmt: skip
def test_a_subscribers_addresses_share_one_budget(address: str, source: str) -> None:
    assert source_of(address) == source
