"""What a binding gets of what an exchange keeps is what lists say."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.routing import RoutingTable, goes_by_key, route, route_message, spread_of
from shardmq.broker.routing.hidden import NAME_BYTES_MAX
from shardmq.broker.routing.keeping import (
    Kept,
    binding_fault,
    chosen,
    exchange_fault,
    is_keeping_queue,
    named,
    queue_name,
)
from shardmq.broker.routing.matching import Message

NUMBERS = st.integers(-30, 30)


@given(
    first=st.integers(0, 20),
    many=st.integers(0, 20),
    young=st.integers(0, 25),
    most=st.none() | st.integers(1, 25),
    wish=st.sampled_from(["x-head", "x-tail", "x-from", "x-from-time", ""]),
    number=NUMBERS,
)
def test_a_wish_is_a_slice(
    first: int, many: int, young: int, most: int | None, wish: str, number: int
) -> None:
    there = list(range(first, first + many))
    end = first + many
    young = min(max(young, first), end)
    kept = [offset for offset in there if offset >= young]
    if most is not None:
        kept = kept[-most:]
    expected = kept
    match wish:
        case "x-head":
            expected = kept[:number]
        case "x-tail":
            expected = (
                kept[len(kept) - number :]
                if 0 <= number <= len(kept)
                else kept
                if number > 0
                else kept[-number:]
            )
        case "x-from":
            number = abs(number)
            expected = [offset for offset in kept if offset >= number] if number < end else kept
        case "x-from-time":
            number = min(max(number, first), end)
            expected = [offset for offset in kept if offset >= number]
    arguments = {wish: number} if wish else {}
    start, stop = chosen(
        arguments, most, Kept(first, young, end, number if wish == "x-from-time" else first)
    )
    assert list(range(start, stop)) == expected


@given(
    st.dictionaries(
        st.sampled_from(["x-head", "x-tail", "x-from", "x-from-time", "x"]),
        st.none() | NUMBERS | st.booleans(),
    )
)
def test_one_wish_at_a_time_and_only_numbers(arguments: dict[str, Any]) -> None:
    wishes = {name: value for name, value in arguments.items() if name != "x"}
    good = len(wishes) <= 1 and all(
        type(value) is int and (value >= 0 or name in ("x-head", "x-tail"))
        for name, value in wishes.items()
    )
    assert (binding_fault(arguments) == "") == good


@given(st.text(max_size=255).filter(lambda text: len(text.encode()) <= 255))
def test_each_exchange_has_a_name_for_its_stream(exchange: str) -> None:
    name = queue_name(exchange)
    assert is_keeping_queue(name)
    assert len(name.encode()) <= NAME_BYTES_MAX
    assert queue_name(exchange + "x") != name


def test_what_is_kept_is_said_beside_the_queues() -> None:
    table = RoutingTable.empty().with_queue("q")
    table = table.with_exchange("e", "topic", {"x-persist-messages": 5}).with_exchange(
        "f", "fanout", {"x-persist-ms": 5}
    )
    table = table.with_binding("e", "exchange", "f", "#").with_binding("f", "queue", "q", "")
    routed = route(table, "e", "k")
    assert (routed.queues, set(routed.kept)) == (("q",), {queue_name("e"), queue_name("f")})
    assert route(table, "", "q").kept == ()


def test_a_history_leaves_out_what_says_so() -> None:
    table = (
        RoutingTable.empty()
        .with_exchange("h", "x-recent-history")
        .with_queue("q")
        .with_binding("h", "queue", "q", "x")
    )
    for headers, kept in (
        ({}, True),
        ({"x-recent-history-no-store": True}, False),
        ({"x-recent-history-no-store": 1}, True),
    ):
        routed = route_message(table, "h", Message("k", headers))
        assert (routed.queues, bool(routed.kept)) == (("q",), kept)
    assert not goes_by_key(table, "h")


def test_a_spread_that_keeps_messages_is_no_short_cut() -> None:
    table = RoutingTable.empty().with_queue("q")
    for name, arguments in (("plain", {}), ("keeping", {"x-persist-messages": 5})):
        table = table.with_exchange(name, "x-consistent-hash", arguments).with_binding(
            name, "queue", "q", "1"
        )
    assert spread_of(table, "plain") is not None
    assert spread_of(table, "keeping") is None


def test_bounds_are_positive_numbers() -> None:
    for bad in (0, -1, True, "5", 1.5, None, 1 << 63):
        assert exchange_fault("topic", {"x-persist-messages": bad})
        assert exchange_fault("topic", {"x-persist-ms": bad})
        assert exchange_fault("x-recent-history", {"x-recent-history-length": bad})
    assert (
        exchange_fault("topic", {"x-persist-messages": 5, "x-recent-history-length": "not its own"})
        == ""
    )


def test_what_waits_at_an_exchange_that_delays_is_kept_when_it_is_due() -> None:
    for kind, arguments in (
        ("x-delayed-message", {"x-delayed-type": "fanout", "x-persist-messages": 5}),
        ("x-delayed-message", {"x-delayed-type": "x-recent-history"}),
        ("fanout", {"x-delayed-exchange": True, "x-persist-ms": 5}),
    ):
        table = (
            RoutingTable.empty()
            .with_queue("q")
            .with_exchange("x", kind, arguments, delays="amq.delayed.x")
        )
        table = table.with_binding("x", "queue", "q", "")
        waiting = route_message(table, "x", Message("k", {"x-delay": 1}, delay_ms=1))
        due = route_message(table, "x", Message("k", {"x-delay": -1}))
        assert (waiting.queues, waiting.kept) == (("amq.delayed.x",), ())
        assert (due.queues, due.kept) == (("q",), ("amq.persistent.x",))


class Placed(NamedTuple):
    name: str
    shard: int


def test_the_record_at_the_shard_of_a_stream_names_all_queues() -> None:
    a, b, kept = Placed("a", 0), Placed("b", 1), Placed("amq.persistent.x", 1)
    assert named([a, b]) == [(0, a), (1, b)]
    assert named([a, b, kept]) == [(0, a), (1, b), (1, kept), (1, a)]
    other = Placed("amq.persistent.y", 2)
    for shard in (1, 2):
        assert {queue for at, queue in named([a, b, kept, other]) if at == shard} == {
            a,
            b,
            kept,
            other,
        }
    assert [queue for at, queue in named([a, b, kept, other]) if at == 0] == [a]
    assert named([]) == []
