"""The named workloads as data: the generator's options, the figures to show and their bars.

A bar is a property of this project: a number that holds on a machine of two cores, or a multiple of
what a peer does in the same run. A peer is measured in the same way but has no bar. `rate` is the
smaller of published and consumed messages a second, so a backlog that grows or shrinks cannot
flatter the figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["rate", "latency", "memory", "recovery"]
Cluster = Literal["", "elsewhere", "copies"]


QUICK = 10  # divides all counts in a quick run


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit for `metric`, which is a key of a run's figures.

    With `peers` the limit is this multiple of what the best of these peers reached.
    """

    metric: str
    wanted: Literal["at least", "below"]
    limit: float
    peers: tuple[str, ...] = ()

    def holds(self, value: float, limit: float) -> bool:
        return value >= limit if self.wanted == "at least" else value < limit

    def limit_beside(self, medians: Mapping[str, Mapping[str, float]]) -> float | None:
        """Return the limit in the unit of the metric, None if no peer of the bar has a figure.

        `medians` has the medians of each broker of the run, by name and metric.
        """
        if not self.peers:
            return self.limit
        theirs = [value for peer in self.peers if (value := medians.get(peer, {}).get(self.metric))]
        if not theirs:
            return None
        return self.limit * (max(theirs) if self.wanted == "at least" else min(theirs))


