"""The model of copies over a link says what follows from a round trip and a bandwidth."""

from __future__ import annotations

from typing import Any

import pytest
from copying import Copying, model, rate

MEASURED = Copying(rate=100_000.0, wire_bytes=125.0)


@pytest.mark.parametrize(
    ("window", "round_trip_s", "bits_per_s", "expected"),
    [
        (1_000, 0.0, 1e15, 100_000),
        (1_000, 0.045, 1e15, 10_000),  # 10 ms of work and 90 ms on the way
        (1_000, 0.0, 1e8, 50_000),  # a million bits take 10 ms
        (100_000, 0.5, 1e15, 50_000),
    ],
)
def test_a_round_has_its_work_its_round_trip_and_its_bytes(
    window: int, round_trip_s: float, bits_per_s: float, expected: float
) -> None:
    assert rate(MEASURED, window, round_trip_s, bits_per_s) == pytest.approx(expected)


def test_the_table_has_what_was_measured() -> None:
    two: dict[str, Any] = {"median": {"rate": 100_000.0, "wire_bytes": 125.0}}
    lines = model({"copies-confirms": {"2 copies": two}}).splitlines()
    assert "confirms, 2 copies, messages/s" in lines[2] and "3 copies" not in lines[2]
    assert "| 0 | 1 | 1,000 | 90,909 |" in lines
    assert model({"copies-confirms": {"2 copies": {"median": {}}}}) == model({}) == ""
