"""The generator understands every workload, and a run can give every figure that is shown."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from load.families import BY_NAME, FAMILIES
from load.scenarios import SMOKE, Bar, Scenario, at_least, below

LOAD = Path(__file__).parents[2] / "bench" / "load"
TRANSFERS = (
    "rate",
    "per_cpu_s",
    "cpu_us",
    "cores",
    "mb_per_s",
    "published_per_s",
    "consumed_per_s",
)
MEMORY = ("rss_added_mb", "pss_added_mb", "rss_max_mb", "rss_each_bytes")
TIMES = tuple(
    f"{what}_{percentile}_us"
    for what in ("confirm", "latency")
    for percentile in ("p50", "p99", "p99.9")
)
RECOVERY = ("start_s", "recovered_per_s")
COPYING = ("follower_cpu", "wire_bytes")


@pytest.fixture(scope="module")
def generator() -> Path:
    if not (shutil.which("cc") and shutil.which("make")):
        pytest.skip("needs make and a C compiler")
    subprocess.run(["make", "--silent", "-C", str(LOAD)], check=True)
    return LOAD / "amqpload"


@pytest.mark.parametrize(
    "scenario", [each for each in BY_NAME.values() if each.options], ids=lambda each: each.name
)
@pytest.mark.parametrize("is_peer", [False, True])
def test_the_generator_takes_the_options_of_every_scenario(
    generator: Path, scenario: Scenario, is_peer: bool
) -> None:
    options = scenario.words(scenario.count_of(is_peer))
    done = subprocess.run(
        [str(generator), "--url", "amqp://127.0.0.1:0/", *options], capture_output=True, check=False
    )
    # no broker there; 2 would be an option it does not take
    assert done.returncode == 1, done.stderr
    assert b"cannot connect" in done.stderr


def test_a_name_is_one_scenario_in_all_families_and_every_figure_is_one_of_a_run() -> None:
    for family in FAMILIES.values():
        for scenario in family:
            assert BY_NAME[scenario.name] == scenario
            assert scenario.metrics
            assert not set(scenario.metrics) - {*TRANSFERS, *MEMORY, *TIMES, *RECOVERY, *COPYING}
    assert set(SMOKE) <= set(BY_NAME)


def test_a_quick_run_counts_a_tenth_and_peers_their_own_number() -> None:
    fill: Any = BY_NAME["rss-10-million"]
    assert [fill.count_of(peer, quick) for peer in (False, True) for quick in (False, True)] == [
        10_000_000,
        1_000_000,
        1_000_000,
        100_000,
    ]
    assert "1000000" in fill.words(fill.count_of(True))


def test_every_bar_beside_a_peer_is_in_the_group_of_bars() -> None:
    beside = {
        each
        for each in BY_NAME.values()
        if any(bar.peers for bar in each.bars) and not each.cluster
    }
    assert beside <= set(FAMILIES["bars"])
    assert all(each.peers for each in FAMILIES["bars"])


@pytest.mark.parametrize(
    ("bar", "limit"),
    [
        (at_least("rate", 1.5, "one", "two"), 300.0),
        (at_least("rate", 2, "one"), 200.0),
        (below("cpu_us", 1.5, "one", "two"), 15.0),
        (below("cpu_us", 80), 80.0),
        (at_least("rate", 1, "three"), None),
        (at_least("mb_per_s", 1, "one"), None),
    ],
)
def test_a_bar_beside_peers_is_a_multiple_of_the_best_of_them(
    bar: Bar, limit: float | None
) -> None:
    medians = {"one": {"rate": 100.0, "cpu_us": 10.0}, "two": {"rate": 200.0, "cpu_us": 20.0}}
    assert bar.limit_beside({"shardmq": {"rate": 1.0}, **medians}) == limit


@pytest.mark.parametrize(
    "words",
    [
        ["--backlog"],
        ["--stream-queue"],
        ["--rpc", "1", "--confirms", "1"],
        ["--rpc", "1", "--body", "15"],
        ["--ops", "vhost"],
        ["--ops", "queue", "--pipeline", "0"],
        ["--fleet", "10"],
        ["--exchange", "headers"],
        ["--exchange", "fanout", "--check"],
    ],
)
def test_options_that_do_not_go_together_are_refused(generator: Path, words: list[str]) -> None:
    command = [str(generator), "--url", "amqp://127.0.0.1:0/", *words]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
