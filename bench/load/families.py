"""All workloads by family: those of scenarios.py and many more. `run.py --group NAME` runs one.

`{count}` in the options stands for the scenario's count. Peers get `count_peers` where the same
count would take them minutes. A rate, or the bytes per message, does not depend on the count, so
these figures are compared all the same.
"""

from __future__ import annotations

from dataclasses import replace

from load.scenarios import (
    CONFIRM_TIMES,
    DURABLE,
    LAVINMQ,
    PEERS,
    RABBITMQ,
    SCENARIOS,
    Bar,
    Scenario,
    Shovel,
    at_least,
    below,
    words,
)

# Beside a node with its own queue: a broker alone, and a node whose queue is on another node.
ALONE, ELSEWHERE = "alone", "elsewhere"
# The columns of scenarios with copies of messages, and on how many nodes they have each message.
TWO_COPIES, ONE_COPY, THREE_COPIES = "2 copies", "1 copy", "3 copies"
BY_COPIES = {TWO_COPIES: 2, ONE_COPY: 1, THREE_COPIES: 3}
CORE = {scenario.name: scenario for scenario in SCENARIOS}
RATE = ("rate", "per_cpu_s", "cores")
SIZES = {"16": 16, "256": 256, "1k": 1 << 10, "32k": 32 << 10, "1m": 1 << 20}
# Large windows of large bodies only fill memory.
IN_FLIGHT = {"16": 1000, "256": 1000, "1k": 1000, "32k": 500, "1m": 64}
# How much better than the better peer bodies of this size are to be carried.
BODY_BARS = {"32k": 1.5, "1m": 1.0}
OPERATION_TIMES = ("latency_p50_us", "latency_p99_us")


def rate(
    name: str, about: str, options: str, shown: tuple[str, ...] = RATE, bars: tuple[Bar, ...] = ()
) -> Scenario:
    return Scenario(name, about, "rate", words(options), bars, shown)


def counted(
    name: str, about: str, options: str, count: int, count_peers: int, shown: tuple[str, ...]
) -> Scenario:
    """Return a scenario that ends when its work is done."""
    kept = Scenario(name, about, "rate", words(options), (), shown, timed=False)
    return replace(kept, count=count, count_peers=count_peers)


def memory(
    name: str, about: str, options: str, count: int, count_peers: int, bars: tuple[Bar, ...]
) -> Scenario:
    shown = ("rss_each_bytes", "pss_added_mb", "published_per_s")
    kept = Scenario(name, about, "memory", words(options), bars, shown, timed=False)
    return replace(kept, count=count, count_peers=count_peers)


BODIES = tuple(
    rate(
        f"body-{name}",
        f"bodies of {name}, transient, no acks",
        f"--body {size} --batch 64K",
        (*RATE, "mb_per_s"),
        tuple(
            at_least(metric, BODY_BARS[name], *PEERS)
            for metric in ("rate", "per_cpu_s")
            if name in BODY_BARS
        ),
    )
    for name, size in SIZES.items()
) + tuple(
    rate(
        f"body-{name}-durable",
        f"bodies of {name}, persistent, {IN_FLIGHT[name]} unconfirmed, acks",
        f"--body {size} --batch 64K {DURABLE}"
        f" --confirms {IN_FLIGHT[name]} --prefetch {IN_FLIGHT[name]}"
        f" --ack-every {IN_FLIGHT[name] // 10}",
        (*RATE, "mb_per_s", "confirm_p50_us"),
    )
    for name, size in SIZES.items()
)

# The CPU that the flood takes counts, too.
FLOOD_BAR = at_least("per_cpu_s", 2, LAVINMQ)

SMALL = (
    CORE["small"],
    CORE["single"],
    counted(
        "acks-100",
        "16 B out of a backlog, prefetch 2,000, ack(multiple) every 100",
        "--body 16 --backlog --prefetch 2000 --ack-every 100 --messages {count}",
        2_000_000,
        400_000,
        RATE,
    ),
    counted(
        "acks-1",
        "16 B out of a backlog, prefetch 100, each message acknowledged",
        "--body 16 --backlog --prefetch 100 --ack-every 1 --messages {count}",
        1_000_000,
        200_000,
        RATE,
    ),
    *(
        rate(
            name,
            f"a consumer with prefetch {prefetch:,} and {acks}"
            " while a producer without confirms floods its queue",
            f"--body 16 --prefetch {prefetch} --ack-every {every}",
            ("consumed_per_s", "per_cpu_s", "published_per_s", "cores"),
            bars,
        )
        for name, prefetch, every, acks, bars in (
            ("flooded", 100, 1, "an ack for each", ()),
            ("flooded-1", 1000, 1, "an ack for each", (FLOOD_BAR,)),
            ("flooded-100", 1000, 100, "ack(multiple) every 100", (FLOOD_BAR,)),
        )
    ),
    *(
        rate(
            f"pairs-{n}",
            f"16 B, {n} producers, {n} queues, {n} consumers",
            f"--producers {n} --consumers {n} --queues {n}",
        )
        for n in (1, 4, 16)
    ),
    counted(
        "publish-only",
        "16 B into a queue nobody consumes",
        "--body 16 --no-consume --messages {count}",
        3_000_000,
        1_000_000,
        RATE,
    ),
    counted(
        "backlog",
        "16 B, a backlog of 5 million (1 million for others) is consumed",
        "--body 16 --backlog --messages {count}",
        5_000_000,
        1_000_000,
        (*RATE, "published_per_s"),
    ),
)

