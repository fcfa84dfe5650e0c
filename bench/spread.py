"""Measure the cost of spreading over many queues, and the growth with shards and front doors.

    python bench/spread.py costs [--runs 15] [--bodies 16,200,1024] [--only drain] [--data DIR]
    python bench/spread.py growth [--runs 3] [--seconds 2] [--data DIR]

`costs` compares the broker's CPU per message for two pairs: publishing random keys to a stream
exchange of 8 shards beside publishing to one queue, and a consumer of the virtual queue that drains
a backlog beside a consumer of one queue. Both sides take turns on one broker, after a first turn
that warms it up. This is repeated on each of BROKERS brokers, because two brokers of the same code
differ by some percent for as long as they live. Other work on the machine only adds to a run, so
the cheaper half of the runs of each side counts: the means of these halves and their ratio. Between
results of 15 turns the ratio has a standard deviation of 0.02 to 0.04 (the median of the ratios
0.02 to 0.05). The row also shows the lowest and highest ratio of two runs side by side. Publishing
counts to its end: the run waits for the bytes that are left in sockets when the generator has sent
everything, and for the sync that comes each second. So nothing of one run is left to do when the
next one begins.

`growth` puts the same load through brokers of 1 to N shards and front doors. On few cores the rates
say little, because the processes and the generator share the cores. The CPU that each kind of
process spends on a message says how many messages the process could handle with a core of its own.
The model follows from that: with F front doors and S shards on F + S cores, the rate is the lower
of F / (CPU of a front door per message) and S / (CPU of a shard per message). The model assumes
that connections and keys are spread evenly, that the generator, the controller and the kernel's
network work have other cores, that neither memory nor disk is the limit, and that a message costs
no more CPU with more processes than in the largest broker measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import generator
import machine
from brokers import own_broker
from generator import RunFailed, Target, started
from streams import roles

Costs = dict[str, float]  # nanoseconds of CPU a message, by role; "rate": messages a second

ONE = "--exchange direct --queues 1 --keys 1"
ONE_OF_ANY = "--exchange fanout --queues 1 --keys 100000"
EIGHT = "--exchange stream --queues 8 --keys 100000"
VIRTUAL = f"{EIGHT} --virtual"
PUBLISH = "--no-consume --hold"
ACKS = "--prefetch 2000 --ack-every 100"
# Comparisons: name, options for one queue and for eight, the largest ratio of costs.
PAIRS = (
    ("publish", f"{ONE} {PUBLISH}", f"{EIGHT} {PUBLISH}", 1.25),
    (
        "publish, beside one queue with these keys",
        f"{ONE_OF_ANY} {PUBLISH}",
        f"{EIGHT} {PUBLISH}",
        1.25,
    ),
    ("drain, no acks", f"{ONE} --backlog", f"{VIRTUAL} --backlog", 1.25),
    (
        "drain, ack(multiple) every 100",
        f"{ONE} --backlog {ACKS}",
        f"{VIRTUAL} --backlog {ACKS}",
        1.25,
    ),
)
# Bytes of bodies and names in one run, so that all runs take about as long; the most messages.
RUN_BYTES = 200_000_000
MESSAGES_MAX = 1_500_000
# The number of brokers whose turns make a row.
BROKERS = 3
NAMES_BYTES = 60
# Shards and front doors of the brokers that are measured.
SHAPES = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (4, 4))
LOAD = f"--body 100 --batch 64K {EIGHT} --producers 4 --consumers 4 --consumer-queues 2"
MODEL_CORES = (2, 4, 8, 16, 32)
LIMIT_S = 120.0
# A broker is quiet when it takes less than QUIET_SHARE of a core for QUIET_S. It is not quiet
# before SYNCED_S, because data that nobody waits for is synced after a second.
QUIET_SHARE, QUIET_S, SYNCED_S = 0.05, 0.2, 1.2
QUIET_S_MAX = 60.0


def costs_of(target: Target, options: str) -> Costs:
    """Run once and return the costs between the generator's marks.

    With `--hold` in the options the costs are read when the broker has done everything.
    """
    assert target.pid is not None
    who = roles(target.pid)
    settle(target)
    at: dict[str, Costs] = {}
    report: dict[str, float] = {}
    with started(target, options.split(), LIMIT_S) as process:
        assert process.stdout and process.stdin
        for line in process.stdout:
            match line.strip():
                case "@start" | "@end" as mark:
                    at[mark] = spent(who)
                case "@hold":
                    settle(target)
                    at["@end"] = spent(who)
                    process.stdin.write("\n")
                    process.stdin.flush()
                case text if text.startswith("{"):
                    report = json.loads(text)
    if not report or report.get("error"):
        raise RunFailed(str(report.get("error") or "the generator ended without a report"))
    rate = report["consumed_per_s"] or report["published_per_s"]
    messages = rate * report["seconds"]
    found = {role: (at["@end"][role] - at["@start"][role]) / messages * 1e9 for role in who}
    return found | {"all": sum(found.values()), "rate": rate}


def spent(who: dict[str, list[int]]) -> Costs:
    """Return the CPU seconds so far, by role."""
    return {role: machine.cpu_seconds(pids) for role, pids in who.items()}


def settle(target: Target) -> None:
    """Wait until the broker has done and synced all its work."""
    pids = target.processes()
    begun = time.monotonic()
    while True:
        since, before = time.monotonic(), machine.cpu_seconds(pids)
        time.sleep(QUIET_S)
        now = time.monotonic()
        if (
            machine.cpu_seconds(pids) - before < QUIET_SHARE * (now - since)
            and now - begun > SYNCED_S
        ):
            return
        if now - begun > QUIET_S_MAX:
            raise RunFailed(f"the broker was not quiet within {QUIET_S_MAX:.0f} s")


def medians(runs: list[Costs]) -> Costs:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def cheaper_half(runs: list[Costs]) -> Costs:
    """Return the means of the cheaper half of the runs."""
    half = sorted(runs, key=lambda run: run["all"])[: (len(runs) + 1) // 2]
    return {name: statistics.fmean(run[name] for run in half) for name in half[0]}


def turns(
    target: Target, common: str, one: str, eight: str, count: int
) -> list[tuple[Costs, Costs]]:
    """Return `count` pairs of runs, one of each side, after one pair that warms up.

    The side that begins changes from pair to pair.
    """
    found: list[tuple[Costs, Costs]] = []
    for turn in range(count + 1):
        sides = [(0, one), (1, eight)]
        costs = {
            side: costs_of(target, f"{common} {options} --prefix {side}{turn}")
            for side, options in (sides if turn % 2 else reversed(sides))
        }
        if turn:
            found.append((costs[0], costs[1]))
    return found


def show_costs(options: argparse.Namespace) -> None:
    print(
        "| | body | one queue, ns | front door | shards | eight | front door | shards"
        " | ratio | from, to | at most |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for body in options.bodies:
        messages = min(MESSAGES_MAX, RUN_BYTES // (body + NAMES_BYTES))
        common = f"--body {body} --batch 64K --messages {messages}"
        for name, one, eight, most in (pair for pair in PAIRS if options.only in pair[0]):
            pairs: list[tuple[Costs, Costs]] = []
            while len(pairs) < options.runs:
                with own_broker(options.data) as target:
                    pairs += turns(target, common, one, eight, -(-options.runs // BROKERS))
            sides = [cheaper_half([pair[side] for pair in pairs]) for side in (0, 1)]
            cells = [
                f"{side[role]:,.0f}" for side in sides for role in ("all", "front door", "shard")
            ]
            ratios = [eight_costs["all"] / one_costs["all"] for one_costs, eight_costs in pairs]
            spread = f"{min(ratios):.2f}, {max(ratios):.2f}"
            row = [
                name,
                f"{body} B",
                *cells,
                f"{sides[1]['all'] / sides[0]['all']:.2f}",
                spread,
                f"{most}",
            ]
            print(f"| {' | '.join(row)} |", flush=True)


def show_growth(options: argparse.Namespace) -> None:
    print(
        "| shards | front doors | messages/s | front doors, ns a message | shards, ns a message |"
    )
    print("| ---: | ---: | ---: | ---: | ---: |")
    found: Costs = {}
    for shards, doors in SHAPES:
        flags = ["--shards", str(shards), "--front-doors", str(doors)]
        with own_broker(options.data, flags=flags) as target:
            load = f"{LOAD} --seconds {options.seconds} --warmup 1"
            found = medians([costs_of(target, load) for _ in range(options.runs)])
        door, shard = found["front door"], found["shard"]
        print(
            f"| {shards} | {doors} | {found['rate']:,.0f} | {door:,.0f} | {shard:,.0f} |",
            flush=True,
        )
    print("\n| cores | front doors + shards | model, messages/s |\n| ---: | ---: | ---: |")
    for cores in MODEL_CORES:
        doors, rate = best_split(cores, found["front door"], found["shard"])
        print(f"| {cores} | {doors} + {cores - doors} | {rate:,.0f} |")


def best_split(cores: int, door_ns: float, shard_ns: float) -> tuple[int, float]:
    """Return the best number of cores for front doors, and the messages a second that result."""
    rates = {
        doors: min(doors / door_ns, (cores - doors) / shard_ns) * 1e9 for doors in range(1, cores)
    }
    best = max(rates, key=lambda doors: rates[doors])
    return best, rates[best]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("costs", "growth"))
    parser.add_argument("--runs", type=int, default=None, help="15 of `costs`, 3 of `growth`")
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument(
        "--bodies",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[16, 200, 1024],
    )
    parser.add_argument(
        "--only", default="", metavar="PART", help="of `costs`: rows whose name has this"
    )
    parser.add_argument("--data", type=Path, default=None, help="directory on the disk to measure")
    options = parser.parse_args()
    options.runs = options.runs or {"costs": 15, "growth": 3}[options.what]
    generator.build_generator()
    try:
        (show_costs if options.what == "costs" else show_growth)(options)
    except RunFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
