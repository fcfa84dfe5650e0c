"""Each row is read once.

Between two triggers no row is skipped or repeated, and losses are reported.
"""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_shardmq.offsets import (
    DataLoss,
    Position,
    Positions,
    ShardState,
    admit_bytes,
    admit_rows,
    at_most,
    at_times,
    checked,
    decode,
    encode,
    grouped,
    lag,
    matching,
    ranges,
    resolve,
)
from pyspark_shardmq.options import EARLIEST, LATEST, OptionError

PLACES = st.tuples(st.sampled_from(["orders", "logs", 'a "b"/ü']), st.integers(0, 12))
OFFSETS = st.integers(0, 1_000_000)


def state(
    shard: int,
    first: int,
    next_: int,
    *,
    id_: str = "one",
    queue: str = "orders",
    row_bytes: float = 0,
) -> ShardState:
    return ShardState(queue, shard, id_, first, next_, row_bytes)


@st.composite
def spans(draw: st.DrawFn) -> tuple[Positions, Positions]:
    """Draw a start, and an end that is not before it and has some new places."""
    places = draw(st.lists(PLACES, unique=True, max_size=8))
    start, end = {}, {}
    for place in places:
        low, more = draw(OFFSETS), draw(st.integers(0, 5000))
        known = draw(st.booleans())
        if known:
            start[place] = Position("id", low)
        end[place] = Position("id", (low if known else 0) + more)
    return start, end


def rows(start: Positions, end: Positions) -> int:
    return sum(lag(start, end).values())


@given(st.dictionaries(PLACES, st.builds(Position, st.text(max_size=5), OFFSETS), max_size=8))
def test_offsets_come_back_from_their_text_and_equal_ones_have_equal_text(
    positions: Positions,
) -> None:
    text = json.dumps(encode(positions))
    assert decode(text) == positions
    assert json.dumps(encode(dict(reversed(positions.items())))) == text