CONFIRMS = (
    CORE["confirms-1"],
    rate(
        "confirms-1-only",
        "16 B, persistent, each publish waits for its confirm, nobody consumes",
        f"--body 16 --batch 1 {DURABLE} --confirms 1 --no-consume",
        ("per_cpu_s", *CONFIRM_TIMES),
        (at_least("rate", 1, LAVINMQ),),
    ),
    rate(
        "confirms-1x16",
        "16 B, persistent, 16 producers that each wait for every confirm",
        f"--body 16 --batch 1 {DURABLE} --confirms 1 --producers 16 --prefetch 2000 --ack-every 1",
        (*RATE, *CONFIRM_TIMES),
    ),
    rate(
        "confirms-100",
        "16 B, persistent, confirm window 100, ack(multiple) every 10",
        f"--body 16 --batch 64K {DURABLE} --confirms 100 --prefetch 200 --ack-every 10",
        (*RATE, *CONFIRM_TIMES),
    ),
    CORE["confirms"],
    CORE["confirms-kib"],
    rate(
        "confirms-10000",
        "16 B, persistent, confirm window 10,000, ack(multiple) every 1,000",
        f"--body 16 --batch 64K {DURABLE} --confirms 10000 --prefetch 20000 --ack-every 1000",
        (*RATE, *CONFIRM_TIMES),
    ),
)

FANOUT = tuple(
    rate(
        f"fanout-{n}",
        f"16 B to {n} queues each, all consumed by one connection; CPU by delivery",
        f"--body 16 --exchange fanout --queues {n}",
        ("rate", "consumed_per_s", "per_cpu_s", "cores"),
    )
    for n in (1, 4, 16)
)

TOPIC = (
    rate(
        "topic-1000",
        "16 B, random keys, 1,000 bindings with wildcards to 10 queues",
        "--body 16 --exchange topic --keys 1000 --queues 10",
    ),
    rate(
        "direct-1000",
        "the same through a direct exchange",
        "--body 16 --exchange direct --keys 1000 --queues 10",
    ),
    CORE["routed"],
)

CONNECTIONS = (
    replace(
        rate(
            "fleet-1000",
            "1,000 connections that publish 10 messages of 16 B a second each, 1 consumer",
            "--body 16 --batch 1 --fleet 1000 --rate 10000 --latency --warmup 1",
            ("rate", "per_cpu_s", "cores", "latency_p50_us", "latency_p99_us"),
            (below("cpu_us", 41),),  # half of what it was in November 2026
        ),
        kind="latency",
    ),
)

STREAMS = (
    CORE["stream-1"],
    *(
        replace(
            CORE["stream-8"],
            name=f"stream-{n}",
            about=f"16 B, random keys to a stream exchange of {n} shard queues, 1 consumer",
            options=words(f"--body 16 --batch 64K --exchange stream --queues {n} --keys 100000"),
        )
        for n in (2, 4)
    ),
    CORE["stream-8"],
    CORE["virtual-8"],
    CORE["stream-8-kib"],
    counted(
        "replay",
        "100 B, a stream is filled, then read from its start",
        "--body 100 --stream-queue --backlog --prefetch 10000 --ack-every 5000 --messages {count}",
        3_000_000,
        500_000,
        (*RATE, "published_per_s"),
    ),
)

RPC = (
    rate(
        "rpc-1",
        "one request at a time by amq.rabbitmq.reply-to",
        "--rpc 1",
        (*RATE, *OPERATION_TIMES),
        (at_least("rate", 1.3, RABBITMQ),),
    ),
    rate("rpc-100", "100 requests under way", "--rpc 100", (*RATE, *OPERATION_TIMES)),
    rate(
        "rpc-16x10",
        "16 clients, 4 servers, 10 requests of each under way",
        "--rpc 10 --producers 16 --consumers 4 --queues 1 --consumer-queues 1",
        (*RATE, *OPERATION_TIMES),
    ),
)


