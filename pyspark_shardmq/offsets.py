"""Decide which rows to read next and how to divide them: pure functions over offsets.

A *place* is (queue, shard). A *position* is the id of the stream at a place and the offset of the
row to be read next. A stream that is deleted and declared anew gets another id. The offsets of a
query map places to positions. In Spark's checkpoint and in progress reports they are written as
`{"orders":{"0":{"id":"3f2a...","next":23}}}`. Nothing here uses Spark, the network or a clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from pyspark_shardmq.options import EARLIEST, LATEST, Offsets, OptionError

Place = tuple[str, int]


class Position(NamedTuple):
    """The stream's id and the offset of the row to be read next."""

    id: str
    next: int


Positions = dict[Place, Position]


class DataLoss(RuntimeError):
    """Rows that were to be read do not exist any more, or the stream was made anew."""


@dataclass(frozen=True)
class ShardState:
    """A shard of a queue or stream exchange: rows `first` to `next` - 1 are on stable storage.

    row_bytes: the average size of a row in bytes, 0 where it is not known.
    """

    queue: str
    shard: int
    id: str
    first: int
    next: int
    row_bytes: float = 0.0

    @property
    def place(self) -> Place:
        return self.queue, self.shard


@dataclass(frozen=True)
class Range:
    """Rows `start` to `end` - 1 of one shard."""

    queue: str
    shard: int
    id: str
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


# -- as text ---------------------------------------------------------------------------------------


def encode(positions: Mapping[Place, Position]) -> dict[str, Any]:
    """Return the positions as Spark's checkpoint holds them.

    The keys are sorted, because Spark compares offsets as text and would take another order for
    new rows.
    """
    found: dict[str, Any] = {}
    for (queue, shard), position in sorted(
        positions.items(), key=lambda item: (item[0][0], str(item[0][1]))
    ):
        found.setdefault(queue, {})[str(shard)] = {"id": position.id, "next": position.next}
    return found


def decode(found: Mapping[str, Any] | str) -> Positions:
    """Return the positions of what `encode` gave, or of its JSON."""
    parsed: Mapping[str, Any] = json.loads(found) if isinstance(found, str) else found
    return {
        (queue, int(shard)): Position(position["id"], position["next"])
        for queue, shards in parsed.items()
        for shard, position in shards.items()
    }


# -- which streams a pattern means -----------------------------------------------------------------


def matching(pattern: str, names: Mapping[str, str | None]) -> list[str]:
    """Return the names that the regular expression matches from end to end, sorted.

    A shard whose exchange matches too is left out, because the exchange has the shard's rows.

    names: the names of streams, each with the exchange that it is a shard of, or None.
    """
    matched = {name for name in names if re.fullmatch(pattern, name)}
    return sorted(name for name in matched if names[name] not in matched)


# -- the first and last positions of a query -------------------------------------------------------


def resolve(
    wanted: Offsets | None, default: int, states: Iterable[ShardState], option: str
) -> Positions:
    """Return the positions that an option asks for.

    Places that the option does not name get `default`. Raises OptionError where it names a place
    that does not exist.

    wanted: the option's value. default: an offset, EARLIEST or LATEST. option: the option's name.
    """
    by_place = {state.place: state for state in states}
    _refuse_unknown(wanted, by_place, option)
    return {
        place: Position(state.id, _offset(wanted, default, state))
        for place, state in by_place.items()
    }


def _refuse_unknown(wanted: Offsets | None, there: Container[Place], option: str) -> None:
    if isinstance(wanted, Mapping):
        missing = [
            f"{q}/{s}" for q, shards in wanted.items() for s in shards if (q, s) not in there
        ]
        if missing:
            raise OptionError(f"{option} names {', '.join(missing)}: no such queue or shard")


def _offset(wanted: Offsets | None, default: int, state: ShardState) -> int:
    if isinstance(wanted, Mapping):
        said = wanted.get(state.queue, {}).get(state.shard, default)
    else:
        said = default if wanted is None else wanted
    return {EARLIEST: state.first, LATEST: state.next}.get(said, said)


