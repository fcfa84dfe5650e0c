"""Filters of a query that the plan or the broker can apply: pure functions.

Filters on offset, shard and queue are applied exactly, and Spark does not apply them again. Filters
on times, keys and exchanges only reduce what the broker sends: the broker knows times to a
millisecond and keys as bytes, so Spark applies them once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyspark_shardmq.offsets import Place, Position, Positions
from pyspark_shardmq.options import ReadOptions

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

NEVER_NULL = {"queue", "shard", "offset", "timestamp", "exchange", "routing_key", "value"}
KAFKA_NAMES = {"topic": "queue", "partition": "shard"}


@dataclass(frozen=True)
class Pushed:
    """The bounds and filters that Spark has handed over.

    offset_min is inclusive and offset_max exclusive; None is no bound. filters: conditions as the
    broker's HTTP API writes them, all of which must hold.
    """

    offset_min: int | None = None
    offset_max: int | None = None
    shards: frozenset[int] | None = None
    queues: frozenset[str] | None = None
    filters: tuple[str, ...] = ()

    def narrow(self, start: Positions, end: Positions) -> tuple[Positions, Positions]:
        """Return the start and end without the places and offsets that no wanted row has."""
        kept = {place: position for place, position in end.items() if self._takes(place)}
        low = {
            place: _with(start[place], max(start[place].next, self.offset_min or 0))
            for place in kept
        }
        high = {
            place: _with(
                position,
                min(position.next, math.inf if self.offset_max is None else self.offset_max),
            )
            for place, position in kept.items()
        }
        return low, high

    def _takes(self, place: Place) -> bool:
        queue, shard = place
        return (self.queues is None or queue in self.queues) and (
            self.shards is None or shard in self.shards
        )


def _with(position: Position, next_: float) -> Position:
    return Position(position.id, int(next_))


def push(filters: Sequence[Filter], options: ReadOptions) -> tuple[Pushed, list[Filter]]:
    """Return what is taken over, and the filters that Spark still has to apply."""
    pushed, rest = Pushed(), []
    for one in filters:
        taken, done = _take(pushed, one, options.row_format == "kafka")
        pushed = taken
        rest += [] if done else [one]
    return pushed, rest


def _take(pushed: Pushed, one: Filter, kafka: bool) -> tuple[Pushed, bool]:
    kind = type(one).__name__
    path: tuple[str, ...] = getattr(one, "attribute", ())
    if len(path) != 1:
        return pushed, False
    column = KAFKA_NAMES.get(path[0], path[0]) if kafka else path[0]
    if kind == "IsNotNull":
        return pushed, column in NEVER_NULL
    value: Any = getattr(one, "value", None)
    values = [value] if kind == "EqualTo" else list(value) if kind == "In" else None
    if column == "offset":
        return _by_offset(pushed, kind, value)
    if column in ("shard", "queue") and values is not None:
        return _among(pushed, column, values), True
    if column == "timestamp" and isinstance(value, datetime):
        return _by_time(pushed, kind, value), False
    if column in ("routing_key", "exchange") and kind == "EqualTo" and "\ufffd" not in value:
        word = "key" if column == "routing_key" else column
        return replace(pushed, filters=(*pushed.filters, f"{word}:{value}")), False
    return pushed, False


def _by_offset(pushed: Pushed, kind: str, value: int) -> tuple[Pushed, bool]:
    # The distances from `value` to the first row to be read, and to the row behind the last one.
    # None: the filter sets no bound on that side.
    bounds: dict[str, tuple[int | None, int | None]] = {
        "EqualTo": (0, 1),
        "GreaterThan": (1, None),
        "GreaterThanOrEqual": (0, None),
        "LessThan": (None, 0),
        "LessThanOrEqual": (None, 1),
    }
    if kind not in bounds:
        return pushed, False
    low, high = bounds[kind]
    mins = [n for n in (pushed.offset_min, None if low is None else value + low) if n is not None]
    maxs = [n for n in (pushed.offset_max, None if high is None else value + high) if n is not None]
    return replace(
        pushed, offset_min=max(mins, default=None), offset_max=min(maxs, default=None)
    ), True


def _among(pushed: Pushed, column: str, values: Iterable[Any]) -> Pushed:
    wanted = frozenset(values)
    if column == "shard":
        return replace(pushed, shards=wanted if pushed.shards is None else pushed.shards & wanted)
    return replace(pushed, queues=wanted if pushed.queues is None else pushed.queues & wanted)


def _by_time(pushed: Pushed, kind: str, value: datetime) -> Pushed:
    """Add bounds of time in whole milliseconds, rounded so that no wanted row is left out."""
    ms = value.timestamp() * 1000
    since, until = f"since:{math.floor(ms)}", f"until:{math.floor(ms) + 1}"
    bounds: dict[str, tuple[str, ...]] = {
        "EqualTo": (since, until),
        "GreaterThan": (since,),
        "GreaterThanOrEqual": (since,),
        "LessThan": (until,),
        "LessThanOrEqual": (until,),
    }
    return replace(pushed, filters=(*pushed.filters, *bounds.get(kind, ())))
