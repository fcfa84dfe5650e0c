"""One end of a ring takes what the other puts: in order, whole and once.

The bell is rung for sleepers only.
"""

from __future__ import annotations

import mmap
import os
import random
import select
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.wire.shared_memory import CONTROL_BYTES, Reader, Writer

START = 4096
MANY = 1 << 20


def speaks(one: int, within_s: float) -> bool:
    poll = select.poll()  # knows descriptors of any number
    poll.register(one, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


class Pair:
    def __init__(self, size: int, *, views: bool = False) -> None:
        self.memory = mmap.mmap(-1, START + size)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.writer = Writer(self.memory, 0, START, size, self.bell)
        self.reader = Reader(self.memory, 0, START, size, views)

    def bells(self) -> int:
        return os.eventfd_read(self.bell) if speaks(self.bell, 0) else 0

    def close(self) -> None:
        os.close(self.bell)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 200)),
        st.tuples(st.just("take"), st.integers(1, 5)),
        st.tuples(st.just("switch"), st.just(0)),
        st.tuples(st.just("sleep"), st.just(0)),
    ),
    max_size=200,
)


@given(size=st.sampled_from([64, 128, 256, 1024]), steps=STEPS)
def test_a_ring_is_a_bounded_queue(size: int, steps: list[tuple[str, int]]) -> None:
    pair = Pair(size)
    model: deque[bytes | None] = deque()  # None: a switch
    switched = asleep = False
    made = 0
    try:
        for step, number in steps:
            if step == "put" and not switched:
                made += 1
                message = bytes([made % 256]) * number
                if pair.writer.put(message):
                    pair.writer.ring()
                    model.append(message)
                    assert pair.bells() == asleep
                    asleep = False
                # an empty ring has room for what fills less than half of it, wherever it goes on
                else:
                    assert model or number + 7 + 16 > size // 2
            elif step == "switch" and not switched:
                pair.writer.put_switch()
                pair.writer.ring()
                model.append(None)
                switched = True
                assert pair.bells() == asleep
                asleep = False
            elif step == "take":
                messages, stopped = pair.reader.take(number)
                asleep = False  # who takes is awake, whatever has woken it
                expected: list[bytes] = []
                while model and len(expected) < number and model[0] is not None:
                    expected.append(model.popleft())  # type: ignore[arg-type] # not None
                assert messages == expected
                if stopped:
                    assert model.popleft() is None
                elif len(expected) < number:
                    assert not model
                if not model:
                    assert pair.writer.empty()
                    switched = False
            elif step == "sleep":
                asleep = pair.reader.sleep()
                assert asleep == (not model)
    finally:
        pair.close()


def test_two_processes_at_full_speed_lose_nothing() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    pair = Pair(1 << 14)
    count = 100_000
    child = os.fork()
    if child == 0:
        try:
            _write_all(pair, seed, count)
        finally:
            os._exit(0)
    same = random.Random(seed)
    taken = 0
    while taken < count:
        messages, _ = pair.reader.take(64)
        for message in messages:
            assert message == _message(same, taken)
            taken += 1
        if not messages and pair.reader.sleep():
            assert speaks(pair.bell, 20), f"no bell behind message {taken}"
            os.eventfd_read(pair.bell)
    os.waitpid(child, 0)
    assert pair.reader.take(MANY) == ([], False)
    pair.close()


def _message(numbers: random.Random, at: int) -> bytes:
    return at.to_bytes(4, "little") * numbers.randrange(1, 300)


def _write_all(pair: Pair, seed: int, count: int) -> None:
    numbers = random.Random(seed)
    for at in range(count):
        message = _message(numbers, at)
        while not pair.writer.put(message):
            os.sched_yield()
        pair.writer.ring()


def test_what_is_no_entry_is_an_error_not_a_read_elsewhere() -> None:
    pair = Pair(256)
    assert pair.writer.put(b"x" * 40)
    pair.memory[START : START + 4] = (1 << 30).to_bytes(4, "little")
    with pytest.raises(ValueError, match="no entry of a ring"):
        pair.reader.take(MANY)
    pair.close()


