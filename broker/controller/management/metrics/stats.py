"""The numbers of shards and front doors at one moment, and rates between two moments."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from shardmq.broker.model.changes import QueuePut
from shardmq.shardd.wire.messages import ConsumerStats, QueueStats, ReaderStats, StreamStats

STATS_FRESH_S = 1.0  # numbers that are younger are not collected again
RATE_S_MAX = 60.0  # numbers that are further apart make no rate of now

COUNTERS = ("published", "delivered", "acked", "redelivered", "got", "repeated")
SIZES = ("ready", "unacked", "ready_bytes", "unacked_bytes", "consumers")

ReaderKey = tuple[int, int, int, int, str]


@dataclass(slots=True)
class Clients:
    """The reports of front doors about clients and exchanges, as of `at`; 0: there are none."""

    at: float = 0.0
    is_whole: bool = (
        False  # all front doors answered: a client that is not here had counted nothing
    )
    connections: dict[str, dict[str, Any]] = field(default_factory=dict)  # by owner
    # By owner and number.
    channels: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    # By vhost and name: messages published to an exchange, and messages that it routed to queues.
    exchanges: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Stats:
    """The numbers of all processes, or of some queues and their shards, at one moment.

    `before`: the numbers of everything at an earlier moment, to make rates of; their own `before`
    is dropped. `delayed`: the messages of the queues in which exchanges keep delayed messages, by
    queue id; these queues are not in `queues`.
    """

    at: float = 0.0
    is_sample: bool = False  # no call asked for these numbers
    queues: dict[int, QueueStats] = field(default_factory=dict)
    delayed: dict[int, int] = field(default_factory=dict)
    consumers: list[ConsumerStats] = field(default_factory=list)
    streams: dict[int, StreamStats] = field(default_factory=dict)  # by queue id
    # The missing offsets of damaged streams, by queue id.
    gaps: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    readers: dict[ReaderKey, ReaderStats] = field(default_factory=dict)
    shards: dict[int, dict[str, float]] = field(default_factory=dict)  # numbers of each process
    sizes: dict[int, dict[str, float]] = field(default_factory=dict)  # histograms, by shard
    clients: Clients = field(default_factory=Clients)  # may be later than `at`
    # Those that were collected before. Totals may have been collected in between.
    clients_before: Clients = field(default_factory=Clients)
    active: dict[int, str] = field(default_factory=dict)  # tags of active consumers, by queue id
    exclusive: dict[int, str] = field(default_factory=dict)  # tags of exclusive consumers, likewise
    counters: dict[str, float] = field(default_factory=dict)  # sums over the front doors
    # Sums over the front doors of what was counted for each vhost, by the names of DoorReport.
    vhosts: dict[str, dict[str, int]] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*COUNTERS, *SIZES), 0))
    before: Stats | None = None
    is_whole: bool = False  # all shards answered: a queue that is not here has counted nothing
    # All shards that were ready and all front doors answered: totals do not lack a part.
    has_all: bool = False
    totals_only: bool = False  # without connections, channels and exchanges
    loads: dict[int, dict[str, int]] = field(default_factory=dict)  # by shard, with deleted queues
    # The same of each node of a cluster, by its number: of its shards, and of its front doors. The
    # consumers are those that are connected to the node. Without a cluster there are none.
    nodes: dict[int, Stats] = field(default_factory=dict)

    def queue(self, queue: QueuePut) -> QueueStats | None:
        """Return the numbers of a queue; None while its shard is silent."""
        known = self.queues.get(queue.id)
        return QueueStats(queue.id) if known is None and queue.shard in self.shards else known

    @property
    def rate_s(self) -> float | None:
        """The seconds since `self.before`; None if numbers of now and then make no rate."""
        passed = self.at - self.before.at if self.before is not None else 0.0
        return passed if 0 < passed <= RATE_S_MAX else None

    def rate(self, now: float, before: float) -> float | None:
        """Return how fast a counter rose since `self.before`, None if that is not known.

        A shard that was restarted counts from 0, and what it counted until its end is not known.
        """
        return None if self.before is None else _rate(now - before, self.at - self.before.at)

    def rate_of_client(self, now: float, before: float) -> float | None:
        """Return how fast a counter of `clients` rose since `clients_before`."""
        at = self.clients_before.at
        return _rate(now - before, self.clients.at - at) if at else None

    def rate_of_all(self, now: float, before: float) -> float | None:
        """Return how fast a counter of all processes rose, None if some did not answer."""
        earlier = self.before
        can_compare = earlier is not None and self.has_all and earlier.has_all
        return self.rate(now, before) if can_compare else None

    def earlier(self, queue: QueueStats) -> QueueStats | None:
        """Return the numbers of a queue in `self.before`; None if they are not known."""
        if self.before is None:
            return None
        known = self.before.queues.get(queue.id)
        return QueueStats(queue.id) if known is None and self.before.is_whole else known


def _rate(risen: float, seconds: float) -> float | None:
    return risen / seconds if risen >= 0 and 0 < seconds <= RATE_S_MAX else None


def details(name: str, rate: float | None) -> dict[str, dict[str, float]]:
    """Return the field for the rate of a number, or no field if the rate is not known."""
    return {} if rate is None else {f"{name}_details": {"rate": rate}}


def seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def utc_date(ms: int | None) -> str | None:
    """Return a time in ms since the epoch as RabbitMQ writes it, 2026-11-26T13:27:42.678+00:00."""
    return None if ms is None else f"{_date(ms // 1000)}.{ms % 1000:03}+00:00"


@lru_cache(128)  # many queues were last used in the same second
def _date(s: int) -> str:
    return datetime.fromtimestamp(s, UTC).isoformat().removesuffix("+00:00")


def reader_key(of: ConsumerStats | ReaderStats) -> ReaderKey:
    return of.queue, of.door, of.connection, of.channel, of.tag


def lag(stats: Stats, reader: ReaderStats) -> int:
    """Return how many messages of its stream a consumer has not read."""
    stream = stats.streams.get(reader.queue)
    return behind(stream, reader.offset) if stream is not None else 0


def behind(stream: StreamStats, offset: int) -> int:
    """Return how many messages a stream has from `offset` on."""
    return max(stream.next_offset - max(offset, stream.first_offset), 0)


class Rates:
    """Rates of numbers that are compared when somebody asks, at least STATS_FRESH_S apart.

    A number has no rate when it was not there before. A counter that fell has none either, since it
    began again from 0.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, may_fall: bool = False) -> None:
        self._clock = clock
        self._least = -math.inf if may_fall else 0.0
        self._seen: list[tuple[float, dict[str, float]]] = []  # at most two, the older one first

    def forget(self) -> None:
        self._seen.clear()

    def of(self, values: dict[str, float]) -> dict[str, float]:
        now = self._clock()
        if not self._seen or now - self._seen[-1][0] >= STATS_FRESH_S:
            self._seen = [*self._seen[-1:], (now, values)]
        at, before = self._seen[0]
        if not 0 < now - at <= RATE_S_MAX:
            return {}
        known = {name: value - before[name] for name, value in values.items() if name in before}
        return {name: risen / (now - at) for name, risen in known.items() if risen >= self._least}
