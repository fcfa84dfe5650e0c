"""The second of an id is answered as the first is; what was not stored may come again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.shared.deduplication import HEADER, SIZE_DEFAULT, Copy, Rule, Seen
from tests.support.answered import Answered


def first(seen: Seen, shards: int = 2, seq: int = 7) -> Copy:
    """Of id "a", published on channel 3 of connection 1, on its way to shards."""
    copy, again = seen.look({HEADER: "a"}, 0)
    assert copy is not None and not again
    copy.published(1, 3, seq)
    copy.shards += shards
    copy.confirmed()
    return copy


def again(seen: Seen) -> Answered:
    copy, known = seen.look({HEADER: "a"}, 0)
    assert copy is not None and known
    answered = Answered()
    copy.follow(answered)
    return answered


def seen() -> Seen:
    return Seen(Rule(HEADER, 10, None))


def test_the_second_waits_for_the_first() -> None:
    ids = seen()
    copy = first(ids)
    second = again(ids)
    copy.confirmed()
    assert second.said == []
    copy.confirmed()
    assert second.said == ["ack"]
    assert again(ids).said == ["ack"]
    assert ids.duplicates == 2


@pytest.mark.parametrize("how", ["lost", "refused", "refused unnumbered"])
def test_what_was_not_stored_is_forgotten_and_the_second_hears_so(how: str) -> None:
    ids = seen()
    copy = first(ids)
    second = again(ids)
    if how == "lost":
        copy.lost()
    else:
        copy.refuse(1, 3, *((7, 9) if how == "refused" else (0, 0)))
        copy.confirmed()
    copy.confirmed()
    assert second.said == ["nack"]
    assert len(ids) == 0
    first(ids)


@pytest.mark.parametrize("who", [(1, 3, 1, 6), (1, 3, 8, 9), (2, 3, 7, 7), (1, 4, 7, 7)])
def test_what_others_were_refused_is_not_its_affair(who: tuple[int, int, int, int]) -> None:
    ids = seen()
    copy = first(ids, shards=1)
    copy.refuse(*who)
    copy.confirmed()
    assert again(ids).said == ["ack"]


def test_a_late_failure_does_not_forget_a_newer_copy() -> None:
    ids = Seen(Rule(HEADER, 10, 100))
    old = first(ids, shards=1)
    newer, known = ids.look({HEADER: "a"}, 100)
    assert newer is not old and not known
    old.lost()
    assert ids.look({HEADER: "a"}, 150) == (newer, True)


@given(st.integers(1, 5), st.lists(st.integers(0, 8), max_size=40))
def test_it_remembers_the_last_ids_first_in_first_out(size: int, ids: list[int]) -> None:
    remembered: list[int] = []
    found = Seen(Rule(HEADER, size, None))
    for id in ids:
        assert found.look({HEADER: id}, 0)[1] == (id in remembered)
        if id not in remembered:
            remembered = [*remembered, id][-size:]
        assert len(found) == len(remembered)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({}, None),
        ({"x-message-deduplication": False}, None),
        ({"x-message-deduplication": 1}, None),
        ({"x-message-deduplication": True}, Rule(HEADER, SIZE_DEFAULT, None)),
        (
            {"x-message-deduplication": True, "x-cache-size": 5, "x-cache-ttl": 6, "x-deduplication-header": "id"},
            Rule("id", 5, 6),
        ),
    ],
)
def test_arguments_make_the_rule(arguments: dict[str, Any], rule: Rule | None) -> None:
    assert Rule.of(arguments) == rule