def at_times(
    times_ms: Offsets,
    default: int,
    states: Sequence[ShardState],
    found: Mapping[Place, int | None],
    strategy: str,
    option: str,
) -> Positions:
    """Return the positions that an option with times asks for, as `resolve` does for offsets.

    found: by place the first row at or after the time, None where all rows are older. strategy:
    `error` raises OptionError where all rows are older, `latest` starts at the end of the shard.
    """
    _refuse_unknown(times_ms, {state.place for state in states}, option)
    positions = {}
    for state in states:
        if isinstance(times_ms, Mapping) and state.shard not in times_ms.get(state.queue, {}):
            positions[state.place] = Position(state.id, _offset(None, default, state))
            continue
        offset = found[state.place]
        if offset is None and strategy == "error":
            raise OptionError(
                f"{state.queue}/{state.shard} has no row at or after the starting time "
                "(startingOffsetsByTimestampStrategy=latest starts at its end)"
            )
        positions[state.place] = Position(state.id, state.next if offset is None else offset)
    return positions


# -- losses ----------------------------------------------------------------------------------------


def checked(
    start: Mapping[Place, Position],
    states: Iterable[ShardState],
    fail_on_data_loss: bool,
    ended: Mapping[str, int] | None = None,
) -> tuple[Positions, list[str]]:
    """Return the positions to go on from, and a sentence for each loss.

    Raises DataLoss where rows are lost and `fail_on_data_loss` is set. Streams are compared by id
    first: a stream made anew has small offsets and would look like one without new rows. A place
    that `start` lacks was added since and is read from its beginning.

    ended: by stream id, where the streams ended that left a stream exchange when it got fewer
    shards. Nothing is lost of a stream that was read to its end.
    """
    ended = ended or {}
    positions: Positions = {}
    losses = []
    states = list(states)
    for state in states:
        begun = start.get(state.place)
        position, loss = (
            (Position(state.id, state.first), "") if begun is None else _go_on(begun, state, ended)
        )
        positions[state.place] = position
        losses += [loss] if loss else []
    for queue, shard in sorted(set(start) - {state.place for state in states}):
        losses += _unread(f"{queue}/{shard} does not exist any more", start[queue, shard], ended)
    if losses and fail_on_data_loss:
        raise DataLoss(
            "; ".join(losses) + ". With failOnDataLoss=false the query goes on with what is there; "
            "a new checkpoint begins anew"
        )
    return positions, losses


def _unread(what: str, begun: Position, ended: Mapping[str, int]) -> list[str]:
    """Return what a query has not read of a stream that does not exist any more, as sentences.

    Where the broker does not know the stream's end, the sentence says how far the query was.
    """
    end = ended.get(begun.id)
    if end is None:
        return [f"{what}; it was read up to offset {begun.next}"]
    return (
        [f"{what}; offsets {begun.next} to {end - 1} of it were not read"]
        if begun.next < end
        else []
    )


def _go_on(begun: Position, state: ShardState, ended: Mapping[str, int]) -> tuple[Position, str]:
    where = f"{state.queue}/{state.shard}"
    if begun.id != state.id:
        what = f"{where} was deleted and made anew (stream {begun.id} is now {state.id})"
        losses = _unread(what, begun, ended)
        loss = f"{losses[0]}, the new one has {state.first} to {state.next - 1}" if losses else ""
        return Position(state.id, state.first), loss
    if begun.next > state.next:
        return Position(state.id, state.next), (
            f"{where} ends at offset {state.next - 1}, which is before {begun.next} where reading "
            "was to go on"
        )
    if begun.next < state.first:
        return Position(state.id, state.first), (
            f"{where} has lost offsets {begun.next} to {state.first - 1} to retention; "
            f"it begins at {state.first}"
        )
    return begun, ""


def ordered(
    start: Mapping[Place, Position],
    end: Mapping[Place, Position],
    states: Iterable[ShardState],
    fail_on_data_loss: bool,
) -> Positions:
    """Return `end`, after a check that no place ends before it starts.

    Raises OptionError where the options asked for an end before the start. Where retention has
    removed all rows that were asked for, this raises DataLoss, or with fail_on_data_loss=False
    returns the start as the end.
    """
    found = dict(end)
    for state in states:
        begin, stop = start[state.place].next, end[state.place].next
        if stop >= begin:
            continue
        where = f"{state.queue}/{state.shard}"
        if begin > state.first:
            raise OptionError(
                f"{where} is to be read from offset {begin} to before {stop}: "
                "the end is before the start"
            )
        if fail_on_data_loss:
            raise DataLoss(
                f"{where} has lost the offsets before {stop} to retention; "
                f"it begins at {state.first}"
            )
        found[state.place] = start[state.place]
    return found