def operations(name: str, about: str, options: str) -> Scenario:
    """Return a scenario of one operation at a time for each client."""
    bar = at_least("rate", 1, *PEERS)
    return rate(name, about, f"--ops {options}", (*RATE, *OPERATION_TIMES), (bar,))


ONE_AT_A_TIME = tuple(
    operations(f"{name}{more}", f"{about}{by}", f"{options}{clients}")
    for name, about, options in (
        ("connect", "connect, log in, open a channel, close: one after the other", "connect"),
        ("channel", "open and close a channel", "channel"),
        ("declare", "durable queues, one by one", "queue --durable"),
        ("declare-transient", "transient queues, one by one", "queue"),
        ("bind", "bindings of a direct exchange, one by one", "binding"),
        ("bind-durable", "durable bindings of a direct exchange, one by one", "binding --durable"),
    )
    for more, by, clients in (("", "", ""), ("-4", ", by 4 clients", " --producers 4"))
)

CHURN = (
    *ONE_AT_A_TIME,
    rate(
        "connect-16",
        "connect, log in, open a channel, close: 16 at once",
        "--ops connect --producers 16",
        (*RATE, *OPERATION_TIMES),
    ),
    rate(
        "declare-pipelined",
        "durable queues, 200 at once",
        "--ops queue --durable --pipeline 200",
        RATE,
    ),
    rate(
        "bind-pipelined",
        "bindings, 200 at once",
        "--ops binding --pipeline 200",
        RATE,
        (at_least("rate", 20_000),),
    ),
)

MEMORY = (
    CORE["rss-million"],
    memory(
        "rss-10-million",
        "10 million messages of 100 B (1 million for others) waiting in a durable queue",
        f"--body 100 {DURABLE} --messages {{count}} --no-consume --hold",
        10_000_000,
        1_000_000,
        (below("rss_added_mb", 80),),
    ),
    CORE["idle-1000"],
    memory(
        "idle-8000",
        "8,000 idle connections with a channel each (2,000 for others)",
        "--idle {count} --seconds 1 --hold",
        8_000,
        2_000,
        (below("rss_added_mb", 400),),
    ),
    memory(
        "queues-100k",
        "100,000 durable queues (5,000 for others)",
        "--ops queue --durable --pipeline 1000 --messages {count} --hold",
        100_000,
        5_000,
        (below("rss_added_mb", 100),),
    ),
    CORE["stalled"],
)


def paced(
    name: str, rate: int, metrics: tuple[str, ...], *bars: Bar, flags: tuple[str, ...] = ()
) -> Scenario:
    about = f"16 B, transient, {rate:,} a second, publish to deliver"
    options = words(f"--body 16 --batch 1 --rate {rate} --latency")
    return Scenario(name, about, "latency", options, bars, metrics, flags=flags)


CPU_FIRST = ("cpu_us", "cores", *OPERATION_TIMES)
LATENCY_FIRST = (*OPERATION_TIMES, "latency_p99.9_us", "cpu_us", "cores")
# This broker without a front door beside the shards: messages for queues of the process that a
# client is connected to cross no process.
NO_FRONT_DOOR = ("--front-doors", "0")

LATENCY = (
    paced("latency-100", 100, LATENCY_FIRST),
    CORE["latency-1k"],
    paced("latency-5k", 5_000, LATENCY_FIRST),
    CORE["latency-20k"],
    paced("cpu-2k", 2_000, CPU_FIRST, below("cpu_us", 80), below("cpu_us", 1.5, LAVINMQ)),
    paced(
        "cpu-2k-no-front-door",
        2_000,
        CPU_FIRST,
        below("cpu_us", 50),
        below("cpu_us", 1, LAVINMQ),
        flags=NO_FRONT_DOOR,
    ),
    paced(
        "latency-1k-no-front-door",
        1_000,
        LATENCY_FIRST,
        below("latency_p50_us", 65),
        below("latency_p99_us", 1, LAVINMQ),
        flags=NO_FRONT_DOOR,
    ),
)

RECOVERY = (
    Scenario(
        "recovery",
        "10 million persistent messages of 100 B in 10 queues (1 million for others),"
        " kill -9, start",
        "recovery",
        (),
        (below("start_s", 5),),
        ("recovered_per_s",),
        timed=False,
        count=10_000_000,
        count_peers=1_000_000,
    ),
)

# The core scenarios with one queue, whose name chooses its node. Stream exchanges have queues on
# all nodes.
ON_ONE_NODE = (
    "small", "kib", "single", "confirms", "confirms-kib", "confirms-1", "latency-1k", "latency-20k",
)  # fmt: skip
# A node of a cluster may cost this much more than a broker alone.
CLUSTER_COSTS_MAX = 1.03


