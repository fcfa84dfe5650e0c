"""Test the guard of instruction counts.

More instructions than the tolerance allows are a failure; fewer are reported. Another compiler gets
a larger tolerance. With another version of Python, counts that include Python are not compared.
"""

from __future__ import annotations

import json
from typing import Any

import guard
import pytest
from micro.door import STAGES as DOOR_STAGES
from micro.path import STAGES, Path

HERE = {"compiler": "cc 12.2.0", "python": "3.11.7", "machine": "x86_64"}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "surroundings", lambda: HERE)


def baseline(**of: str) -> dict[str, Any]:
    return {
        "of": HERE | of,
        "instructions": {"16 B": {"scan": 100.0}, "one a read": {"scan": 1000.0}},
    }


@pytest.mark.parametrize(
    ("scan", "one", "of", "status", "said"),
    [
        (109.0, 1000.0, {}, 0, ""),
        (111.0, 1000.0, {}, 1, "+11.0% MORE"),
        (100.0, 1200.0, {}, 1, "+20.0% MORE"),
        (80.0, 1000.0, {}, 0, "-20.0% less: --update"),
        (119.0, 1000.0, {"compiler": "cc 14"}, 0, "tolerance 20%"),
        (121.0, 1000.0, {"compiler": "cc 14"}, 1, "MORE"),
        (100.0, 1500.0, {"python": "3.12.1"}, 0, ""),
        (100.0, 1500.0, {"python": "3.11.2"}, 1, "MORE"),
    ],
)
def test_the_tolerance(
    capsys: pytest.CaptureFixture[str],
    scan: float,
    one: float,
    of: dict[str, str],
    status: int,
    said: str,
) -> None:
    counts = {"16 B": {"scan": scan}, "one a read": {"scan": one}}
    assert guard.compare(baseline(**of), counts) == status
    assert said in capsys.readouterr().out


def test_a_stage_that_has_no_baseline_is_a_failure() -> None:
    assert guard.compare(baseline(), {"16 B": {"sort": 1.0}}) == 1


def test_the_baseline_has_every_stage_of_every_way() -> None:
    counts = json.loads(guard.BASELINE.read_text())["instructions"]
    assert list(counts) == [*guard.WAYS, guard.DOOR]
    for way, (_, _, acks) in guard.WAYS.items():
        assert set(counts[way]) == set(STAGES if acks else STAGES[:-1])
    assert set(counts[guard.DOOR]) == set(DOOR_STAGES)


@pytest.mark.parametrize(
    ("body_bytes", "count", "acks"),
    [(16, 0, False), (16, 0, True), (1024, 0, True), (200_000, 2, False)],
)
def test_what_goes_in_comes_out_of_the_path_that_is_measured(
    tmp_path: Any, body_bytes: int, count: int, acks: bool
) -> None:
    way = Path(str(tmp_path), body_bytes, count, acks)
    came = sum(way.turn(lambda stage, act: act()) for _ in range(5))
    assert came == 5 * way.count
    way.close()
