"""Threads wait for confirms, hear what brings them, and ring for the others that wait."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shardmq.cluster import replicated_files
from shardmq.cluster.replicated_files import Confirmations, Deposed

PATIENCE_S = 20.0


class Follower:
    """A follower whose answer is one byte: up to which number it has all."""

    def __init__(self, confirmations: Confirmations) -> None:
        self._confirmations = confirmations
        self.far, self._near = socket.socketpair()
        self._near.setblocking(False)
        self.heard_by: list[int] = []

    def fileno(self) -> int:
        return self._near.fileno()

    def hear(self) -> None:
        try:
            answer = self._near.recv(1)
        except BlockingIOError:
            return
        if answer:
            self.heard_by.append(threading.get_ident())
            self._confirmations.confirm(answer[0])

    def answer(self, number: int) -> None:
        self.far.send(bytes([number]))

    def close(self) -> None:
        self.far.close()
        self._near.close()


@pytest.fixture
def confirmations() -> Iterator[Confirmations]:
    made = Confirmations()
    yield made
    made.depose("the test is over")


@pytest.fixture
def follower(confirmations: Confirmations) -> Iterator[Follower]:
    made = Follower(confirmations)
    confirmations.heard = (made,)
    yield made
    made.close()


@contextmanager
def waiting(confirmations: Confirmations, *numbers: int) -> Iterator[list[Any]]:
    """Wait for these numbers in a thread each; the list has what came of it at the end."""
    outcomes: list[Any] = [None] * len(numbers)

    def wait(index: int, number: int) -> None:
        try:
            outcomes[index] = confirmations.wait(number)
        except Deposed as error:
            outcomes[index] = str(error)

    threads = [
        threading.Thread(target=wait, args=(index, number), daemon=True)
        for index, number in enumerate(numbers)
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(confirmations._waiting) == len(numbers))
    yield outcomes
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends
        os.sched_yield()


def test_a_thread_hears_the_answer_that_it_waits_for(
    confirmations: Confirmations, follower: Follower
) -> None:
    follower.answer(1)
    follower.answer(2)
    assert confirmations.wait(2)
    assert set(follower.heard_by) == {threading.get_ident()}
    assert confirmations.wait(1)


def test_who_hears_an_answer_rings_for_those_who_wait_for_less(
    confirmations: Confirmations, follower: Follower
) -> None:
    with waiting(confirmations, 1, 2, 3) as outcomes:
        follower.answer(3)
    assert outcomes == [True] * 3
    assert len(follower.heard_by) == 1


def test_a_confirm_that_comes_without_an_answer_is_heard(confirmations: Confirmations) -> None:
    for number in range(1, 50):  # bells are used again, and a ring may come late
        with waiting(confirmations, number, number) as outcomes:
            confirmations.confirm(number)
        assert outcomes == [True, True]


def test_an_older_confirm_takes_nothing_back(confirmations: Confirmations) -> None:
    confirmations.confirm(7)
    confirmations.confirm(3)
    assert confirmations.wait(7)


def test_a_wait_ends_when_its_time_is_up_and_may_be_begun_again(
    confirmations: Confirmations, follower: Follower
) -> None:
    assert not confirmations.wait(1, 0.01)
    follower.answer(1)
    assert confirmations.wait(1, PATIENCE_S)


def test_a_deposed_leader_confirms_to_nobody_who_waits(
    confirmations: Confirmations, follower: Follower
) -> None:
    confirmations.confirm(1)
    with waiting(confirmations, 2, 3) as outcomes:
        confirmations.depose("another node leads")
    assert outcomes == ["another node leads"] * 2
    assert confirmations.wait(1)
    with pytest.raises(Deposed):
        confirmations.wait(2)


def test_who_waits_for_long_tells_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated_files, "WAITS_EACH_S", 0.01)
    told: list[int] = []
    confirmations = Confirmations(lambda: told.append(1))
    with waiting(confirmations, 1):
        until(lambda: len(told) >= 3)
        confirmations.confirm(1)
    confirmations.depose("the test is over")


def test_an_end_that_is_closed_meanwhile_does_not_hold_a_wait_up(
    confirmations: Confirmations, follower: Follower
) -> None:
    with waiting(confirmations, 1) as outcomes:
        confirmations.heard = ()
        follower.far.close()
        confirmations.confirm(1)
    assert outcomes == [True]
