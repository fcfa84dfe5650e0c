"""Measures this broker, and any number of others beside it: `make bench`.

Brokers take turns (A B A B ...), so a busy minute of the machine hurts all of them alike; medians are compared. Prints
a Markdown table with the bar of each scenario, writes everything to results/, and ends with status 1 when a run failed.
A figure that is short of its bar is said, not punished: the machine may be another one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import report
from brokers import OWN_NAME, ROOT, own_broker
from generator import Figures, RunFailed, Target, build_generator, measure
from load.scenarios import BY_NAME, SCENARIOS, SMOKE, Scenario

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    arguments = parse(sys.argv[1:])
    build_generator()
    if arguments.smoke:
        return smoke(arguments)
    outcome = heading(arguments)
    print(report.machine_lines(outcome), flush=True)
    for scenario in arguments.only:
        try:
            taken = run_scenario(arguments, scenario)
        except RunFailed as failure:  # this broker did not start; what was measured before is still worth its table
            taken = not_run(arguments, scenario, failure)
        outcome["scenarios"][scenario.name] = taken
        print(report.progress(scenario, taken), file=sys.stderr, flush=True)
    print(report.table(outcome))
    path = save(outcome, arguments.output)
    print(f"\nwritten to {path}")
    return 1 if any(broker["failures"] for taken in outcome["scenarios"].values() for broker in taken.values()) else 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each broker in each scenario (5)")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured seconds of a timed run (5)")
    parser.add_argument("--only", type=scenarios, default=list(SCENARIOS), metavar="NAME,...", help=", ".join(BY_NAME))
    parser.add_argument("--self", dest="self_url", metavar="URL", help="do not start this broker, it is there")
    parser.add_argument("--self-pid", type=int, metavar="PID", help="its topmost process, for CPU and memory")
    parser.add_argument("--peer", type=pair, action="append", default=[], metavar="NAME=URL", help="another broker")
    parser.add_argument("--peer-pid", type=pair, action="append", default=[], metavar="NAME=PID")
    parser.add_argument("--data", type=Path, metavar="DIR", help="where this broker's data goes (temporary directory)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="instead of results/<date>.json")
    parser.add_argument("--smoke", action="store_true", help="one second of a few scenarios: do messages flow at all")
    arguments = parser.parse_args(words)
    if arguments.runs < 1:
        parser.error("--runs: at least one")
    if unknown := set(dict(arguments.peer_pid)) - set(dict(arguments.peer)):
        parser.error(f"--peer-pid without its --peer: {', '.join(sorted(unknown))}")
    if not all(pid.isdigit() for _, pid in arguments.peer_pid):
        parser.error("--peer-pid: NAME=PID")
    return arguments


def scenarios(text: str) -> list[Scenario]:
    names = text.split(",")
    if unknown := [name for name in names if name not in BY_NAME]:
        raise argparse.ArgumentTypeError(f"no scenario {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
    return [BY_NAME[name] for name in names]


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=VALUE")
    return name, value


def peers(arguments: argparse.Namespace) -> list[Target]:
    pids = dict(arguments.peer_pid)
    return [Target(name, url, int(pids[name]) if name in pids else None) for name, url in arguments.peer]


def own(arguments: argparse.Namespace) -> contextlib.AbstractContextManager[Target]:
    if arguments.self_url:
        return contextlib.nullcontext(Target(OWN_NAME, arguments.self_url, arguments.self_pid))
    return own_broker(arguments.data)


def run_scenario(arguments: argparse.Namespace, scenario: Scenario) -> dict[str, Any]:
    """By broker: figures of each run, their medians and spread.

    This broker is fresh for every scenario, and for every run that measures memory: what an earlier run left warm
    would be missing from what the next one adds. A broker given by URL is taken as it is.
    """
    others = peers(arguments) if scenario.peers else []
    found: dict[str, dict[str, Any]] = {}
    rounds = [1] * arguments.runs if scenario.kind == "memory" else [arguments.runs]
    for runs in rounds:
        with own(arguments) as itself:
            for target in [itself, *others] * runs:
                taken = found.setdefault(target.name, {"runs": [], "failures": [], "load_average": []})
                run_once(target, scenario, arguments.seconds, taken)
    for target in peers(arguments):
        found.setdefault(target.name, {"runs": [], "failures": [], "load_average": []})
    for taken in found.values():
        taken.update(summary(taken["runs"]))
    return found


def not_run(arguments: argparse.Namespace, scenario: Scenario, failure: RunFailed) -> dict[str, Any]:
    print(f"{scenario.name}: {failure}", file=sys.stderr, flush=True)
    names = [OWN_NAME, *(peer.name for peer in peers(arguments))]
    return {name: {"runs": [], "failures": [str(failure)], "load_average": [], **summary([])} for name in names}


def run_once(target: Target, scenario: Scenario, seconds: float, taken: dict[str, Any]) -> None:
    taken["load_average"].append(round(machine.load_average(), 2))
    options = [*scenario.options, *(("--seconds", str(seconds)) if scenario.timed else ())]
    try:
        taken["runs"].append(measure(target, options, seconds))
    except RunFailed as failure:
        taken["failures"].append(str(failure))
        print(f"{scenario.name}, {target.name}: {failure}", file=sys.stderr, flush=True)


def summary(runs: list[Figures]) -> dict[str, Figures]:
    """Medians, and the spread as (largest - smallest) / median. Of figures that every run has."""
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
        "scenarios": {},
    }


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # measured from an unpacked archive


def save(outcome: dict[str, Any], wanted: Path | None) -> Path:
    path = wanted or RESULTS / f"{outcome['date'][:19].replace(':', '')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(outcome, indent=1) + "\n")
    return path


def smoke(arguments: argparse.Namespace) -> int:
    """Only that messages flow, each once and whole."""
    failures = 0
    with own(arguments) as itself:
        for name in SMOKE:
            try:
                found = measure(itself, [*BY_NAME[name].options, "--check", "--seconds", "1"], 1)
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
