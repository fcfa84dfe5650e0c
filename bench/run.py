"""Measure this broker and any number of others beside it: `make bench`.

Brokers take turns (A B A B ...), so a busy minute of the machine slows all of them alike; medians
are compared. The output is a Markdown table with the bar of each scenario and the ratio to each
peer. Everything is written to results/, the table with charts as well. The exit status is 1 when a
run failed. A figure that misses its bar is reported but does not change the status, because the
machine may be another one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import copying
import crossing
import machine
import report
from brokers import OWN_NAME, ROOT, own_broker, port_of, server_properties, supervisor_of
from clusters import nodes_and_alone, nodes_with_copies
from generator import OVERTIME_S_MAX, Figures, RunFailed, Target, build_generator, measure
from load.families import BY_NAME, FAMILIES
from load.scenarios import SCENARIOS, SMOKE, Scenario, Shovel
from moving import both_ends, moved
from recovery import anew, recovered, recovered_own

RESULTS = Path(__file__).parent / "results"
WARMUP_S_MAX = 0.5
TURNS_EACH_START = 8  # of the brokers of a cluster
COUNTED_S_MAX = 900.0  # the limit of a run that ends when its work is done; peers may be slow


def main() -> int:
    arguments = parse(sys.argv[1:])
    build_generator()
    if arguments.smoke:
        return smoke(arguments)
    # So a time limit that ends this process ends the broker, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    outcome = heading(arguments)
    path = arguments.output or RESULTS / f"{outcome['date'][:19].replace(':', '')}.json"
    print(report.machine_lines(outcome), flush=True)
    for scenario in arguments.only:
        note_versions(arguments, outcome)
        try:
            taken = run_scenario(arguments, scenario)
        except RunFailed as failure:  # the broker did not start: earlier results get their table
            taken = not_run(arguments, scenario, failure)
        outcome["scenarios"][scenario.name] = taken
        if not arguments.no_files:
            save(outcome, path)
        print(report.progress(scenario, taken), file=sys.stderr, flush=True)
    print(report.table(outcome))
    print(f"\n{report.bars_line(outcome)}")
    for lines in (crossing.model(outcome["scenarios"]), copying.model(outcome["scenarios"])):
        if lines:
            print(f"\n{lines}")
    if not arguments.no_files:
        print(f"\nwritten to {', '.join(map(str, [path, *report.write(outcome, path)]))}")
    return (
        1
        if any(
            broker["failures"]
            for taken in outcome["scenarios"].values()
            for broker in taken.values()
        )
        else 0
    )


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, help="runs of each broker in each scenario (5; quick: 1)"
    )
    parser.add_argument(
        "--seconds", type=float, help="measured seconds of a timed run (5; quick: 1)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="once, a second each, a tenth of all that is counted"
    )
    parser.add_argument(
        "--only", type=scenarios, default=[], metavar="NAME,...", help=", ".join(BY_NAME)
    )
    groups = f"all, {', '.join(FAMILIES)} (core)"
    parser.add_argument("--group", type=families, default=[], metavar="NAME,...", help=groups)
    parser.add_argument(
        "--self",
        dest="self_url",
        metavar="URL",
        default=os.environ.get("BENCH_SELF"),  # A list of processes does not show it.
        help="do not start this broker, it is there (BENCH_SELF)",
    )
    parser.add_argument(
        "--self-pid", type=int, metavar="PID", help="its topmost process (found by its port)"
    )
    parser.add_argument(
        "--peer", type=pair, action="append", default=[], metavar="NAME=URL", help="another broker"
    )
    pid_help = "its topmost process (found by its port when it is on this host)"
    parser.add_argument(
        "--peer-pid", type=pair, action="append", default=[], metavar="NAME=PID", help=pid_help
    )
    restarts = "this peer may be killed: somebody starts it anew (for `recovery`)"
    parser.add_argument(
        "--peer-restarts", action="append", default=[], metavar="NAME", help=restarts
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="where this broker's data goes (temporary directory)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="instead of results/<date>.json"
    )
    parser.add_argument("--no-files", action="store_true", help="only print the table")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="one second of a few scenarios: do messages flow at all",
    )
    arguments = parser.parse_args(words)
    arguments.runs = (1 if arguments.quick else 5) if arguments.runs is None else arguments.runs
    arguments.seconds = (
        (1.0 if arguments.quick else 5.0) if arguments.seconds is None else arguments.seconds
    )
    chosen = [*arguments.only, *may_run(arguments.group, arguments.self_url)]
    arguments.only = list(dict.fromkeys(chosen)) or may_run(SCENARIOS, arguments.self_url)
    if arguments.runs < 1:
        parser.error("--runs: at least one")
    if unknown := set(dict(arguments.peer_pid)) - set(dict(arguments.peer)):
        parser.error(f"--peer-pid without its --peer: {', '.join(sorted(unknown))}")
    if not all(pid.isdigit() for _, pid in arguments.peer_pid):
        parser.error("--peer-pid: NAME=PID")
    return arguments


def may_run(group: Iterable[Scenario], self_url: str | None) -> list[Scenario]:
    """Return the scenarios that a broker which is there can run: it has the flags that it has."""
    left_out = [each.name for each in group if self_url and (each.flags or each.shovel)]
    if left_out:
        print(f"left out, they need a broker of their own: {', '.join(left_out)}", file=sys.stderr)
    return [scenario for scenario in group if scenario.name not in left_out]


def scenarios(text: str) -> list[Scenario]:
    names = text.split(",")
    if unknown := [name for name in names if name not in BY_NAME]:
        raise argparse.ArgumentTypeError(
            f"no scenario {', '.join(unknown)}; there are {', '.join(BY_NAME)}"
        )
    return [BY_NAME[name] for name in names]


def families(text: str) -> list[Scenario]:
    names = list(FAMILIES) if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in FAMILIES]:
        raise argparse.ArgumentTypeError(
            f"no group {', '.join(unknown)}; there are {', '.join(FAMILIES)}"
        )
    return [scenario for name in names for scenario in FAMILIES[name]]


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=VALUE")
    return name, value


def peers(arguments: argparse.Namespace) -> list[Target]:
    pids = {name: int(pid) for name, pid in arguments.peer_pid}
    return [Target(name, url, peer_pid(url, pids.get(name))) for name, url in arguments.peer]


def peer_pid(url: str, given: int | None) -> int | None:
    """Return the given pid while its process lives, otherwise that of the process that listens.

    Of a second broker of this project, the supervisor of that process is returned.
    """
    if given and machine.stat_fields(given):
        return given
    return supervisor_of(machine.listener(port_of(url)))


def own(
    arguments: argparse.Namespace, flags: tuple[str, ...] = ()
) -> contextlib.AbstractContextManager[Target]:
    if arguments.self_url and flags:
        raise RunFailed(f"needs a broker that is started with {' '.join(flags)}")
    if arguments.self_url:
        pid = arguments.self_pid or supervisor_of(machine.listener(port_of(arguments.self_url)))
        return contextlib.nullcontext(Target(OWN_NAME, arguments.self_url, pid))
    return own_broker(arguments.data, flags=flags)


def run_scenario(arguments: argparse.Namespace, scenario: Scenario) -> dict[str, Any]:
    """Return the figures of each run with their medians and spread, by broker.

    This broker is fresh for every scenario, and for every run that measures memory: memory that an
    earlier run left warm would be missing from what the next run adds. For the same reason a peer
    that restarts when it ends is made fresh for these runs. Any other broker given by URL is taken
    as it is.
    """
    others = peers(arguments) if scenario.peers else []
    found: dict[str, dict[str, Any]] = {}
    if scenario.kind == "recovery":
        return run_recovery(arguments, scenario)
    if scenario.cluster:
        return run_in_cluster(arguments, scenario)
    if scenario.shovel:
        return run_shovel(arguments, scenario, scenario.shovel)
    rounds = [1] * arguments.runs if scenario.kind == "memory" else [arguments.runs]
    for runs in rounds:
        with own(arguments, scenario.flags) as itself:
            if scenario.kind == "memory":
                others = [
                    anew(peer) if peer.name in arguments.peer_restarts else peer for peer in others
                ]
            for target in [itself, *others] * runs:
                taken = found.setdefault(
                    target.name, {"runs": [], "failures": [], "load_average": []}
                )
                run_once(target, scenario, arguments, taken)
    return with_medians(arguments, found)


def run_in_cluster(arguments: argparse.Namespace, scenario: Scenario) -> dict[str, Any]:
    """Run on the nodes that the scenario asks for, by turns, the first target in the first column.

    Every other turn goes through them from the last to the first. The brokers start anew after some
    turns, because two processes of one program may differ by their places in memory.
    """
    found: dict[str, dict[str, Any]] = {}
    in_order: list[str] = []
    started = nodes_and_alone if scenario.cluster == "elsewhere" else nodes_with_copies
    for first in range(0, arguments.runs, TURNS_EACH_START):
        with started(arguments.data) as targets:
            in_order = [target.name for target in targets]
            for turn in range(first, min(first + TURNS_EACH_START, arguments.runs)):
                for target in targets if turn % 2 == 0 else reversed(targets):
                    taken = found.setdefault(
                        target.name, {"runs": [], "failures": [], "load_average": []}
                    )
                    run_once(target, scenario, arguments, taken)
    return with_medians(arguments, {name: found[name] for name in in_order})


def run_shovel(arguments: argparse.Namespace, scenario: Scenario, shovel: Shovel) -> dict[str, Any]:
    """Move the messages by a shovel, run after run, with one broker or two started here."""
    found: dict[str, dict[str, Any]] = {}
    count = scenario.count_of(False, arguments.quick)
    options = scenario.words(count)
    with both_ends(arguments.data, shovel) as (source, destination):
        act = partial(moved, source, destination, options, shovel, count)
        for _ in range(arguments.runs):
            kept(found, OWN_NAME, scenario, act)
    return with_medians(arguments, found)


def run_recovery(arguments: argparse.Namespace, scenario: Scenario) -> dict[str, Any]:
    """Run the recovery of this broker, and of the peers that are started again when they end."""
    found: dict[str, dict[str, Any]] = {}
    ours, theirs = (
        scenario.count_of(False, arguments.quick),
        scenario.count_of(True, arguments.quick),
    )
    for _ in range(arguments.runs):
        if not arguments.self_url:
            kept(found, OWN_NAME, scenario, partial(recovered_own, arguments.data, ours))
        for target in peers(arguments):
            if target.name in arguments.peer_restarts:
                kept(found, target.name, scenario, partial(recovered, target, theirs))
    found.setdefault(OWN_NAME, {"runs": [], "failures": [], "load_average": []})
    return with_medians(arguments, found)


def with_medians(arguments: argparse.Namespace, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Add medians and spreads, and an empty entry for each peer that did not take part."""
    for name, _ in arguments.peer:
        found.setdefault(name, {"runs": [], "failures": [], "load_average": []})
    for taken in found.values():
        taken.update(summary(taken["runs"]))
    return found


