"""After the death of a shard, a consumer goes on at its first unsettled message."""

from __future__ import annotations

import datetime
import struct
from array import array
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardmq.broker.model.checks import Refusal
from shardmq.broker.shared.reading import LOOK_MIN, Reading, read_from
from shardmq.shardd.wire.messages import ReadFrom

MESSAGE = struct.pack("<II", 0, 2) + b"\0\0\0\0"
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("deliver"), st.lists(st.integers(1, 3), min_size=1, max_size=6)),
        st.tuples(st.just("ack"), st.integers(0, 5)),
        st.tuples(st.just("give back"), st.integers(0, 5)),
        st.tuples(st.just("again"), st.none()),
        st.tuples(st.just("shard dies"), st.none()),
    ),
    max_size=30,
)


class Life:
    """A shard's side, and what a client holds, in lists.

    Offsets between deliveries were passed over by a filter.

    Of what was settled behind the first delivery that is not, some may come again: only that one's
    number is told.
    """

    def __init__(self) -> None:
        self.reading = Reading(ReadFrom("first", 0, "name", ["f"], True))
        self.reading.begins(10)
        self.offset, self.high, self.number = 10, 0, 1
        self.held: dict[int, int] = {}  # number: offset
        self.given: dict[int, int] = {}  # in this life of the shard, settled or not
        self.again: list[int] = []

    def give(self, offsets: list[int]) -> None:
        blob = array("Q", offsets).tobytes() + MESSAGE * len(offsets)
        self.reading.take(self.number, len(offsets), memoryview(blob), epoch=5)
        given = dict(zip(range(self.number, self.number + len(offsets)), offsets, strict=True))
        self.held.update(given)
        self.given.update(given)
        self.number += len(offsets)
        self.high = max(self.high, offsets[-1] + 1)

    def deliver(self, steps: list[int]) -> None:
        offsets = []
        for step in steps:
            self.offset += step
            offsets.append(self.offset - 1)
        self.give(offsets)

    def settle(self, at: int, back: bool) -> None:
        numbers = sorted(self.held)
        if at < len(numbers):
            if back:
                self.reading.give_back(numbers[at], numbers[at])
                self.again.append(self.held[numbers[at]])
            del self.held[numbers[at]]

    def come_again(self) -> None:
        if self.again:
            self.give([self.again.pop(0)])

    def die(self) -> None:
        found = self.reading.resume(min(self.held, default=None))
        first = min(self.held, default=self.number)
        unsettled = [offset for number, offset in self.given.items() if number >= first]
        expected = min([*unsettled, *self.again, self.offset])
        assert expected <= min([*self.held.values(), self.offset])
        assert found == ReadFrom("at", expected, "name", ["f"], True, self.high)
        self.offset, self.number = expected, 1
        self.held.clear()
        self.given.clear()
        self.again.clear()

    def trim(self) -> None:
        self.reading.forget_before(min(self.held, default=self.number))


@given(STEPS, st.booleans())
@example(
    [("deliver", [1, 1]), ("give back", 0), ("again", None), ("ack", 1)],
    False,
)
def test_a_reader_goes_on_at_the_first_message_it_has_not_settled(
    steps: list[tuple[str, Any]], trims: bool
) -> None:
    life = Life()
    for step, what in [*steps, ("shard dies", None)]:
        if step == "deliver":
            life.deliver(what)
        elif step in ("ack", "give back"):
            life.settle(what, step == "give back")
        elif step == "again":
            life.come_again()
        else:
            life.die()
        if trims:
            life.trim()


def test_what_is_remembered_of_deliveries_is_bounded_by_what_is_held() -> None:
    life = Life()
    for _ in range(1000):
        life.deliver([2])
        life.settle(0, False)
        if life.reading.crowded:
            life.trim()
            assert not life.reading.crowded
    assert len(life.reading._runs) <= LOOK_MIN + 1


def test_who_was_told_no_beginning_asks_for_the_same_again() -> None:
    reading = Reading(ReadFrom("next", 0, "name"))
    assert reading.resume(None) == ReadFrom("next", 0, "name")


@pytest.mark.parametrize(
    ("said", "start", "value"),
    [
        (None, "next", 0), ("first", "first", 0), ("last", "last", 0), ("next", "next", 0),
        (7, "offset", 7),
        (0, "offset", 0),
        (-7, "back", 7), ("5m", "ago", 300_000), ("1h", "ago", 3_600_000), ("0s", "ago", 0),
        (datetime.datetime.fromtimestamp(12, datetime.UTC), "timestamp", 12_000),
        (datetime.datetime(1970, 1, 1, 0, 0, 12), "timestamp", 12_000),
    ],
)  # fmt: skip
def test_each_way_to_say_where_to_begin(said: Any, start: str, value: int) -> None:
    found = read_from({"x-stream-offset": said}, "amq.ctag-x")
    assert (found.start, found.value, found.name) == (start, value, "")


@pytest.mark.parametrize(
    "said", ["", "First", "5", "m5", "5 m", "-5m", True, 1.5, [], {}, b"first"]
)
def test_what_says_nothing_of_where_to_begin_is_refused(said: Any) -> None:
    with pytest.raises(Refusal):
        read_from({"x-stream-offset": said}, "tag")


@pytest.mark.parametrize(
    ("arguments", "tag", "name"),
    [
        ({}, "mine", "mine"), ({}, "amq.ctag-x", ""), ({"x-stream-offset": "first"}, "mine", ""),
        ({"x-stream-offset": "first", "x-stream-automatic-offset-tracking": True}, "mine", "mine"),
        ({"x-stream-automatic-offset-tracking": False}, "mine", ""),
        ({"x-stream-automatic-offset-tracking": True}, "amq.ctag-x", "amq.ctag-x"),
    ],
)  # fmt: skip
def test_whose_position_is_kept(arguments: dict[str, Any], tag: str, name: str) -> None:
    assert read_from(arguments, tag).name == name