@dataclass(frozen=True, slots=True)
class Shovel:
    """A shovel that moves waiting messages, within this broker or to another one.

    prefetch: its src-prefetch-count; 1,000 is the default of shovels.
    """

    to: Literal["here", "elsewhere"]
    prefetch: int = 1000


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    about: str
    kind: Kind
    options: tuple[str, ...]
    bars: tuple[Bar, ...]
    shown: tuple[str, ...]  # metrics printed beside those with a bar
    timed: bool = True  # measured for --seconds; otherwise it ends when its work is done
    peers: bool = True  # other brokers can do this too
    count: int = 0  # messages, queues or connections: replaces {count} in the options
    count_peers: int = 0  # the count of peers, where `count` would take them minutes
    flags: tuple[str, ...] = ()  # how this broker is started
    cluster: Cluster = ""  # run on nodes of clusters: queues elsewhere, or copies of messages
    shovel: Shovel | None = None  # moves the messages, in place of the generator

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics with a bar, then the others, each once."""
        return tuple(dict.fromkeys([*(bar.metric for bar in self.bars), *self.shown]))

    def count_of(self, is_peer: bool, quick: bool = False) -> int:
        count = self.count_peers if is_peer and self.count_peers else self.count
        return count // QUICK if quick else count

    def words(self, count: int) -> list[str]:
        return [option.format(count=count) for option in self.options]


def at_least(metric: str, limit: float, *peers: str) -> Bar:
    return Bar(metric, "at least", limit, peers)


def below(metric: str, limit: float, *peers: str) -> Bar:
    return Bar(metric, "below", limit, peers)


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# The names that run.py's `--peer` gives them.
RABBITMQ, LAVINMQ = "rabbitmq", "lavinmq"
PEERS = (RABBITMQ, LAVINMQ)
DURABLE = "--persistent --durable"
CONFIRMED = f"{DURABLE} --confirms 1000 --prefetch 2000 --ack-every 100"
CONFIRM_TIMES = ("confirm_p50_us", "confirm_p99_us")

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "small",
        "16 B, 64 KB a write, 1 producer, 1 consumer, no acks",
        "rate",
        words("--body 16 --batch 64K"),
        (at_least("rate", 2_500_000), at_least("per_cpu_s", 2_500_000)),
        ("cores",),
    ),
    Scenario(
        "kib",
        "1 KiB, 64 KB a write, 1 producer, 1 consumer, no acks",
        "rate",
        words("--body 1024 --batch 64K"),
        (
            at_least("rate", 300_000),
            at_least("per_cpu_s", 250_000),
            at_least("per_cpu_s", 2.5, LAVINMQ),
        ),
        ("cores",),
    ),
    Scenario(
        "single",
        "16 B, one publish a write",
        "rate",
        words("--body 16 --batch 1"),
        (
            at_least("rate", 350_000),
            at_least("rate", 1, LAVINMQ),
            at_least("per_cpu_s", 500_000),
            at_least("per_cpu_s", 2, LAVINMQ),
        ),
        ("cores",),
    ),
    Scenario(
        "routed",
        "16 B, 4 producers, random keys through a direct exchange to 64 queues, 4 consumers of 16",
        "rate",
        words(
            "--body 16 --batch 64K --exchange direct --queues 64 --keys 64"
            " --producers 4 --consumers 4"
            " --consumer-queues 16"
        ),
        (at_least("rate", 800_000),),
        ("per_cpu_s", "cores"),
    ),
    Scenario(
        "stream-1",
        "16 B, random keys to a stream exchange of 1 shard queue, 1 consumer",
        "rate",
        words("--body 16 --batch 64K --exchange stream --queues 1 --keys 100000"),
        (at_least("rate", 1_000_000),),
        ("per_cpu_s", "cores"),
        peers=False,
    ),
    Scenario(
        "stream-8",
        "16 B, random keys to a stream exchange of 8 shard queues, 1 consumer of all",
        "rate",
        words("--body 16 --batch 64K --exchange stream --queues 8 --keys 100000"),
        (at_least("rate", 1_000_000),),
        ("per_cpu_s", "cores"),
        peers=False,
    ),
    Scenario(
        "virtual-8",
        "16 B, random keys to a stream exchange of 8 shard queues, 1 consumer of its virtual queue",
        "rate",
        words("--body 16 --batch 64K --exchange stream --queues 8 --keys 100000 --virtual"),
        (at_least("rate", 1_000_000),),
        ("per_cpu_s", "cores"),
        peers=False,
    ),
    Scenario(
        "stream-8-kib",
        "1 KiB, otherwise as stream-8",
        "rate",
        words("--body 1024 --batch 64K --exchange stream --queues 8 --keys 100000"),
        (at_least("rate", 150_000),),
        ("per_cpu_s", "cores"),
        peers=False,
    ),
    Scenario(
        "confirms",
        "16 B, persistent, durable queue, confirm window 1000, ack(multiple) every 100",
        "rate",
        words(f"--body 16 --batch 64K {CONFIRMED}"),
        (at_least("rate", 600_000), at_least("per_cpu_s", 2.5, LAVINMQ)),
        CONFIRM_TIMES,
    ),
    Scenario(
        "confirms-kib",
        "1 KiB, otherwise as confirms",
        "rate",
        words(f"--body 1024 --batch 64K {CONFIRMED}"),
        (at_least("rate", 150_000),),
        ("per_cpu_s", *CONFIRM_TIMES),
    ),
    Scenario(
        "confirms-1",
        "16 B, persistent, durable queue, each publish waits for its confirm",
        "rate",
        words(f"--body 16 --batch 1 {DURABLE} --confirms 1 --prefetch 2000 --ack-every 1"),
        (
            at_least("rate", 1_500),
            at_least("rate", 1, RABBITMQ),
            at_least("rate", 1.2, LAVINMQ),
        ),
        ("per_cpu_s", *CONFIRM_TIMES),
    ),
    Scenario(
        "latency-1k",
        "16 B, transient, 1,000 a second, publish to deliver",
        "latency",
        words("--body 16 --batch 1 --rate 1000 --latency"),
        (
            below("latency_p50_us", 110),
            below("latency_p99_us", 1_000),
            below("latency_p99_us", 1, LAVINMQ),
        ),
        ("latency_p99.9_us", "cpu_us", "cores"),
    ),
    Scenario(
        "latency-20k",
        "16 B, transient, 20,000 a second, publish to deliver",
        "latency",
        words("--body 16 --batch 1 --rate 20000 --latency"),
        (below("latency_p50_us", 110), below("latency_p99_us", 1_500)),
        ("latency_p99.9_us", "cpu_us", "cores"),
    ),
    Scenario(
        "rss-million",
        "1,000,000 messages of 100 B waiting in a durable queue: memory added",
        "memory",
        words(f"--body 100 --batch 64K {DURABLE} --messages 1000000 --no-consume --hold"),
        (below("rss_added_mb", 20),),
        ("pss_added_mb", "published_per_s"),
        timed=False,
    ),
    Scenario(
        "idle-1000",
        "1,000 idle connections with a channel each: memory added",
        "memory",
        words("--idle 1000 --seconds 1 --hold"),
        (below("rss_added_mb", 50),),
        ("pss_added_mb",),
        timed=False,
    ),
    Scenario(
        "stalled",
        "1 MiB bodies to a consumer that has stopped reading: most memory at any time",
        "memory",
        words("--body 1048576 --batch 1 --stall-consumer --messages 1000 --seconds 20"),
        (below("rss_max_mb", 200),),
        ("rss_added_mb", "published_per_s"),
        timed=False,
    ),
)

SMOKE = ("small", "single", "confirms")
