"""The times of messages are right to a second, and of old ones to 5 %, in little memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.store.segments.ages import NOTES_MAX, Ages


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3000)), max_size=300))
def test_a_message_came_at_the_first_note_behind_it(steps: list[tuple[int, int]]) -> None:
    ages, notes, end, now = Ages(), [], 0, 1000
    for messages, passed in steps:
        end, now = end + 16 * messages, now + passed
        ages.note(end, now)
        if messages:
            notes.append((end, now))
    for entry in range(0, end + 32, 16):
        wanted = next((at for behind, at in notes if entry < behind), None)
        assert ages.came_at(entry) == ages.came_at(entry | 1) == wanted


def test_old_times_are_less_exact_and_never_far_off() -> None:
    ages, each_ms, last = Ages(), 1000, 100_000
    for number in range(last):
        ages.note(16 * (number + 1), number * each_ms)
    assert len(ages._places) <= NOTES_MAX
    for number in range(0, last, 97):
        came, age = ages.came_at(16 * number), (last - number) * each_ms
        assert came is not None
        assert 0 <= came - number * each_ms <= max(2 * each_ms, 0.05 * age), number


def test_a_clock_that_is_set_back_makes_no_message_older_than_those_before_it() -> None:
    ages = Ages()
    ages.note(16, 5000)
    ages.note(32, 4000)
    assert [ages.came_at(entry) for entry in (0, 16)] == [5000, 5000]