# -- how many rows in one trigger ------------------------------------------------------------------


def lag(start: Mapping[Place, Position], end: Mapping[Place, Position]) -> dict[Place, int]:
    """Return by place how many rows lie between the positions."""
    return {place: max(0, position.next - _begin(start, place)) for place, position in end.items()}


def _begin(start: Mapping[Place, Position], place: Place) -> int:
    return start[place].next if place in start else 0


def admit_rows(
    start: Mapping[Place, Position], end: Mapping[Place, Position], rows_max: int
) -> Positions:
    """Return an end that is about `rows_max` rows away from the start, or `end` if that is nearer.

    Each shard gets rows in proportion to its lag, and at least one row if there is one, so that a
    small shard beside a large one does not wait.
    """
    lags = lag(start, end)
    total = sum(lags.values())
    if total <= rows_max:
        return dict(end)
    shares = {place: max(1, rows * rows_max // total) for place, rows in lags.items() if rows}
    return {
        place: Position(position.id, _begin(start, place) + shares[place])
        if place in shares
        else position
        for place, position in end.items()
    }


def admit_bytes(
    start: Mapping[Place, Position],
    end: Mapping[Place, Position],
    bytes_max: int,
    states: Iterable[ShardState],
) -> Positions:
    """Return an end that is about `bytes_max` bytes away from the start.

    This is `admit_rows` by bytes: a row counts as its shard's average `row_bytes`, or as
    ROW_BYTES_UNKNOWN where that is not known.
    """
    lags = lag(start, end)
    row_bytes = {state.place: state.row_bytes or ROW_BYTES_UNKNOWN for state in states}
    total = sum(rows * row_bytes[place] for place, rows in lags.items())
    if total <= bytes_max:
        return dict(end)
    return {
        place: Position(
            position.id, _begin(start, place) + max(1, int(lags[place] * bytes_max / total))
        )
        if lags[place]
        else position
        for place, position in end.items()
    }


ROW_BYTES_UNKNOWN = 1024


def at_most(end: Mapping[Place, Position], target: Mapping[Place, Position]) -> Positions:
    """Return `end` without rows behind `target` and without places that `target` lacks.

    Trigger.AvailableNow ends where the streams ended when the query began, which is `target`.
    """
    return {
        place: Position(position.id, min(position.next, target[place].next))
        for place, position in end.items()
        if place in target
    }


# -- ranges for tasks ------------------------------------------------------------------------------


def ranges(
    start: Mapping[Place, Position],
    end: Mapping[Place, Position],
    partitions_min: int | None = None,
    rows_max: int | None = None,
) -> list[Range]:
    """Divide the rows from `start` to before `end` into ranges, sorted by place and offset.

    Each row is in exactly one range and each range is of one shard. A range has at most `rows_max`
    rows; there are about `partitions_min` ranges or more.
    """
    whole = [
        Range(place[0], place[1], position.id, _begin(start, place), position.next)
        for place, position in sorted(end.items())
        if position.next > _begin(start, place)
    ]
    total = sum(map(len, whole))
    limit = rows_max or max(total, 1)
    if partitions_min and total:
        limit = min(limit, max(1, -(-total // partitions_min)))
    return [piece for one in whole for piece in split(one, limit)]


def grouped(pieces: Iterable[Range], rows_max: int) -> list[list[Range]]:
    """Put neighbouring ranges together while they have at most `rows_max` rows, one group a task.

    A task costs as much as many rows. Each range is in exactly one group, and the order stays.
    """
    found: list[list[Range]] = []
    rows = 0
    for piece in pieces:
        if not found or rows + len(piece) > rows_max:
            found.append([])
            rows = 0
        found[-1].append(piece)
        rows += len(piece)
    return found


def split(one: Range, rows_max: int) -> list[Range]:
    """Divide a range into as few equal ranges as possible of at most `rows_max` rows each."""
    count = -(-len(one) // rows_max)
    edges = [one.start + len(one) * i // count for i in range(count + 1)]
    return [Range(one.queue, one.shard, one.id, low, high) for low, high in pairwise(edges)]
