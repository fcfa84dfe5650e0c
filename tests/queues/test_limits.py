"""What a queue's arguments mean, and when a message's time has come."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from shardmq.shardd.queues import limits_of
from shardmq.shardd.queues.entry import EXPIRY, Facts
from shardmq.shardd.queues.limits import Limits
from shardmq.shardd.queues.state import judge

LATER = 1 << 45


def expiry(limits: Limits, expires_at: int, published: int, now: int) -> int:
    """Return when a queue with these limits lets go of a message, 0 if never."""
    (fact,), _ = judge(
        array("Q", [16]),
        array("Q", [expires_at]),
        array("Q", [published]),
        now,
        limits.message_ttl,
        0,
    )
    return fact


def test_no_arguments_bound_nothing() -> None:
    limits = limits_of({})
    assert limits == Limits()
    assert not limits.bounded
    assert limits.excess(1 << 40) == 0
    assert not limits.too_big(1 << 50)
    assert expiry(limits, 0, 5, 9) == 0


def test_limits_are_read_from_the_arguments_of_their_names() -> None:
    arguments: dict[str, Any] = {
        "x-message-ttl": 1, "x-expires": 2, "x-max-length": 3, "x-max-length-bytes": 4,
        "x-overflow": "reject-publish", "x-max-priority": 5, "x-delivery-limit": 6,
        "x-single-active-consumer": True,
    }  # fmt: skip
    assert limits_of(arguments) == Limits(
        message_ttl=1, expires=2, max_length=3, max_bytes=4, reject_publish=True,
        max_priority=5, delivery_limit=6, single_active=True,
    )  # fmt: skip


@pytest.mark.parametrize(("overflow", "refuses"), [
    ("drop-head", False), ("reject-publish", True), ("reject-publish-dlx", True), (None, False),
])  # fmt: skip
def test_overflow_says_who_goes(overflow: str | None, refuses: bool) -> None:
    assert limits_of({"x-overflow": overflow}).reject_publish is refuses


@pytest.mark.parametrize("value", ["10", -1, True, None, [10]])
def test_what_is_no_number_bounds_nothing(value: Any) -> None:
    assert (
        limits_of({"x-max-length": value, "x-message-ttl": value, "x-expires": value}) == Limits()
    )


def test_zero_is_a_limit() -> None:
    limits = limits_of({"x-max-length": 0, "x-max-length-bytes": 0, "x-message-ttl": 0})
    assert (limits.max_length, limits.max_bytes, limits.message_ttl) == (0, 0, 0)
    assert limits.excess(1) == 1
    assert limits.too_big(1)
    assert not limits.too_big(0)


def test_priorities_end_at_what_the_protocol_can_say() -> None:
    assert limits_of({"x-max-priority": 1000}).max_priority == 255


def test_the_sooner_of_two_expiries_counts() -> None:
    limits = limits_of({"x-message-ttl": 100})
    assert expiry(limits, 0, 1000, 1000) == 1100
    assert expiry(limits, 1050, 1000, 1000) == 1050
    assert expiry(limits, 1200, 1000, 1000) == 1100


def test_nothing_expires_before_it_was_offered() -> None:
    assert expiry(limits_of({"x-message-ttl": 0}), 0, 900, 1000) == 1000
    assert expiry(limits_of({}), 900, 900, 1000) == 1000


def test_an_expiry_beyond_all_time_is_kept_within_its_bits() -> None:
    assert expiry(limits_of({"x-message-ttl": 1 << 60}), 0, LATER, LATER) == EXPIRY


def test_facts_are_those_of_the_run_a_message_is_in() -> None:
    facts = Facts()
    facts.add_many(array("Q", [32, 48, 64]), array("Q", [7, 7, 0]))
    facts.add_many(array("Q", [96]), array("Q", [9]))
    assert [facts.of(entry) for entry in (16, 32, 49, 64, 80, 96, 112)] == [0, 7, 7, 0, 0, 9, 9]
    facts.trim(81)
    assert [facts.of(entry) for entry in (80, 97)] == [0, 9]


def test_an_empty_facts_that_was_added_to_leaves_all_others_empty() -> None:
    one, other = Facts(), Facts()
    one.add_many(array("Q", [16]), array("Q", [5]))
    assert (len(one), len(other)) == (1, 0)
    assert one.of(32) == 5 and other.of(32) == 0
