"""The table and the charts of a result show who is ahead, and draw only measured figures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import charts
import pytest
import report


def broker(**figures: float) -> dict[str, Any]:
    return {
        "runs": [figures],
        "failures": [],
        "load_average": [0.0],
        "median": figures,
        "spread": {},
    }


def outcome() -> dict[str, Any]:
    facts = {"cpu": "x", "cores": 2, "memory_mb": 1, "kernel": "6"}
    small = {"rate": 3e6, "per_cpu_s": 2e6, "cores": 1.5}
    ours = {"latency_p50_us": 300.0, "latency_p99_us": 900.0}
    theirs = {"latency_p50_us": 75.0, "latency_p99_us": 450.0}
    return {
        "date": "2026-01-01T00:00:00+00:00", "commit": "c", "machine": facts, "load_average": 0.1,
        "syncs_per_s": 1, "runs": 1, "seconds": 1.0,
        "brokers": {"shardmq": {"product": "A", "version": "1"}},
        "scenarios": {
            "small": {"shardmq": broker(**small), "other": broker(rate=1e5, per_cpu_s=1e5)},
            "body-1k": {"shardmq": broker(rate=3e5), "other": broker()},
            "latency-1k": {"shardmq": broker(**ours), "other": broker(**theirs)},
        },
    }  # fmt: skip


def test_a_ratio_above_one_says_that_this_broker_is_ahead_whatever_is_better() -> None:
    lines = report.table(outcome()).splitlines()
    assert lines[0] == "| scenario | figure | shardmq | other | ratio to other | bar |  |"
    assert "| small | messages/s | 3,000,000 | 100,000 | 30 | >= 2,500,000 | ok |" in lines
    assert "| latency-1k | latency p50, us | 300 | 75 | 0.25 | < 110 | short |" in lines
    assert "| body-1k | messages/s | 300,000 | - |  |  |  |" in lines


def test_a_bar_beside_a_peer_is_judged_by_what_the_peer_did_in_the_same_run() -> None:
    found = outcome()
    found["scenarios"] = {
        name: {"shardmq": broker(rate=3e3), "rabbitmq": broker(rate=2e3), "lavinmq": lavinmq}
        for name, lavinmq in (
            ("declare", broker(rate=3.1e3)),
            ("bind", broker(rate=2.9e3)),
            ("confirms-1-only", broker()),
        )
    }
    lines = [line.split(" | ") for line in report.table(found).splitlines()]
    said = {line[0].strip("| "): line[-2:] for line in lines if line[1] == "messages/s"}
    assert said == {
        "declare": [">= 1 x rabbitmq or lavinmq", "short |"],
        "bind": [">= 1 x rabbitmq or lavinmq", "ok |"],
        "confirms-1-only": [">= 1 x lavinmq", "- |"],
    }
    assert report.bars_line(found) == (
        "bars: 1 ok, 1 short (declare messages/s >= 1 x rabbitmq or lavinmq),"
        " 1 - (confirms-1-only messages/s >= 1 x lavinmq)"
    )


def test_a_figure_of_several_runs_has_its_range() -> None:
    several = broker(rate=20.0)
    several["runs"] = [{"rate": 10.0}, {"rate": 20.0}, {"rate": 40.0}]
    assert report.figure(several, "rate") == "20 (10 to 40)"


def test_a_node_of_a_cluster_is_judged_turn_by_turn() -> None:
    """A load that slows a whole turn down says nothing of a node."""
    speeds = [1.0, 0.5, 2.0, 1.1, 0.9, 0.3, 0.7]
    node, alone = broker(per_cpu_s=0.9), broker(per_cpu_s=1.1)
    node["runs"] = [{"per_cpu_s": speed * 0.98} for speed in speeds]
    alone["runs"] = [{"per_cpu_s": speed} for speed in speeds]
    found = outcome()
    found["scenarios"] = {"cluster-small": {"shardmq": node, "alone": alone}}
    (line,) = (line for line in report.table(found).splitlines() if "/broker-CPU-s" in line)
    assert line.endswith("| 0.98 (0.98 to 0.98) | >= 0.97 x alone | ok |")
    node["runs"][0]["per_cpu_s"] = 0.5
    assert report.interval(report.ratios("per_cpu_s", node, alone)) == (
        pytest.approx(0.5),
        pytest.approx(0.98),
    )
    node["runs"] = [{"per_cpu_s": speed * 0.96} for speed in speeds]
    assert "1 short (cluster-small" in report.bars_line(found)


def test_an_interval_needs_some_turns_and_leaves_out_those_at_its_ends() -> None:
    assert report.interval([1.0] * 5) is None
    assert report.interval(sorted(map(float, range(25)))) == (7.0, 17.0)


def test_the_page_shows_the_charts_that_were_written_and_says_what_was_done(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(outcome()))
    page, *drawn = report.write(outcome(), path)
    assert [file.name for file in drawn] == [
        "result-throughput.svg",
        "result-cpu.svg",
        "result-latency.svg",
    ]
    text = page.read_text()
    assert all(f"({file.name})" in text for file in drawn)
    assert "- **small**: 16 B, 64 KB a write" in text and "A 1" in text
    for file in drawn:
        ElementTree.parse(file)
    assert "300k" in drawn[0].read_text() and "other" not in drawn[0].read_text()


@pytest.mark.parametrize("values", [{"a": 1.0}, {"a": 0.2, "b": 7e9}, {"a": 5.0, "b": 0.0}, {}])
@pytest.mark.parametrize("draw", [charts.bars, charts.lines])
def test_any_numbers_make_a_picture(draw: Any, values: dict[str, float]) -> None:
    svg = ElementTree.fromstring(draw("<title> & more", {"s": values}))
    written = [element.text for element in svg.iter() if element.text]
    assert "<title> & more" in written
    assert all(charts.short(value) in written for value in values.values() if value)
