"""Write results as text and pictures: a Markdown table with a row per figure, and charts.

    python bench/report.py results/2026-11-21T061921.json     writes .md and charts beside the file

The table has a column for each broker. A ratio is this broker's figure over the peer's where more
is better, and the inverse where less is better: above 1 this broker is ahead.

A ratio on nodes of a cluster is the median of the ratios within each turn, since what the machine
does besides changes from turn to turn by more than a node costs. In brackets is the interval in
which the median of endless turns lies, with a probability of 95 %.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import charts
import copying
import crossing
from load.families import BY_NAME, SIZES
from load.scenarios import Bar, Scenario

TITLES = {
    "rate": "messages/s",
    "cpu_us": "broker CPU of a message, us",
    "per_cpu_s": "messages/broker-CPU-s",
    "cores": "cores busy",
    "published_per_s": "published/s",
    "rss_added_mb": "RSS added, MB",
    "pss_added_mb": "PSS added, MB",
    "rss_max_mb": "RSS at most, MB",
    "rss_each_bytes": "RSS of each, bytes",
    "mb_per_s": "MB/s",
    "consumed_per_s": "delivered/s",
    "recovered_per_s": "messages/s of it",
    "follower_cpu": "CPU of a follower beside the leader's",
    "wire_bytes": "bytes of a message to all followers",
    "start_s": "from kill to there, s",
}
MORE_IS_BETTER = (
    "rate",
    "per_cpu_s",
    "mb_per_s",
    "published_per_s",
    "consumed_per_s",
    "recovered_per_s",
)
LESS_IS_BETTER = ("rss_each_bytes", "rss_max_mb")
TURNS_MIN = 6  # with fewer, no interval is that probable
PERCENTILES = ("p50", "p90", "p99", "p99.9")


def title(metric: str) -> str:
    """Return the name of a metric for readers: `confirm_p50_us` is "confirm p50, us"."""
    return TITLES.get(metric) or " ".join(metric.removesuffix("_us").split("_")) + ", us"


def amount(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}".rstrip("0").rstrip(".")


def versions(outcome: dict[str, Any]) -> str:
    said = outcome.get("brokers", {})
    return "; ".join(
        f"{name}: {' '.join(properties.values())}" for name, properties in said.items()
    )


def machine_lines(outcome: dict[str, Any]) -> str:
    facts = outcome["machine"]
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_mb']:,} MB, "
        f"Linux {facts['kernel']}; "
        f"commit {outcome['commit']}\n"
        f"load average {outcome['load_average']}, disk {outcome['syncs_per_s']:,} fdatasync/s; "
        f"median of {outcome['runs']} runs of {outcome['seconds']:g} s (smallest to largest)\n"
    )


def progress(scenario: Scenario, taken: dict[str, Any]) -> str:
    metric = scenario.metrics[0]
    parts = [f"{name} {figure(broker, metric)}" for name, broker in taken.items()]
    return f"{scenario.name} ({title(metric)}): {', '.join(parts)}"


def figure(broker: dict[str, Any], metric: str) -> str:
    value = broker["median"].get(metric)
    if value is None:
        return "failed" if broker["failures"] and not broker["runs"] else "-"
    runs = [run[metric] for run in broker["runs"] if metric in run]
    if len(runs) < 2:
        return amount(value)
    return f"{amount(value)} ({amount(min(runs))} to {amount(max(runs))})"


def verdict(bar: Bar | None, taken: dict[str, Any], by_turn: bool = False) -> str:
    """Say whether this broker, the first in `taken`, reached the bar."""
    if bar is None:
        return ""
    itself = next(iter(taken.values()))
    value = itself["median"].get(bar.metric)
    limit = bar.limit_beside({name: broker["median"] for name, broker in taken.items()})
    if itself["failures"]:
        return "failed"
    if value is None or limit is None:
        return "-"
    if bar.wanted == "below" and value < 0:
        return "no base"  # memory fell: the memory of an earlier run was still shrinking
    if by_turn and bar.peers:
        found = [ratios(bar.metric, itself, taken[peer]) for peer in bar.peers]
        return (
            "ok"
            if all(bar.holds(statistics.median(each), bar.limit) for each in found)
            else "short"
        )
    return "ok" if bar.holds(value, limit) else "short"


def ratios(metric: str, itself: dict[str, Any], peer: dict[str, Any]) -> list[float]:
    """Return this broker's figure over the peer's in each turn, in ascending order."""
    pairs = zip(itself["runs"], peer["runs"], strict=True)
    return sorted(ours[metric] / theirs[metric] for ours, theirs in pairs if theirs[metric])


def interval(found: list[float]) -> tuple[float, float] | None:
    """Return two of the ratios, in ascending order, between which their true median lies.

    By the binomial distribution, with a probability of 95 %. None if there are too few.
    """
    if len(found) < TURNS_MIN:
        return None
    outside = max(0, math.floor(len(found) / 2 - 0.98 * math.sqrt(len(found))))
    return found[outside], found[-1 - outside]


def limit(bar: Bar | None) -> str:
    if bar is None:
        return ""
    relation = ">=" if bar.wanted == "at least" else "<"
    return f"{relation} {amount(bar.limit)}{' x ' if bar.peers else ''}{' or '.join(bar.peers)}"


def ratio(metric: str, itself: dict[str, Any], peer: dict[str, Any], by_turn: bool = False) -> str:
    ours, theirs = itself["median"].get(metric), peer["median"].get(metric)
    more = metric in MORE_IS_BETTER
    if (
        not ours
        or not theirs
        or ours < 0
        or theirs < 0
        or not (more or metric in LESS_IS_BETTER or metric.endswith("_us"))
    ):
        return ""
    if not by_turn or itself["failures"] or peer["failures"]:
        return amount(ours / theirs if more else theirs / ours)
    found = ratios(metric, *((itself, peer) if more else (peer, itself)))
    between = interval(found)
    said = amount(statistics.median(found))
    return said if between is None else f"{said} ({' to '.join(map(amount, between))})"


def rows(name: str, taken: dict[str, Any]) -> Iterator[list[str]]:
    scenario = BY_NAME[name]
    itself, *peers = taken.values()
    by_turn = bool(scenario.cluster)
    bars: list[tuple[str, Bar | None]] = [(bar.metric, bar) for bar in scenario.bars]
    shown = [metric for metric in scenario.shown if metric not in dict(bars)]
    for metric, bar in bars + [(metric, None) for metric in shown]:
        cells = [figure(broker, metric) for broker in taken.values()]
        yield [
            name,
            title(metric),
            *cells,
            *(ratio(metric, itself, peer, by_turn) for peer in peers),
            limit(bar),
            verdict(bar, taken, by_turn),
        ]


def table(outcome: dict[str, Any]) -> str:
    taken = outcome["scenarios"]
    brokers = list(next(iter(taken.values()))) if taken else []
    heads = [
        "scenario",
        "figure",
        *brokers,
        *(f"ratio to {name}" for name in brokers[1:]),
        "bar",
        "",
    ]
    lines = [heads, ["---"] * len(heads)]
    for name, figures in taken.items():
        if name in BY_NAME:
            lines.extend(rows(name, figures))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bars_line(outcome: dict[str, Any]) -> str:
    """Return one line that counts the bars by verdict and names those that were not reached."""
    found: dict[str, list[str]] = {}
    for name, taken in outcome["scenarios"].items():
        for bar in BY_NAME[name].bars if name in BY_NAME else ():
            words = f"{name} {title(bar.metric)} {limit(bar)}"
            said = verdict(bar, taken, by_turn=bool(BY_NAME[name].cluster))
            found.setdefault(said, []).append(words)
    parts = [f"{len(found.pop('ok', []))} ok"]
    parts += [f"{len(bars)} {said} ({'; '.join(bars)})" for said, bars in found.items()]
    return f"bars: {', '.join(parts)}"


# -- the page and its charts -----------------------------------------------------------------------


def median(outcome: dict[str, Any], scenario: str, broker: str, metric: str) -> float:
    """Return the median of one metric, 0 when it was not measured."""
    taken = outcome["scenarios"].get(scenario, {}).get(broker, {})
    return float(taken.get("median", {}).get(metric, 0.0))


def series(
    outcome: dict[str, Any], points: dict[str, str], metric: str, brokers: list[str], of: str = ""
) -> charts.Series:
    """Return the values of a chart by broker.

    `points` maps each name on the axis to a scenario.
    """
    found = {}
    for broker in brokers:
        line = {point: median(outcome, name, broker, metric) for point, name in points.items()}
        if any(line.values()):
            found[f"{broker}{of}"] = {point: value for point, value in line.items() if value}
    return found


def pictures(outcome: dict[str, Any]) -> dict[str, str]:
    """Return the SVG of each chart whose scenarios were measured, by name."""
    brokers = list(dict.fromkeys(name for taken in outcome["scenarios"].values() for name in taken))
    sizes = {name: f"body-{name}" for name in SIZES}
    durable = {name: f"body-{name}-durable" for name in SIZES}
    throughput = series(outcome, sizes, "rate", brokers, ", transient")
    throughput |= series(outcome, durable, "rate", brokers, ", durable")
    costs = {broker: cpu_us(outcome, broker) for broker in brokers}
    shards = {str(n): f"stream-{n}" for n in (1, 2, 4, 8)}
    scaling = series(outcome, shards, "rate", brokers, ": messages/s")
    scaling |= series(outcome, shards, "per_cpu_s", brokers, ": messages/broker-CPU-s")
    drawn = {
        "throughput": throughput,
        "cpu": costs,
        "latency": latencies(outcome, brokers),
        "shards": scaling,
    }
    return {name: picture(name, data) for name, data in drawn.items() if any(data.values())}


def picture(name: str, data: charts.Series) -> str:
    match name:
        case "throughput":
            return charts.lines(
                "Messages a second by body", data, "logarithmic; bytes of a body", "body"
            )
        case "cpu":
            return charts.bars(
                "Broker CPU, microseconds a delivery or operation",
                data,
                "logarithmic; less is better",
            )
        case "latency":
            return charts.lines(
                "Publish to deliver, microseconds", data, "logarithmic; by percentile", "percentile"
            )
        case _:
            about = (
                "cores are shared with the generator:"
                " more shards than cores show what a shard costs"
            )
            return charts.lines(
                "A stream exchange of 1 to 8 shards, 16 B", data, about, "shards", from_zero=True
            )


def cpu_us(outcome: dict[str, Any], broker: str) -> dict[str, float]:
    found = {}
    for name, taken in outcome["scenarios"].items():
        per_s = taken.get(broker, {}).get("median", {}).get("per_cpu_s", 0.0)
        if name in BY_NAME and BY_NAME[name].kind == "rate" and BY_NAME[name].peers and per_s:
            found[name] = 1e6 / per_s
    return found


def latencies(outcome: dict[str, Any], brokers: list[str]) -> charts.Series:
    found: charts.Series = {}
    for scenario, load in (("latency-1k", "1,000/s"), ("latency-20k", "20,000/s")):
        for broker in brokers:
            line = {p: median(outcome, scenario, broker, f"latency_{p}_us") for p in PERCENTILES}
            if any(line.values()):
                found[f"{broker}, {load}"] = line
    return found


def page(outcome: dict[str, Any], drawn: dict[str, str]) -> str:
    """Return the page; `drawn` maps the title of each picture to its file."""
    parts = [f"# Measured on {outcome['date'][:10]}", machine_lines(outcome), versions(outcome)]
    parts += [f"![{name}]({file})" for name, file in drawn.items()]
    parts += [
        "Above 1, a ratio says that this broker is ahead.",
        table(outcome),
        bars_line(outcome),
        crossing.model(outcome["scenarios"]),
        copying.model(outcome["scenarios"]),
        "## What was done",
    ]
    measured = [name for name in outcome["scenarios"] if name in BY_NAME]
    parts.append("\n".join(f"- **{name}**: {BY_NAME[name].about}" for name in measured))
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def write(outcome: dict[str, Any], path: Path) -> list[Path]:
    """Write the page and its charts beside the results and return their paths."""
    written = {}
    for name, svg in pictures(outcome).items():
        written[name] = path.with_name(f"{path.stem}-{name}.svg")
        written[name].write_text(svg)
    text = path.with_suffix(".md")
    text.write_text(page(outcome, {name: file.name for name, file in written.items()}))
    return [text, *written.values()]


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        print(*write(json.loads(path.read_text()), path), sep="\n")


if __name__ == "__main__":
    main()
