"""A process looks again before it sleeps where that may pay, for a bounded share of the time."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest

from shardmq.shardd.wire import spin
from shardmq.shardd.wire.shared_memory import look_again
from shardmq.shardd.wire.spin import FRUITLESS, KEPT_NS, SHARE, SKIPPED, Spin
from tests.wire.test_ring import Pair

US = 1000
S = 1_000_000_000


class Unbounded(Spin):
    """Looks as long as it likes."""

    def looked(self, took_ns: int, found: bool, behind: int = 0) -> None:
        super().looked(0, found, behind)


def share_of(kind: type[Spin], seed: int) -> float:
    """Return which share of the time a process looks to which something comes now and then."""
    numbers = random.Random(seed)
    looks = kind(numbers.choice([1, 20, 50, 1000]))
    now = began = numbers.randrange(100) * S
    looked = 0
    while now - began < S:
        most = looks.most_ns(now)
        took = numbers.randrange(most + 1) if numbers.random() < 0.8 else most
        looks.looked(took, took < most) if most else None
        looked += took
        now += took + numbers.choice([1, 10, 100, 1000]) * US
    return (looked - KEPT_NS) / (now - began)


def test_looks_take_a_bounded_share_of_the_time() -> None:
    shares = [share_of(Spin, seed) for seed in range(50)]
    assert max(shares) <= 1 / SHARE
    assert max(share_of(Unbounded, seed) for seed in range(50)) > 1 / SHARE


def test_looks_that_find_nothing_are_given_up_and_tried_again_seldom() -> None:
    looks, now, taken = Spin(10), 10 * S, []
    for _ in range(FRUITLESS + 3 * (SKIPPED + 1)):
        now += S
        taken.append(looks.most_ns(now) > 0)
        if taken[-1]:
            looks.looked(10 * US, found=False)
    assert taken == FRUITLESS * [True] + 3 * (SKIPPED * [False] + [True])
    assert not looks.most_ns(now + S)
    looks.looked(US, found=True)
    assert looks.most_ns(now + 2 * S) == 10 * US


def test_what_was_done_before_decides_whether_a_look_may_find_something() -> None:
    looks, now, taken = Spin(10), 10 * S, [0, 0]
    for number in range(2 * 320):
        now += S
        if looks.most_ns(now, number % 2):
            taken[number % 2] += 1
            looks.looked(US, number % 2 == 1, number % 2)
    assert taken[1] == 320
    assert taken[0] <= FRUITLESS + 320 // SKIPPED


def test_nobody_looks_without_an_idle_core_nor_without_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = len(os.sched_getaffinity(0))
    looks, off = Spin(10), Spin(0)
    for running, is_on in ((cores, False), (cores - 1, True), (cores + 5, False)):
        monkeypatch.setattr(spin, "_running", lambda running=running: running)
        looks.tick()
        off.tick()
        assert (looks.is_on, off.is_on) == (is_on, False)
    looks.change(0)
    assert not looks.is_on
    off.change(5)
    assert off.is_on and off.most_ns(S) == 5 * US


def test_the_threads_that_run_are_counted_and_without_proc_nobody_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 1 <= spin._running() < 1 << 20
    monkeypatch.setattr(spin, "_LOAD", spin.Path("/nowhere"))
    assert spin._running() > 1 << 20


def test_a_look_finds_what_a_ring_or_a_descriptor_has_and_ends_in_time() -> None:
    pair, other = Pair(1 << 10), Pair(1 << 10)
    readers = [pair.reader, other.reader]
    assert pair.reader.sleep()
    found, took = look_again(readers, pair.bell, 2_000_000)
    assert found == 0 and took >= 2_000_000
    assert other.writer.put(b"m")
    other.writer.ring()
    assert other.bells() == 0
    assert look_again(readers, pair.bell, 60 * S)[0] == 1
    assert other.reader.take(1)[0] == [b"m"]
    os.eventfd_write(pair.bell, 1)
    assert look_again(readers, pair.bell, 60 * S)[0] == 2
    assert look_again([], pair.bell, 60 * S)[0] == 2
    assert look_again([], -1, 1)[0] == 0
    pair.close()
    other.close()


def test_who_is_looking_is_not_rung_for_and_lets_other_threads_go_on() -> None:
    pair = Pair(1 << 10)
    assert pair.reader.sleep()

    def write() -> None:
        time.sleep(0.01)
        assert pair.writer.put(b"m")
        pair.writer.ring()

    thread = threading.Thread(target=write)
    thread.start()
    assert look_again([pair.reader], -1, 60 * S)[0] == 1
    thread.join()
    assert pair.bells() == 0
    assert not pair.reader.sleep(), "it may sleep although there is a message"
    pair.close()
