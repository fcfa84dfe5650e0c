"""shardctl perf: percentiles, a line a second, churn, and no files."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shardmq.supervisor.cli.app import app
from shardmq.supervisor.cli.latency import PERCENTILES, Histogram, UnderWay
from tests.support.brokers import Api
from tests.support.real_broker import SOURCE, RealBroker

LATENCIES = [f"latency_{name}_ms" for name in PERCENTILES]
CONFIRMS = [f"confirm_{name}_ms" for name in PERCENTILES]


def perf(broker: RealBroker, *words: str) -> Result:
    found = CliRunner().invoke(app, ["perf", *words, "--data-dir", str(broker.data_dir)])
    assert found.exit_code == 0, found.output
    return found


def values(row: dict[str, Any], names: list[str]) -> list[float]:
    return [row[name] for name in names]


def test_percentiles_are_right_to_two_percent() -> None:
    drawn = random.Random(7)
    seconds = [drawn.lognormvariate(-6, 1) for _ in range(5000)]
    histogram = Histogram()
    for one in seconds:
        histogram.add(one)
    seconds.sort()
    row = histogram.row()
    for name, part in PERCENTILES.items():
        exact_ms = 1000 * seconds[max(0, round(part * 5000) - 1)]
        assert row[name] == pytest.approx(exact_ms, rel=0.021, abs=0.002), name
    assert row["max"] == round(1000 * seconds[-1], 3)


def test_a_line_shows_only_what_came_since_the_line_before() -> None:
    histogram = Histogram()
    histogram.add(1.0, 100)
    assert re.fullmatch(r"p50/p95/p99/p99.9 (1\.?\d*e\+03/?){4}", histogram.text_since_last())
    assert histogram.text_since_last() == "p50/p95/p99/p99.9 -/-/-/-"
    histogram.add(0.001)
    assert histogram.text_since_last().startswith("p50/p95/p99/p99.9 1")


def test_no_latency_is_shown_as_none() -> None:
    assert set(Histogram().row().values()) == {None}


def test_messages_arrive_in_the_order_in_which_they_left() -> None:
    way, histogram = UnderWay(), Histogram()
    way.left(3, 10.0)
    way.left(1, 11.0)
    way.arrived(2, 10.5, histogram)
    way.arrived(9, 12.0, histogram)  # 5 of them are of another load
    assert histogram.count == 4
    assert histogram.row()["max"] == 2000.0


def test_rates_and_latencies_are_one_row_of_json(broker: RealBroker) -> None:
    found = perf(broker, "--time", "1.3", "--rate", "500", "--confirm", "50", "--json")
    (row,) = json.loads(found.stdout)
    assert 250 < row["published/s"] <= 520
    for names in (LATENCIES, CONFIRMS):
        assert values(row, names) == sorted(values(row, names)) and row[names[0]] > 0
    line = found.stderr.splitlines()[0]
    assert re.match(r" *1\.\d s: published \d+/s, confirmed \d+/s, consumed \d+/s, ms p50/", line)


def test_the_table_has_the_percentiles_and_quiet_no_lines(broker: RealBroker) -> None:
    found = perf(broker, "--time", "1.2", "--rate", "100", "--quiet")
    assert found.stderr == ""
    assert found.stdout.split("\n")[0].split("\t")[-5:] == [*PERCENTILES]


@pytest.mark.parametrize("kind", ["connections", "channels", "queues"])
def test_churn_opens_and_closes_and_leaves_nothing(broker: RealBroker, api: Api, kind: str) -> None:
    def names() -> set[str]:
        return {row["name"] for row in api("/api/queues") if "perf" in row["name"]}

    found = perf(broker, "--churn", kind, "--time", "0.5", "-x", "2", "--json")
    (row,) = json.loads(found.stdout)
    assert row[f"{kind}/s"] > 0
    assert values(row, LATENCIES) == sorted(values(row, LATENCIES))
    assert names() == set()


def test_churn_keeps_to_a_rate(broker: RealBroker) -> None:
    found = perf(broker, "--churn", "channels", "--rate", "20", "--time", "1", "--json")
    assert json.loads(found.stdout)[0]["channels/s"] <= 22


@pytest.mark.skipif(
    not (shutil.which("cc") and shutil.which("make")), reason="the generator is compiled"
)
@pytest.mark.parametrize("words", [[], ["--scenarios", "latency", "--quick"]])
def test_no_file_is_written_that_nobody_asked_for(
    broker: RealBroker, tmp_path: Path, words: list[str]
) -> None:
    command = [sys.executable, "-m", "shardmq.supervisor.cli", "perf", "-z", "0.2", *words]
    ended = subprocess.run(
        [*command, "--data-dir", str(broker.data_dir)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert [*tmp_path.iterdir()] == []


def test_the_wait_for_a_rate_is_no_latency(broker: RealBroker) -> None:
    """A publisher at 10 messages a second rests for 100 ms before each."""
    found = perf(broker, "--rate", "10", "--time", "1", "--json")
    assert json.loads(found.stdout)[0]["latency_p50_ms"] < 60


@pytest.mark.skipif(
    not (shutil.which("cc") and shutil.which("make")), reason="the generator is compiled"
)
def test_no_list_of_processes_shows_the_password_of_a_scenario(broker: RealBroker) -> None:
    command = [sys.executable, "-m", "shardmq.supervisor.cli", "perf", "--quick"]
    command += ["--scenarios", "latency", "--data-dir", str(broker.data_dir)]
    # The login is the default one of perf, guest:guest.
    with subprocess.Popen(
        command, cwd=SOURCE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as running:
        shown: set[str] = set()
        while running.poll() is None:
            with contextlib.suppress(OSError):
                own = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
                for pid in (running.pid, *own):
                    shown.add(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
            time.sleep(0.02)
        assert running.returncode == 0
    assert any("amqpload" in line for line in shown)
    assert [line for line in shown if "guest:guest" in line] == []