def not_run(
    arguments: argparse.Namespace, scenario: Scenario, failure: RunFailed
) -> dict[str, Any]:
    print(f"{scenario.name}: {failure}", file=sys.stderr, flush=True)
    names = [OWN_NAME, *(peer.name for peer in peers(arguments))]
    return {
        name: {"runs": [], "failures": [str(failure)], "load_average": [], **summary([])}
        for name in names
    }


def run_once(
    target: Target, scenario: Scenario, arguments: argparse.Namespace, taken: dict[str, Any]
) -> None:
    count = scenario.count_of(target.name != OWN_NAME, arguments.quick)
    seconds = arguments.seconds
    timed = ["--seconds", str(seconds), "--warmup", str(min(WARMUP_S_MAX, seconds / 4))]
    # The scenario's own words come last, so that they prevail.
    options = [*(timed if scenario.timed else ()), *scenario.words(count)]

    def act() -> Figures:
        figures = measure(
            target, options, seconds, OVERTIME_S_MAX if scenario.timed else COUNTED_S_MAX
        )
        if count and "rss_added_mb" in figures:
            figures["rss_each_bytes"] = figures["rss_added_mb"] * machine.MB / count
        return figures

    kept({target.name: taken}, target.name, scenario, act)


def kept(
    found: dict[str, dict[str, Any]], name: str, scenario: Scenario, act: Callable[[], Figures]
) -> None:
    taken = found.setdefault(name, {"runs": [], "failures": [], "load_average": []})
    taken["load_average"].append(round(machine.load_average(), 2))
    try:
        taken["runs"].append(act())
    except RunFailed as failure:
        taken["failures"].append(str(failure))
        print(f"{scenario.name}, {name}: {failure}", file=sys.stderr, flush=True)


