"""The samples of the past: the numbers of the broker and of its objects at earlier moments.

The broker as a whole, this node, the shards and some vhosts have a sample every 5 s for 10 minutes,
and one every 5 min for a day. Some queues, exchanges, connections and channels have the 10 minutes:
those that are among the busiest, and those that somebody looked at lately. `sampling.py` takes the
samples, `time_range.py` answers calls with them.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, NamedTuple

from shardmq.broker.controller.management.metrics.message_stats import (
    CHANNEL_COUNTERS,
    DOOR_COUNTERS,
    OCTETS,
    QUEUE_COUNTERS,
    SHARD_COUNTERS,
)

FINE_S: Final = 5.0  # between two samples, where collecting everything does not take long
FINE_KEPT_S: Final = 600
COARSE_S: Final = 300.0
COARSE_KEPT_S: Final = 86_400
FINE_ROWS: Final = int(FINE_KEPT_S / FINE_S) + 1
COARSE_ROWS: Final = int(COARSE_KEPT_S / COARSE_S) + 1
BYTES_MAX: Final = 20 << 20  # of all samples together, with the most objects of each kind
# Samples of an object that nobody looks at and that is not among the busiest are dropped after this
# time.
UNSEEN_S_MAX: Final = FINE_KEPT_S

LENGTHS, MSG_RATES, DATA_RATES, NODE_STATS = "lengths", "msg_rates", "data_rates", "node_stats"


class Column(NamedTuple):
    """A number of which samples are kept.

    `place` is the object inside a row of the API in which the number is shown; "" is the row.
    `asked_by` is the prefix of the parameters that ask for its samples: `lengths` for
    `lengths_age` and `lengths_incr`. A `counter` falls only when a process counts anew.
    """

    name: str
    place: str
    asked_by: str
    counter: bool = True


class Kind(NamedTuple):
    """A kind of object with its columns.

    Samples of at most `most` objects of the kind are kept, and for a day if `is_long`. The
    `busiest` so many objects are sampled even if nobody looks at them.
    """

    name: str
    columns: tuple[Column, ...]
    most: int
    busiest: int
    is_long: bool = False


def _columns(
    names: Iterable[str], asked_by: str, place: str = "", counter: bool = True
) -> tuple[Column, ...]:
    return tuple(Column(name, place, asked_by, counter) for name in names)


DEPTHS: Final = ("messages", "messages_ready", "messages_unacknowledged")
CHURN: Final = (
    "connection_created", "connection_closed", "channel_created", "channel_closed",
    "queue_declared", "queue_created", "queue_deleted",
)  # fmt: skip
MESSAGE_STATS: Final = "message_stats"
# The counters of a vhost of which samples are kept: a day of all would take too much memory.
VHOST_SAMPLED: Final = ("publish", "confirm", "deliver_get", "ack")

BROKER: Final = Kind(
    "broker",
    _columns(DEPTHS, LENGTHS, "queue_totals", counter=False)
    + _columns((*DOOR_COUNTERS, *SHARD_COUNTERS), MSG_RATES, MESSAGE_STATS)
    + _columns(CHURN, LENGTHS, "churn_rates"),
    most=1,
    busiest=1,
    is_long=True,
)
NODE: Final = Kind(
    "node",
    _columns(
        ("mem_used", "fd_used", "sockets_used", "proc_used", "disk_free"), NODE_STATS, counter=False
    )
    + _columns(("io_sync_count",), NODE_STATS),
    most=1,
    busiest=1,
    is_long=True,
)
SHARD: Final = Kind(
    "shard",
    _columns(("messages", "message_bytes"), LENGTHS, counter=False)
    + _columns(("published", "delivered", "acked"), MSG_RATES)
    + _columns(("rss_bytes",), NODE_STATS, counter=False)
    + _columns(("cpu_seconds", "syncs"), NODE_STATS),
    most=128,
    busiest=128,
    is_long=True,
)
VHOST: Final = Kind(
    # RabbitMQ has the depths of a vhost by msg_rates_age.
    "vhost",
    _columns(DEPTHS, MSG_RATES, counter=False)
    + _columns(VHOST_SAMPLED, MSG_RATES, MESSAGE_STATS)
    + _columns(OCTETS, DATA_RATES),
    most=100,
    busiest=50,
    is_long=True,
)
QUEUE: Final = Kind(
    "queue",
    _columns(DEPTHS, LENGTHS, counter=False) + _columns(QUEUE_COUNTERS, MSG_RATES, MESSAGE_STATS),
    most=500,
    busiest=250,
)
EXCHANGE: Final = Kind(
    "exchange", _columns(("publish_in", "publish_out"), MSG_RATES, MESSAGE_STATS), 250, 125
)
CONNECTION: Final = Kind("connection", _columns(OCTETS, DATA_RATES), 250, 125)
CHANNEL: Final = Kind(
    "channel", _columns(CHANNEL_COUNTERS, MSG_RATES, MESSAGE_STATS), 160, 80
)  # fmt: skip

KINDS: Final = (BROKER, NODE, SHARD, VHOST, QUEUE, EXCHANGE, CONNECTION, CHANNEL)
THE_ONLY: Final = ""  # the key of the broker and of the node

Numbers = Sequence[float]  # in the order of the columns; nan: not known


class Points(NamedTuple):
    """The times of samples in seconds of the monotonic clock, the oldest first, and columns."""

    times: Sequence[float]
    columns: Sequence[Sequence[float]]


class Ring:
    """The last `rows_max` rows of numbers, 8 bytes for a number and for the time of a row."""

    __slots__ = ("_numbers", "_rows_max", "_width")

    def __init__(self, width: int, rows_max: int) -> None:
        self._width = width + 1
        self._rows_max = rows_max
        self._numbers = array("d")

    def __len__(self) -> int:
        return len(self._numbers) // self._width

    @property
    def last_at(self) -> float | None:
        return self._numbers[-self._width] if self._numbers else None

    def add(self, at: float, numbers: Numbers) -> None:
        """Add a row. A row that is not later than the last one is ignored."""
        assert len(numbers) == self._width - 1
        if self._numbers and at <= self._numbers[-self._width]:
            return
        if len(self) >= self._rows_max:
            del self._numbers[: self._width]
        self._numbers.append(at)
        self._numbers.extend(numbers)

    def points(self) -> Points:
        columns = [self._numbers[number :: self._width] for number in range(self._width)]
        return Points(columns[0], columns[1:])


class Series:
    """The samples of one object. `coarse` has those of a day, if they are kept."""

    __slots__ = ("_coarse", "_fine", "seen_at")

    def __init__(self, kind: Kind, now: float) -> None:
        self._fine = Ring(len(kind.columns), FINE_ROWS)
        self._coarse = Ring(len(kind.columns), COARSE_ROWS) if kind.is_long else None
        self.seen_at = now

    def add(self, at: float, numbers: Numbers) -> None:
        self._fine.add(at, numbers)
        if self._coarse is not None:
            last = self._coarse.last_at
            if last is None or at // COARSE_S > last // COARSE_S:
                self._coarse.add(at, numbers)

    def points(self) -> Points:
        """Return the samples every 5 s, and before the oldest of these those every 5 min."""
        fine = self._fine.points()
        if self._coarse is None or not fine.times:
            return fine
        coarse = self._coarse.points()
        end = bisect_left(coarse.times, fine.times[0])
        return Points(
            [*coarse.times[:end], *fine.times],
            [[*old[:end], *new] for old, new in zip(coarse.columns, fine.columns, strict=True)],
        )


class Past:
    """The samples of all objects that are sampled, by kind and by the key of the object."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Those looked at or busy last are at the end.
        self._kept: dict[str, OrderedDict[Hashable, Series]] = {
            kind.name: OrderedDict() for kind in KINDS
        }

    def see(self, kind: Kind, key: Hashable) -> Series:
        """Return the samples of an object, and keep them for the next UNSEEN_S_MAX.

        Where samples of `kind.most` objects are kept, those of the object that was seen least
        lately are dropped.
        """
        kept, now = self._kept[kind.name], self._clock()
        series = kept.get(key)
        if series is None:
            series = kept[key] = Series(kind, now)
        kept.move_to_end(key)
        series.seen_at = now
        if len(kept) > kind.most:
            kept.popitem(last=False)
        return series

    def points(self, kind: Kind, key: Hashable) -> Points:
        series = self._kept[kind.name].get(key)
        return series.points() if series is not None else Points((), [()] * len(kind.columns))

    def sampled(self, kind: Kind) -> list[tuple[Hashable, Series]]:
        """Return the objects to sample, without those that were not seen for too long."""
        kept, oldest = self._kept[kind.name], self._clock() - UNSEEN_S_MAX
        while kept and next(iter(kept.values())).seen_at < oldest:
            kept.popitem(last=False)
        return [*kept.items()]

    def forget(self) -> None:
        for kept in self._kept.values():
            kept.clear()


def with_point(points: Points, at: float, numbers: Numbers) -> Points:
    """Return the points with one more, unless there is a later one already."""
    if points.times and at <= points.times[-1]:
        return points
    return Points(
        [*points.times, at],
        [[*column, float(number)] for column, number in zip(points.columns, numbers, strict=True)],
    )


def numbers_in(kind: Kind, row: dict[str, object]) -> Numbers:
    """Return the numbers of a row of the API in the order of the columns of its kind."""
    found = []
    for column in kind.columns:
        place = row.get(column.place, {}) if column.place else row
        value = place.get(column.name) if isinstance(place, dict) else None
        found.append(float(value) if isinstance(value, int | float) else float("nan"))
    return found
