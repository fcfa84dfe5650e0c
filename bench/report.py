"""Results as text: the Markdown table of a run, one row for each figure, a column for each broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from load.scenarios import BY_NAME, Bar, Scenario

TITLES = {
    "rate": "messages/s",
    "per_cpu_s": "messages/broker-CPU-s",
    "cores": "cores busy",
    "published_per_s": "published/s",
    "rss_added_mb": "RSS added, MB",
    "pss_added_mb": "PSS added, MB",
    "rss_max_mb": "RSS at most, MB",
}


def title(metric: str) -> str:
    """`confirm_p50_us` is read as "confirm p50, us"."""
    return TITLES.get(metric) or " ".join(metric.removesuffix("_us").split("_")) + ", us"


def amount(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}".rstrip("0").rstrip(".")


def machine_lines(outcome: dict[str, Any]) -> str:
    facts = outcome["machine"]
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_mb']:,} MB, Linux {facts['kernel']}; "
        f"commit {outcome['commit']}\n"
        f"load average {outcome['load_average']}, disk {outcome['syncs_per_s']:,} fdatasync/s; "
        f"median of {outcome['runs']} runs of {outcome['seconds']:g} s, +- half the spread\n"
    )


def progress(scenario: Scenario, taken: dict[str, Any]) -> str:
    metric = scenario.bars[0].metric
    parts = [f"{name} {figure(broker, metric)}" for name, broker in taken.items()]
    return f"{scenario.name} ({title(metric)}): {', '.join(parts)}"


def figure(broker: dict[str, Any], metric: str) -> str:
    value = broker["median"].get(metric)
    if value is None:
        return "failed" if broker["failures"] and not broker["runs"] else "-"
    spread = broker["spread"].get(metric, 0.0)
    return f"{amount(value)} ±{spread * 50:.0f}%" if len(broker["runs"]) > 1 else amount(value)


def verdict(bar: Bar | None, broker: dict[str, Any]) -> str:
    if bar is None:
        return ""
    value = broker["median"].get(bar.metric)
    if broker["failures"]:
        return "failed"
    if value is None:
        return "-"
    if bar.wanted == "below" and value < 0:
        return "no base"  # memory fell while it was measured: what came before had not settled
    return "ok" if bar.holds(value) else "short"


def rows(name: str, taken: dict[str, Any]) -> Iterator[list[str]]:
    scenario = BY_NAME[name]
    itself = next(iter(taken.values()))
    figures: list[tuple[str, Bar | None]] = [(bar.metric, bar) for bar in scenario.bars]
    for metric, bar in figures + [(metric, None) for metric in scenario.shown]:
        limit = f"{'>=' if bar.wanted == 'at least' else '<'} {amount(bar.limit)}" if bar else ""
        cells = [figure(broker, metric) for broker in taken.values()]
        yield [name, title(metric), *cells, limit, verdict(bar, itself)]


def table(outcome: dict[str, Any]) -> str:
    taken = outcome["scenarios"]
    brokers = list(next(iter(taken.values()))) if taken else []
    lines = [["scenario", "figure", *brokers, "bar", ""], ["---"] * (len(brokers) + 4)]
    for name, figures in taken.items():
        lines.extend(rows(name, figures))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