def _in_cluster(scenario: Scenario) -> Scenario:
    figure = "cpu_us" if scenario.kind == "latency" else "per_cpu_s"
    bar = (
        below(figure, CLUSTER_COSTS_MAX, ALONE)
        if scenario.kind == "latency"
        else at_least(figure, 1 / CLUSTER_COSTS_MAX, ALONE)
    )
    return replace(
        scenario,
        name=f"cluster-{scenario.name}",
        about=f"{scenario.about}; on a node of a cluster, alone, and with the queue elsewhere",
        bars=(bar,),
        shown=tuple(dict.fromkeys(bar.metric for bar in scenario.bars)) + scenario.shown,
        peers=False,
        cluster="elsewhere",
    )


CLUSTER = tuple(_in_cluster(CORE[name]) for name in ON_ONE_NODE)

# With two copies a broker does at least these shares of what it does with one.
COPIED_RATE_MIN = 0.5  # where the cores are not the limit
COPIED_PER_CPU_S_MIN = 0.75
FOLLOWER_CPU_MAX = 0.5  # CPU of a follower beside the leader's


def _with_copies(scenario: Scenario) -> Scenario:
    return replace(
        scenario,
        name=f"copies-{scenario.name}",
        about=f"{scenario.about}; on a node of a cluster with so many copies of each message",
        bars=(
            at_least("rate", COPIED_RATE_MIN, ONE_COPY),
            at_least("per_cpu_s", COPIED_PER_CPU_S_MIN, ONE_COPY),
            below("follower_cpu", FOLLOWER_CPU_MAX),
        ),
        shown=("wire_bytes", "cores", *CONFIRM_TIMES),
        peers=False,
        cluster="copies",
    )


COPIES = tuple(
    _with_copies(each)
    for each in (
        CORE["confirms"],
        CORE["confirms-kib"],
        CORE["confirms-1"],
        replace(
            CORE["confirms-1"],
            name="confirms-1-kib",
            about="1 KiB, otherwise as confirms-1",
            options=words(
                f"--body 1024 --batch 1 {DURABLE} --confirms 1 --prefetch 2000 --ack-every 1"
            ),
        ),
    )
)


def _shovelled(name: str, about: str, options: str, shovel: Shovel, bar: float) -> Scenario:
    where = "within this broker" if shovel.to == "here" else "to another one on this machine"
    return Scenario(
        name,
        f"{about} of 16 B, moved {where} by a shovel, on-confirm, prefetch {shovel.prefetch:,}",
        "rate",
        words(f"--body 16 {options}"),
        (at_least("rate", bar),),
        ("per_cpu_s", "cores"),
        timed=False,
        peers=False,
        count=2_000_000,
        shovel=shovel,
    )


MOVED_HERE_PER_S, MOVED_ELSEWHERE_PER_S = 500_000, 150_000
PREFETCH_LARGE = 10_000
BRIDGES = (
    _shovelled("shovel", "persistent", DURABLE, Shovel("here"), MOVED_HERE_PER_S),
    _shovelled("shovel-transient", "transient", "--durable", Shovel("here"), MOVED_HERE_PER_S),
    _shovelled(
        "shovel-10000", "persistent", DURABLE, Shovel("here", PREFETCH_LARGE), MOVED_HERE_PER_S
    ),
    _shovelled(
        "shovel-elsewhere", "persistent", DURABLE, Shovel("elsewhere"), MOVED_ELSEWHERE_PER_S
    ),
    _shovelled(
        "shovel-elsewhere-10000",
        "persistent",
        DURABLE,
        Shovel("elsewhere", PREFETCH_LARGE),
        MOVED_ELSEWHERE_PER_S,
    ),
)

FAMILIES: dict[str, tuple[Scenario, ...]] = {
    "core": SCENARIOS,
    "small": SMALL,
    "bodies": BODIES,
    "confirms": CONFIRMS,
    "fanout": FANOUT,
    "topic": TOPIC,
    "connections": CONNECTIONS,
    "streams": STREAMS,
    "rpc": RPC,
    "churn": CHURN,
    "memory": MEMORY,
    "latency": LATENCY,
    "recovery": RECOVERY,
    "cluster": CLUSTER,
    "copies": COPIES,
    "bridges": BRIDGES,
}
BY_NAME = {scenario.name: scenario for family in FAMILIES.values() for scenario in family}
# One message at a time beside other brokers. Batches have their bar in guard.py: they take no more
# instructions than before.
FAMILIES["bars"] = tuple(
    scenario
    for scenario in BY_NAME.values()
    if scenario in (*LATENCY, *CONNECTIONS)
    or (scenario.peers and any(bar.peers for bar in scenario.bars))
)