def summary(runs: list[Figures]) -> dict[str, Figures]:
    """Return the medians, and the spread as (largest - smallest) / median.

    Only figures that every run has are in the summary.
    """
    common = set.intersection(*(set(run) for run in runs)) if runs else set()
    medians = {name: statistics.median(run[name] for run in runs) for name in sorted(common)}
    spread = {
        name: (max(run[name] for run in runs) - min(run[name] for run in runs)) / abs(middle)
        for name, middle in medians.items()
        if middle
    }
    return {"median": medians, "spread": spread}


def heading(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine.facts(),
        "load_average": round(machine.load_average(), 2),
        "syncs_per_s": round(machine.syncs_per_s(arguments.data or Path(tempfile.gettempdir()))),
        "runs": arguments.runs,
        "seconds": arguments.seconds,
        "brokers": {},
        "scenarios": {},
    }


def note_versions(arguments: argparse.Namespace, outcome: dict[str, Any]) -> None:
    """Note the server properties of each broker as soon as it can be asked."""
    if outcome["brokers"]:
        return
    with own(arguments) as itself:
        for target in [itself, *peers(arguments)]:
            outcome["brokers"][target.name] = server_properties(target.url)


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # the source is an unpacked archive without git


def save(outcome: dict[str, Any], path: Path) -> None:
    """Write the results after each scenario, so that a later failure loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(outcome, indent=1) + "\n")


def smoke(arguments: argparse.Namespace) -> int:
    """Check only that messages flow, each once and whole, and return the exit status."""
    failures = 0
    with own(arguments) as itself:
        for name in SMOKE:
            try:
                found = measure(itself, [*BY_NAME[name].words(0), "--check", "--seconds", "1"], 1)
            except RunFailed as failure:
                found, problem = {}, str(failure)
            else:
                problem = "" if found["consumed_per_s"] > 0 else "no message arrived"
            failures += bool(problem)
            print(f"{name}: {problem or report.amount(found['rate']) + ' messages/s'}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
