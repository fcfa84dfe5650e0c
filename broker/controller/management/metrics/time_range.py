"""The samples that a call asks for, by `lengths_age`, `lengths_incr` and the like, as in RabbitMQ.

`age` and `incr` are seconds. The answer has a sample for each multiple of `incr` before the newest
one that is not later than now, as far as samples are kept. A counter between two samples is taken
to have risen evenly.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from shardmq.broker.controller.management.api_error import bad_request
from shardmq.broker.controller.management.metrics.past import (
    DATA_RATES,
    LENGTHS,
    MSG_RATES,
    NODE_STATS,
    Kind,
    Points,
)

SAMPLES_MAX: Final = 500  # steps of `incr` in `age`
# Samples in one answer. 500 queues with each of their samples of 10 minutes have 790,000.
ANSWER_SAMPLES_MAX: Final = 1_000_000
ANY_NUMBER: Final = re.compile(r"[+-]?[0-9]+")
DIGITS_MAX: Final = 15
CHARS_SHOWN: Final = 40
MS: Final = 1000

Row = dict[str, Any]


class TimeRange(NamedTuple):
    """The times of the samples that are wanted, in milliseconds since 1970."""

    first: int
    last: int
    incr: int


class Asked(NamedTuple):
    """The ranges of a call by the prefix of their parameters.

    `epoch_s` is the time since 1970 at which the monotonic clock was 0.
    """

    ranges: Mapping[str, TimeRange]
    epoch_s: float


def asked(
    query: Mapping[str, str], wall_s: float | None = None, clock_s: float | None = None
) -> Asked | None:
    """Return the ranges that a query asks for, None if it asks for none.

    As in RabbitMQ, an age without an increment is ignored, and so is an increment without an age.
    Raises 400 for what is no number, and for ranges that are empty or have too many samples.
    """
    wall_s = time.time() if wall_s is None else wall_s
    ranges = {}
    for prefix in (LENGTHS, MSG_RATES, DATA_RATES, NODE_STATS):
        age, incr = (_seconds(query, f"{prefix}_{end}") for end in ("age", "incr"))
        if age is None or incr is None:
            continue
        if (
            len(age.lstrip("+-0")) > DIGITS_MAX
            or len(incr.lstrip("+-0")) > DIGITS_MAX
            or int(age) < 1
            or int(incr) < 1
            or int(age) // int(incr) > SAMPLES_MAX
        ):
            raise bad_request(
                f"Invalid range parameters: age {age[:CHARS_SHOWN]}, incr {incr[:CHARS_SHOWN]}"
            )
        step = int(incr) * MS
        last = int(wall_s * MS) // step * step
        ranges[prefix] = TimeRange(last - int(age) * MS, last, step)
    if not ranges:
        return None
    return Asked(ranges, wall_s - (time.monotonic() if clock_s is None else clock_s))


def check_samples(asked: Asked, kind: Kind, rows: int) -> None:
    """Raise 400 if an answer with that many rows of a kind would have too many samples.

    Rows of objects that are not sampled have two samples, and are not counted.
    """
    ranges = [asked.ranges[each.asked_by] for each in kind.columns if each.asked_by in asked.ranges]
    in_row = sum(len(range(one.first, one.last + 1, one.incr)) for one in ranges)
    rows_max = ANSWER_SAMPLES_MAX // max(1, in_row)
    if min(rows, kind.most) > rows_max:
        raise bad_request(
            f"{rows} rows with up to {in_row} samples each are too many for one answer: ask for "
            f"at most {rows_max} rows, for a shorter age or for a larger incr"
        )


def _seconds(query: Mapping[str, str], name: str) -> str | None:
    given = query.get(name, "")
    if not given:
        return None
    if ANY_NUMBER.fullmatch(given) is None:
        raise bad_request(f"{name}: not a whole number of seconds")
    return given


def add_samples(row: Row, kind: Kind, points: Points, asked: Asked) -> None:
    """Add samples, their average and average rate to the `NAME_details` of a row."""
    grids: dict[str, list[_Place]] = {}
    for column, values in zip(kind.columns, points.columns, strict=True):
        wanted = asked.ranges.get(column.asked_by)
        place = row.get(column.place) if column.place else row
        if wanted is None or place is None or column.name not in place:
            continue
        grid = grids.get(column.asked_by)
        if grid is None:
            grid = grids[column.asked_by] = _grid(points.times, wanted, asked.epoch_s)
        samples = [
            {"sample": value, "timestamp": where.timestamp}
            for where in grid
            if (value := _value(values, where, column.counter)) is not None
        ]
        # Rows of queues that do nothing share their details.
        details = place[f"{column.name}_details"] = dict(place.get(f"{column.name}_details", {}))
        details["samples"] = samples
        if "rate" not in details:
            rate = _last_rate(points.times, values, column.counter)
            details |= {} if rate is None else {"rate": rate}
        if len(samples) > 1:
            details |= _averages(samples, column.counter)


class _Place(NamedTuple):
    """A time in the middle of samples: after the sample `number` by a `part` of a step."""

    timestamp: int
    number: int
    part: float


def _grid(times: Sequence[float], wanted: TimeRange, epoch_s: float) -> list[_Place]:
    """Return where the wanted times are among those of the samples, the newest first."""
    found = []
    for timestamp in range(wanted.last, wanted.first - 1, -wanted.incr):
        at = timestamp / MS - epoch_s
        index = bisect_right(times, at) - 1
        if index < 0:
            break
        part = 0.0
        if index + 1 < len(times):
            part = (at - times[index]) / (times[index + 1] - times[index])
        found.append(_Place(timestamp, index, part))
    return found


def _value(values: Sequence[float], where: _Place, counter: bool) -> float | int | None:
    """Return the number at a time, None if it is not known."""
    value = values[where.number]
    if value != value:  # nan
        return None
    whole = value.is_integer()
    if counter and where.part and (risen := values[where.number + 1] - value) > 0:
        value += risen * where.part
    return int(value) if whole else value


def _averages(samples: Sequence[Row], counter: bool) -> dict[str, float]:
    values = [sample["sample"] for sample in samples]
    steps = [newer - older for newer, older in pairwise(values)]
    # A counter that fell began anew.
    risen = sum(max(0, step) for step in steps) if counter else sum(steps)
    seconds = (samples[0]["timestamp"] - samples[-1]["timestamp"]) / MS
    return {"avg_rate": risen / seconds, "avg": sum(values) / len(values)}


def _last_rate(times: Sequence[float], values: Sequence[float], counter: bool) -> float | None:
    """Return the rate between the last two samples, None if it is not known."""
    if len(times) < 2:
        return None
    risen = values[-1] - values[-2]
    known = risen >= 0 if counter else risen == risen
    return risen / (times[-1] - times[-2]) if known else None
