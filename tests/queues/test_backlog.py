"""A backlog alone: order, expiry and limits, with nobody who consumes."""

from __future__ import annotations

import ast
import random
from array import array
from pathlib import Path
from typing import Any

from shardmq.shardd.queues import backlog as module
from shardmq.shardd.queues import limits_of
from shardmq.shardd.queues.backlog import Backlog
from shardmq.shardd.queues.entry import HAS_BCC
from tests.support.dict_store import DictArrival, DictStore

SIZE = 4


class Bench:
    def __init__(self, **arguments: Any) -> None:
        self.store = DictStore()
        limits = limits_of(
            {"x-" + name.replace("_", "-"): value for name, value in arguments.items()}
        )
        self.backlog = Backlog(1, self.store, limits, True)

    def take_in(self, *facts: int, now: int = 0, marks: int = 0) -> list[int]:
        entries = array(
            "Q", [self.store.put([1], SIZE.to_bytes(4, "little") + bytes(SIZE)) for _ in facts]
        )
        arrival = DictArrival(
            1, entries, SIZE * len(facts), array("Q", facts) if any(facts) else None, marks=marks
        )
        self.backlog.take_in(arrival, now)
        return list(entries)

    def take(self) -> int:
        entries, _, size = self.backlog.take_first()
        assert size == SIZE
        return entries[0]

    def take_all(self) -> list[int]:
        return [self.take() for _ in range(self.backlog.ready_count)]


def test_a_backlog_knows_no_consumer() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert (
        not {
            f"shardmq.shardd.queues.{name}"
            for name in ("consumers", "dispatch", "queue", "unacked")
        }
        & imported
    )


def test_messages_leave_in_the_order_in_which_they_came() -> None:
    bench = Bench()
    entries = bench.take_in(0, 0) + bench.take_in(0)
    assert bench.take_all() == entries
    assert (bench.backlog.ready_count, bench.backlog.unacked_count) == (0, 3)


def test_the_highest_priority_leaves_first() -> None:
    bench = Bench(max_priority=3)
    low, high, middle = bench.take_in(0, 3 << 56, 1 << 56)
    assert bench.take_all() == [high, middle, low]


def test_what_is_put_back_has_its_old_place() -> None:
    bench = Bench(max_priority=2)
    entries = bench.take_in(0, 0, 1 << 56, 1 << 56)
    taken = array("Q", sorted(bench.take_all()[1:3]))
    bench.backlog.taken_back(len(taken), 2 * SIZE)
    bench.backlog.put_back(taken, 2 * SIZE)
    assert bench.take_all() == [entries[3], entries[0]]


def test_what_is_too_old_goes_at_the_head_only() -> None:
    bench = Bench()
    bench.take_in(10, 30, 20)
    assert bench.backlog.next_due() == [10]
    assert bench.backlog.expire(25)
    assert (bench.backlog.ready_count, bench.backlog.next_due()) == (2, [30])
    assert bench.backlog.expire(30)
    assert (bench.backlog.ready_count, bench.backlog.counters.let_go) == (0, 3)
    assert bench.backlog.facts is None, "nothing is remembered of messages that are gone"


def test_what_is_above_the_limits_goes_from_the_head() -> None:
    bench = Bench(max_length=3, max_length_bytes=2 * SIZE + 1)
    entries = bench.take_in(0, 0, 0, 0, 0)
    bench.backlog.enforce()
    assert bench.take_all() == entries[3:]


def test_what_comes_back_too_often_is_dead_lettered() -> None:
    bench = Bench(delivery_limit=1, dead_letter_exchange="dlx")
    bench.take_in(0)
    for _ in range(2):
        entry = bench.take()
        bench.backlog.taken_back(1, SIZE)
        bench.backlog.send_back(array("Q", [entry]), SIZE)
    departures = bench.backlog.departures
    assert departures is not None
    assert departures.first(9).reason == "delivery_limit"
    assert (bench.backlog.ready_count, bench.backlog.unacked_count, departures.count) == (0, 0, 1)


