"""A pushed-down filter keeps every wanted row, and is exact if Spark does not filter again."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pyspark_shardmq.offsets import Position, ranges
from pyspark_shardmq.options import read_options
from pyspark_shardmq.pushdown import push

OPTIONS = read_options({"subscribe": "orders"})
HOLDS = {
    "EqualTo": lambda a, b: a == b,
    "GreaterThan": lambda a, b: a > b,
    "GreaterThanOrEqual": lambda a, b: a >= b,
    "LessThan": lambda a, b: a < b,
    "LessThanOrEqual": lambda a, b: a <= b,
    "In": lambda a, b: a in b,
}


def filter_(kind: str, column: str, value: Any = None) -> Any:
    """Make a filter with the class name and the fields of one of Spark's filter classes."""
    return type(kind, (SimpleNamespace,), {})(attribute=(column,), value=value)


COMPARED = st.sampled_from([kind for kind in HOLDS if kind != "In"])
ON_PLACES = st.one_of(
    st.builds(filter_, COMPARED, st.just("offset"), st.integers(-2, 25)),
    st.builds(filter_, st.just("EqualTo"), st.just("shard"), st.integers(0, 3)),
    st.builds(filter_, st.just("In"), st.just("shard"), st.lists(st.integers(0, 3)).map(tuple)),
    st.builds(filter_, st.just("EqualTo"), st.just("queue"), st.sampled_from(["orders", "logs"])),
)


@given(st.lists(ON_PLACES, max_size=5))
def test_filters_of_places_leave_exactly_the_rows_that_pass_them(filters: list[Any]) -> None:
    start = {(q, s): Position("id", 3 * s) for q in ("orders", "logs") for s in range(3)}
    end = {place: Position("id", 20) for place in start}
    pushed, rest = push(filters, OPTIONS)
    left = {
        (r.queue, r.shard, n)
        for r in ranges(*pushed.narrow(start, end))
        for n in range(r.start, r.end)
    }
    wanted = set()
    for (queue, shard), position in start.items():
        for offset in range(position.next, 20):
            row = {"queue": queue, "shard": shard, "offset": offset}
            if all(HOLDS[type(f).__name__](row[f.attribute[0]], f.value) for f in filters):
                wanted.add((queue, shard, offset))
    assert rest == [] and left == wanted


@given(COMPARED, st.integers(0, 10**6), st.integers(-3000, 3000))
def test_times_are_handed_on_no_narrower_than_asked_and_looked_at_again(
    kind: str, base_us: int, delta_us: int
) -> None:
    asked_us, row_us = 1_700_000_000_000_000 + base_us, 1_700_000_000_000_000 + base_us + delta_us
    asked = datetime.fromtimestamp(asked_us // 1_000_000, UTC).replace(
        microsecond=asked_us % 1_000_000
    )
    one = filter_(kind, "timestamp", asked)
    pushed, rest = push([one], OPTIONS)
    assert rest == [one]
    row_ms = row_us // 1000  # the broker's times are whole milliseconds
    if HOLDS[kind](row_ms * 1000, asked_us):
        for text in pushed.filters:
            word, _, ms = text.partition(":")
            assert row_ms >= int(ms) if word == "since" else row_ms < int(ms)


def test_what_the_broker_cannot_answer_stays_with_spark() -> None:
    for one in [
        filter_("EqualTo", "value", b"x"),
        filter_("EqualTo", "routing_key", "broken \ufffd"),
        filter_("StringStartsWith", "routing_key", "a"),
        filter_("IsNotNull", "headers"),
    ]:
        pushed, rest = push([one], OPTIONS)
        assert rest == [one] and pushed.filters == ()
    assert push([filter_("IsNotNull", "value")], OPTIONS)[1] == []


def test_kafkas_names_are_known_where_they_are_used() -> None:
    kafka = read_options({"subscribe": "orders", "rowFormat": "kafka"})
    pushed, rest = push(
        [filter_("EqualTo", "partition", 2), filter_("EqualTo", "topic", "orders")], kafka
    )
    assert (pushed.shards, pushed.queues, rest) == (frozenset({2}), frozenset({"orders"}), [])
