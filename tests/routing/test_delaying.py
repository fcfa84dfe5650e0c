"""An exchange that delays is one place for all that waits, and its inner type for the rest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.routing import Message, RoutingTable, delaying, goes_by_key, route_message
from shardmq.broker.routing.types import TYPES

QUEUES = ("a", "b", "amq.delayed.x")


def table(type: str = "topic", delays: str = "amq.delayed.x") -> RoutingTable:
    made = RoutingTable.empty()
    for queue in ("a", "b"):
        made = made.with_queue(queue)
    made = made.with_exchange("x", "x-delayed-message", {"x-delayed-type": type}, delays=delays)
    made = made.with_exchange("before", "fanout", {}).with_binding(
        "before", "exchange", "x", "", {}
    )
    return made.with_binding("x", "queue", "a", "k.#", {}).with_binding("x", "queue", "b", "l", {})


@pytest.mark.parametrize("exchange", ["x", "before"])
def test_what_is_to_wait_goes_to_the_queue_where_it_waits_and_nowhere_else(exchange: str) -> None:
    for more in ((), ("l",)):
        waiting = Message("k.1", delay_ms=5, more_keys=more)
        assert route_message(table(), exchange, waiting).queues == ("amq.delayed.x",)


def test_what_does_not_wait_goes_as_the_inner_type_says_by_all_its_keys() -> None:
    assert route_message(table(), "x", Message("k.1")).queues == ("a",)
    assert route_message(table(), "x", Message("k.1", more_keys=("l",))).queues == ("a", "b")
    assert route_message(table("direct"), "x", Message("l")).queues == ("b",)


def test_a_route_may_be_kept_only_of_what_waits_nowhere() -> None:
    assert not goes_by_key(table(), "before")
    assert goes_by_key(table(), "before", is_due=True)
    assert not goes_by_key(table("headers"), "x", is_due=True)


def test_one_that_delays_no_more_is_its_inner_type() -> None:
    later = table().with_exchange("x", "x-delayed-message", {"x-delayed-type": "topic"}, delays="")
    assert route_message(later, "x", Message("k", delay_ms=5)).queues == ("a",)


@given(st.integers())
def test_a_number_is_a_delay_however_it_is_written(value: int) -> None:
    wanted = max(value, 0)
    assert delaying.delay_of({"x-delay": value}) == wanted
    if abs(value) < 10**20:
        assert delaying.delay_of({"x-delay": str(value)}) == wanted
    if abs(value) < 1 << 50:
        assert delaying.delay_of({"x-delay": float(value)}) == wanted


@pytest.mark.parametrize(
    "value", ["", "soon", "1e3", "-", "٣", True, None, [], {}, float("inf"), float("nan"), "9" * 21]
)
def test_what_is_no_number_is_no_delay(value: Any) -> None:
    assert delaying.delay_of({"x-delay": value}) == delaying.NO_DELAY_AT_ALL
    assert not delaying.is_possible(delaying.NO_DELAY_AT_ALL, 0)


def test_a_message_that_says_nothing_does_not_wait() -> None:
    assert delaying.delay_of({"other": 5}) == 0


def test_times_that_cannot_be_told_are_impossible() -> None:
    now = 1_800_000_000_000
    assert delaying.is_possible(delaying.DUE_MAX - now, now)
    assert not delaying.is_possible(delaying.DUE_MAX - now + 1, now)


@given(st.text(max_size=255))
def test_each_exchange_has_a_name_for_its_queue_that_fits(exchange: str) -> None:
    name = delaying.queue_name(exchange)
    assert len(name.encode()) <= 255
    assert delaying.is_delay_queue(name)


def test_long_names_stay_apart() -> None:
    assert delaying.queue_name(250 * "x" + "1") != delaying.queue_name(250 * "x" + "2")


@pytest.mark.parametrize(
    ("type", "arguments", "fault"),
    [
        ("x-delayed-message", {}, "Missing required argument 'x-delayed-type'"),
        ("x-delayed-message", {"x-delayed-type": "topic"}, None),
        ("x-delayed-message", {"x-delayed-type": "x-random"}, None),
        (
            "x-delayed-message",
            {"x-delayed-type": 1},
            "'x-delayed-type' must be an existing exchange type",
        ),
        (
            "x-delayed-message",
            {"x-delayed-type": "x-delayed-message"},
            "can't be used for 'x-delayed-type'",
        ),
        ("topic", {"x-delayed-exchange": True}, None),
        ("topic", {"x-delayed-exchange": "yes"}, "'x-delayed-exchange' must be a boolean"),
        ("topic", {"x-delayed-type": "nonsense"}, None),
    ],
)
def test_what_can_be_declared(type: str, arguments: dict[str, Any], fault: str | None) -> None:
    found = delaying.delayed_fault(type, arguments, TYPES)
    assert found is None if fault is None else fault in (found or "")