def test_what_comes_back_rests_and_counts_as_taken_out() -> None:
    bench = Bench(delayed_retry_min=16)
    bench.take_in(0)
    entry = bench.take()
    bench.backlog.taken_back(1, SIZE)
    bench.backlog.send_back(array("Q", [entry]), SIZE)
    bench.backlog.wake(100)
    assert (bench.backlog.ready_count, bench.backlog.unacked_count) == (0, 1)
    (due,) = bench.backlog.next_due()
    bench.backlog.wake(due)
    assert (bench.backlog.ready_count, bench.backlog.unacked_count) == (1, 0)
    assert bench.backlog.resting is None


def test_what_leaves_on_its_return_costs_the_others_nothing_of_what_is_remembered() -> None:
    bench = Bench(delivery_limit=1, max_priority=3)
    first = bench.take_in(0)[0]
    bench.backlog.send_back(array("Q", [bench.take()]), SIZE)
    bench.backlog.taken_back(1, SIZE)
    second = bench.take_in(2 << 56 | 500)[0]
    taken = array("Q", sorted(bench.take_all()))
    assert [entry & ~15 for entry in taken] == [first, second]
    bench.backlog.taken_back(len(taken), 2 * SIZE)
    bench.backlog.send_back(taken, 2 * SIZE)
    assert bench.backlog.counters.let_go == 1, "the first came back twice"
    assert bench.backlog.next_due() == [500]
    third = bench.take_in(1 << 56)[0]
    assert [entry & ~15 for entry in bench.take_all()] == [second, third]


def test_what_is_kept_back_may_still_have_a_header_that_no_consumer_is_to_see() -> None:
    bench = Bench()
    bench.backlog.change(limits_of({})._replace(held=True))
    bench.take_in(0, marks=HAS_BCC)
    bench.take_in(0)
    bench.backlog.change(limits_of({}))
    assert bench.backlog.hides


def test_what_is_kept_back_is_ready_when_it_is_told_so() -> None:
    bench = Bench()
    bench.backlog.change(limits_of({})._replace(held=True))
    entries = bench.take_in(0, 0)
    assert (bench.backlog.ready_count, bench.backlog.kept_back) == (0, 2)
    bench.backlog.change(limits_of({}))
    assert (bench.backlog.kept_back, bench.take_all()) == (0, entries)


def test_random_acts_lose_no_message_and_keep_the_order() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        bench, out, ready = Bench(), list[int](), list[int]()
        for _ in range(60):
            act = rng.randrange(4)
            if act == 0:
                ready += bench.take_in(*[0] * rng.randint(1, 5))
            elif act == 1 and ready:
                entry = bench.take()
                assert entry & ~15 == ready.pop(0), f"seed {seed}"
                out.append(entry)
            elif act == 2 and out:
                some = [out.pop(rng.randrange(len(out))) for _ in range(rng.randint(1, len(out)))]
                bench.backlog.taken_back(len(some), SIZE * len(some))
                bench.backlog.send_back(array("Q", some), SIZE * len(some))
                ready = sorted(ready + [entry & ~15 for entry in some])
            elif act == 3 and out:
                entry = out.pop(rng.randrange(len(out)))
                bench.backlog.taken_back(1, SIZE)
                bench.backlog.forget(array("Q", [entry]))
            assert (bench.backlog.ready_count, bench.backlog.ready_bytes) == (
                len(ready),
                SIZE * len(ready),
            )
            assert (bench.backlog.unacked_count, bench.backlog.unacked_bytes) == (
                len(out),
                SIZE * len(out),
            )
            everything = sorted(ready + [entry & ~15 for entry in out])
            assert [entry & ~15 for entry in bench.backlog.entries(out)] == everything, (
                f"seed {seed}"
            )
        assert bench.store.live.get(1, set()) == {entry & ~15 for entry in ready + out}