@given(spans(), st.integers(1, 40), st.one_of(st.none(), st.integers(1, 3000)))
def test_ranges_hold_every_row_once_and_keep_to_their_bounds(
    span: tuple[Positions, Positions], partitions_min: int, rows_max: int | None
) -> None:
    start, end = span
    found = ranges(start, end, partitions_min, rows_max)
    for place, position in end.items():
        pieces = sorted((r.start, r.end) for r in found if (r.queue, r.shard) == place)
        covered = [offset for piece in pieces for offset in piece]
        begun = start[place].next if place in start else 0
        assert covered[:1] + covered[-1:] == (
            [begun, position.next] if position.next > begun else []
        )
        assert covered[1:-1:2] == covered[2:-1:2]
    assert all(len(r) > 0 for r in found)
    assert rows_max is None or all(len(r) <= rows_max for r in found)
    assert all(len(r) <= -(-rows(start, end) // partitions_min) for r in found)


@given(spans(), st.integers(1, 6000))
def test_tasks_take_each_range_once_and_together_only_few_rows(
    span: tuple[Positions, Positions], rows_max: int
) -> None:
    pieces = ranges(*span)
    tasks = grouped(pieces, rows_max)
    assert [piece for task in tasks for piece in task] == pieces
    assert all(len(task) == 1 or sum(map(len, task)) <= rows_max for task in tasks)
    pairs = itertools.pairwise(tasks)
    assert all(sum(map(len, first)) + len(second[0]) > rows_max for first, second in pairs), (
        "as few as can be"
    )


@given(spans(), st.integers(1, 10_000))
def test_a_trigger_takes_at_most_its_rows_and_one_more_of_each_shard(
    span: tuple[Positions, Positions], rows_max: int
) -> None:
    start, end = span
    admitted = admit_rows(start, end, rows_max)
    behind = {place for place, count in lag(start, end).items() if count}
    assert rows(start, admitted) <= rows_max + len(behind)
    assert {place for place, count in lag(start, admitted).items() if count} == behind
    assert all(admitted[place].next <= end[place].next for place in end)


@given(spans(), st.integers(1, 10_000_000), st.floats(0, 10**6))
def test_triggers_limited_by_bytes_go_on_and_never_past_the_end(
    span: tuple[Positions, Positions], bytes_max: int, row_bytes: float
) -> None:
    start, end = span
    states = [ShardState(q, s, "id", 0, p.next, row_bytes) for (q, s), p in end.items()]
    admitted = admit_bytes(start, end, bytes_max, states)
    assert all(admitted[place].next <= end[place].next for place in end)
    assert {p for p, count in lag(start, admitted).items() if count} == {
        p for p, c in lag(start, end).items() if c
    }


def test_bytes_are_counted_by_each_shards_own_average() -> None:
    states = [state(0, 0, 1000, row_bytes=100), state(1, 0, 1000, row_bytes=10)]
    end = {s.place: Position("one", 1000) for s in states}
    start = {s.place: Position("one", 0) for s in states}
    admitted = admit_bytes(start, end, 55_000, states)
    assert {place: position.next for place, position in admitted.items()} == {
        ("orders", 0): 500,
        ("orders", 1): 500,
    }


@given(spans(), st.integers(1, 500))
def test_trigger_by_trigger_everything_is_read(
    span: tuple[Positions, Positions], rows_max: int
) -> None:
    start, end = span
    total, seen = rows(start, end), 0
    at = start
    for _ in range(total + 1):
        admitted = admit_rows(at, end, rows_max)
        if rows(at, admitted) == 0:
            break
        seen, at = seen + rows(at, admitted), admitted
    assert seen == total


def test_a_query_that_is_to_end_reads_nothing_that_came_later() -> None:
    target = {("orders", 0): Position("one", 5)}
    now = {("orders", 0): Position("one", 9), ("orders", 1): Position("two", 3)}
    assert at_most(now, target) == target


# -- the first positions ---------------------------------------------------------------------------


def test_a_start_is_what_was_said_and_else_the_default() -> None:
    states = [state(0, 3, 10), state(1, 4, 20), state(2, 5, 30)]
    found = resolve({"orders": {0: 7, 1: LATEST}}, EARLIEST, states, "startingOffsets")
    assert [position.next for position in found.values()] == [7, 20, 5]
    assert [position.next for position in resolve(None, LATEST, states, "x").values()] == [
        10,
        20,
        30,
    ]
    with pytest.raises(OptionError, match="startingOffsets names orders/9, others/0"):
        resolve({"orders": {9: 1}, "others": {0: 1}}, EARLIEST, states, "startingOffsets")


def test_a_start_by_time_is_the_first_row_not_older() -> None:
    states = [state(0, 3, 10), state(1, 4, 20)]
    found = {("orders", 0): 6, ("orders", 1): None}
    with pytest.raises(OptionError, match="orders/1 has no row at or after"):
        at_times(1000, EARLIEST, states, found, "error", "x")
    latest = at_times(1000, EARLIEST, states, found, "latest", "x")
    assert [position.next for position in latest.values()] == [6, 20]
    some = at_times({"orders": {0: 1000}}, EARLIEST, states, found, "error", "x")
    assert [position.next for position in some.values()] == [6, 4]


# -- losses ----------------------------------------------------------------------------------------


def test_rows_that_retention_took_are_an_error_that_says_which() -> None:
    start = {("orders", 0): Position("one", 5)}
    with pytest.raises(
        DataLoss, match="orders/0 has lost offsets 5 to 7 to retention; it begins at 8"
    ):
        checked(start, [state(0, 8, 20)], True)
    positions, losses = checked(start, [state(0, 8, 20)], False)
    assert positions == {("orders", 0): Position("one", 8)} and len(losses) == 1


@given(OFFSETS, OFFSETS, OFFSETS)
def test_a_stream_made_anew_is_an_error_whatever_its_offsets(
    old: int, first: int, more: int
) -> None:
    start = {("orders", 0): Position("one", old)}
    with pytest.raises(
        DataLoss, match=r"orders/0 was deleted and made anew \(stream one is now two\)"
    ):
        checked(start, [state(0, first, first + more, id_="two")], True)
    positions, _ = checked(start, [state(0, first, first + more, id_="two")], False)
    assert positions == {("orders", 0): Position("two", first)}


def test_an_end_before_where_reading_stood_is_an_error() -> None:
    with pytest.raises(DataLoss, match="orders/0 ends at offset 3, which is before 9"):
        checked({("orders", 0): Position("one", 9)}, [state(0, 0, 4)], True)


def test_a_shard_that_went_away_is_an_error_and_one_that_came_is_read_from_its_beginning() -> None:
    start = {("orders", 0): Position("one", 9)}
    with pytest.raises(
        DataLoss, match="orders/0 does not exist any more; it was read up to offset 9"
    ):
        checked(start, [state(1, 2, 4)], True)
    positions, _ = checked(start, [state(0, 0, 20), state(1, 2, 4)], True)
    assert positions == {("orders", 0): Position("one", 9), ("orders", 1): Position("one", 2)}


@given(OFFSETS, OFFSETS, st.booleans())
def test_of_a_shard_that_went_only_what_was_not_read_is_lost(
    read: int, end: int, anew: bool
) -> None:
    """Check this whether another stream has the number of the removed shard or not."""
    start = {("orders", 1): Position("one", read)}
    states = [state(0, 0, 5, id_="zero"), *([state(1, 2, 9, id_="two")] if anew else [])]
    expected = {("orders", s.shard): Position(s.id, s.first) for s in states}
    if read >= end:
        assert checked(start, states, True, {"one": end}) == (expected, [])
        return
    with pytest.raises(
        DataLoss, match=f"orders/1 .*offsets {read} to {end - 1} of it were not read"
    ):
        checked(start, states, True, {"one": end})
    assert checked(start, states, False, {"one": end})[0] == expected


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.none() | st.sampled_from("abcdef"), max_size=6),
    st.sets(st.sampled_from("abcdef"), min_size=1),
)
def test_a_pattern_takes_each_name_it_matches_but_shards_of_an_exchange_it_takes(
    names: dict[str, str | None], letters: set[str]
) -> None:
    found = matching(f"[{''.join(letters)}]", names)
    assert found == sorted(set(found)) and set(found) <= letters & set(names)
    for name in letters & set(names):
        assert (name in found) == (names[name] not in letters & set(names))


@given(spans())
def test_nothing_lost_is_no_error_and_changes_nothing(span: tuple[Positions, Positions]) -> None:
    start, end = span
    states = [ShardState(q, s, "id", 0, p.next) for (q, s), p in end.items()]
    positions, losses = checked(start, states, True)
    assert losses == []
    assert positions == {place: start.get(place, Position("id", 0)) for place in end}
