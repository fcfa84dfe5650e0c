"""What to read next, and how it is divided: pure functions over offsets. No Spark, no network, no clock.

A *place* is (queue, shard). A *position* in it is the id of the stream there, which another one of the same name does
not share, and the offset of the row to be read next. Offsets of a whole query map places to positions. Written down,
in Spark's checkpoint and in progress reports, they are `{"orders":{"0":{"id":"3f2a...","next":23}}}`.
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
    id: str
    next: int


Positions = dict[Place, Position]


class DataLoss(RuntimeError):
    """Rows that were to be read are gone, or the stream is another one."""


@dataclass(frozen=True)
class ShardState:
    """What the broker says of one shard of a queue or stream exchange: rows `first` to `next` - 1 are there, on
    stable storage.

    row_bytes: the size of a row on average, 0 where it is not known.
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
    """Rows `start` to `end` - 1 of one shard; what one task reads."""

    queue: str
    shard: int
    id: str
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


# -- as text ---------------------------------------------------------------------------------------------


def encode(positions: Mapping[Place, Position]) -> dict[str, Any]:
    """Keys sorted: Spark compares offsets as text, and another order would look like new rows."""
    found: dict[str, Any] = {}
    for (queue, shard), position in sorted(
        positions.items(), key=lambda item: (item[0][0], str(item[0][1]))
    ):
        found.setdefault(queue, {})[str(shard)] = {"id": position.id, "next": position.next}
    return found


def decode(found: Mapping[str, Any] | str) -> Positions:
    parsed: Mapping[str, Any] = json.loads(found) if isinstance(found, str) else found
    return {
        (queue, int(shard)): Position(position["id"], position["next"])
        for queue, shards in parsed.items()
        for shard, position in shards.items()
    }


# -- what is read ------------------------------------------------------------------------------------------


def matching(pattern: str, names: Mapping[str, str | None]) -> list[str]:
    """Return the names that the whole pattern matches, in order. A shard whose exchange matches too is left out: its
    rows are the exchange's. `names`: of streams, each with the exchange that it is a shard of, if it is one.
    """
    matched = {name for name in names if re.fullmatch(pattern, name)}
    return sorted(name for name in matched if names[name] not in matched)


# -- where a query begins and ends -------------------------------------------------------------------------


def resolve(
    wanted: Offsets | None, default: int, states: Iterable[ShardState], option: str
) -> Positions:
    """Positions for what an option says. Places it does not name get `default`; ones it names that are not there are
    an error.
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
    """As `resolve`, from what the broker found: the first row at or after the time, None where all are older."""
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


# -- what was lost -----------------------------------------------------------------------------------------


def checked(
    start: Mapping[Place, Position],
    states: Iterable[ShardState],
    fail_on_data_loss: bool,
    ended: Mapping[str, int] | None = None,
) -> tuple[Positions, list[str]]:
    """Return where to go on, and what is lost in between, in words; raise DataLoss unless losses were allowed.

    Streams are compared by id before any arithmetic: a stream made anew has small offsets and would look like one
    without news. A place that `start` lacks was added since and is read from its beginning. `ended` says by id where
    streams ended that were taken out of a stream exchange when it got fewer shards; nothing is lost of one that was
    read to its end.
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
    """Say what a query has not read of a stream that is gone, as far as the broker knows where the stream ended."""
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
            f"{where} ends at offset {state.next - 1}, which is before {begun.next} where reading was to go on"
        )
    if begun.next < state.first:
        return Position(state.id, state.first), (
            f"{where} has lost offsets {begun.next} to {state.first - 1} to retention; it begins at {state.first}"
        )
    return begun, ""


def ordered(
    start: Mapping[Place, Position],
    end: Mapping[Place, Position],
    states: Iterable[ShardState],
    fail_on_data_loss: bool,
) -> Positions:
    """Return `end`, of which no place may lie before its start.

    Where that is because retention took all that was asked for, it is a loss, which is passed over if losses are.
    """
    found = dict(end)
    for state in states:
        begin, stop = start[state.place].next, end[state.place].next
        if stop >= begin:
            continue
        where = f"{state.queue}/{state.shard}"
        if begin > state.first:
            raise OptionError(
                f"{where} is to be read from offset {begin} to before {stop}: the end is before the start"
            )
        if fail_on_data_loss:
            raise DataLoss(
                f"{where} has lost the offsets before {stop} to retention; it begins at {state.first}"
            )
        found[state.place] = start[state.place]
    return found


# -- how much in one trigger -------------------------------------------------------------------------------


def lag(start: Mapping[Place, Position], end: Mapping[Place, Position]) -> dict[Place, int]:
    """Rows to be read, by place."""
    return {place: max(0, position.next - _begin(start, place)) for place, position in end.items()}


def _begin(start: Mapping[Place, Position], place: Place) -> int:
    return start[place].next if place in start else 0


def admit_rows(
    start: Mapping[Place, Position], end: Mapping[Place, Position], rows_max: int
) -> Positions:
    """An end no more than about `rows_max` rows away: each shard in proportion to its lag, at least 1 row where there
    is any, so that a small shard beside a large one is not kept waiting.
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
    """As `admit_rows`, by each shard's average size of a row. A row of unknown size counts 1 KiB."""
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
    """For a query that is to end where the streams ended when it began: nothing behind `target`, no place it lacks."""
    return {
        place: Position(position.id, min(position.next, target[place].next))
        for place, position in end.items()
        if place in target
    }


# -- into tasks --------------------------------------------------------------------------------------------


def ranges(
    start: Mapping[Place, Position],
    end: Mapping[Place, Position],
    partitions_min: int | None = None,
    rows_max: int | None = None,
) -> list[Range]:
    """Every row of [start, end) in exactly one range, by place and offset. Shards are divided, never joined."""
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


def gathered(pieces: Iterable[Range], rows_max: int) -> list[list[Range]]:
    """For tasks: neighbours together while they have no more than `rows_max` rows, since a task costs as much as many
    rows. Every range is in exactly one, in order.
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
    """In as few equal pieces as keep to `rows_max` rows each."""
    count = -(-len(one) // rows_max)
    edges = [one.start + len(one) * i // count for i in range(count + 1)]
    return [Range(one.queue, one.shard, one.id, low, high) for low, high in pairwise(edges)]