@pytest.mark.parametrize(
    "place, start, size", [(0, START, 100), (8, START, 64), (START, START, 64), (0, START, 1 << 30)]
)
def test_a_ring_must_lie_in_its_memory(place: int, start: int, size: int) -> None:
    memory = mmap.mmap(-1, START + CONTROL_BYTES - 8)
    with pytest.raises(ValueError, match="does not lie in its memory"):
        Reader(memory, place, start, size)


def test_a_ring_that_is_kept_empty_uses_its_first_pages_only() -> None:
    pair = Pair(1 << 20)
    for number in range(10_000):
        assert pair.writer.put(b"m" * 200)
        assert pair.reader.take(MANY)[0] == [b"m" * 200], number
    assert not any(pair.memory[START + (72 << 10) :])
    pair.close()


@pytest.mark.parametrize("size", [100, 40 << 10, 64 << 10, 200 << 10, (500 << 10) - 17])
def test_a_small_message_that_leads_back_leaves_room_for_a_large_one(size: int) -> None:
    pair = Pair(1 << 20)
    for number in range(200):
        assert pair.writer.put(b"c" * 24)
        assert pair.writer.put(b"m" * size), number
        assert pair.reader.take(MANY)[0] == [b"c" * 24, b"m" * size]
    pair.close()


LARGE = 16 << 10


@given(
    views=st.booleans(),
    parts=st.lists(
        st.lists(
            st.sampled_from([b"", b"a", b"head" * 9, b"b" * LARGE, b"c" * (LARGE + 3)]), max_size=4
        )
    ),
)
def test_what_is_put_in_parts_comes_as_one_message(views: bool, parts: list[list[bytes]]) -> None:
    pair = Pair(4 * LARGE + 4096, views=views)
    try:
        for some in parts:
            fits = pair.writer.put_parts([memoryview(part) for part in some])
            assert fits or len(b"".join(some)) > 2 * LARGE
            messages, _ = pair.reader.take(MANY)
            assert messages == ([b"".join(some)] if fits else [])
            pair.reader.let_go()
    finally:
        pair.close()


def test_what_led_back_is_free_while_the_message_behind_it_is_looked_at() -> None:
    size = 1 << 20
    pair = Pair(size, views=True)
    message = b"m" * (100 << 10)
    for number in range(100):
        assert pair.writer.put(message), number
        messages, _ = pair.reader.take(MANY)
        assert [bytes(one) for one in messages] == [message]
        following = [bytes([i]) * (100 << 10) for i in range(6)]
        for one in following:
            assert pair.writer.put(one), number
        pair.reader.let_go()
        messages, _ = pair.reader.take(MANY)
        assert [bytes(one) for one in messages] == following
        pair.reader.let_go()
    pair.close()


def test_a_message_that_is_looked_at_keeps_its_place_until_it_is_let_go() -> None:
    pair = Pair(4 * LARGE, views=True)
    first, second = b"1" * LARGE, b"2" * LARGE
    assert pair.writer.put(first) and pair.writer.put(second)
    (looked_at, other), _ = pair.reader.take(2)
    assert isinstance(looked_at, memoryview) and looked_at.readonly
    while pair.writer.put(b"3" * LARGE):
        pass
    assert not pair.writer.empty()
    assert looked_at == first and other == second
    pair.reader.let_go()
    assert pair.writer.put(b"4" * LARGE)
    pair.close()


def test_a_part_of_larger_items_is_no_part() -> None:
    pair = Pair(1024)
    with pytest.raises(ValueError, match="larger than a byte"):
        pair.writer.put_parts([memoryview(b"12345678").cast("I")])
    assert pair.writer.put(b"behind it")
    assert pair.reader.take(MANY) == ([b"behind it"], False)
    pair.close()
