"""Say what copies of messages cost over links between hosts: a model of one round of confirms.

A shard syncs what has come, and its followers do; then it confirms, and syncs what has come since.
A publisher with W unconfirmed messages thus has them confirmed in rounds, and a round takes

    the time that W messages take where the link costs nothing, as measured
    + two round trips
    + the time in which the link takes the bytes that go to all followers.

There are two round trips because one sync is under way at a time: what has come first is synced
alone, and the rest, which has come meanwhile, behind it.

So the model knows nothing of the time of a sync and of the cores; they are in what was measured. It
assumes that the link is not shared, and that nothing is lost. tests/torture/test_links_of_copies.py
compares it with links that are made slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from load.families import THREE_COPIES, TWO_COPIES

WINDOWS = (1_000, 100_000)
ROUND_TRIPS = 2
ROUND_TRIPS_MS = (0, 1, 10, 100)
GBITS_PER_S = (1, 10, 25)
BITS = 8
MEASURED = ("copies-confirms", "copies-confirms-kib")


class Copying(NamedTuple):
    """A measurement without a link: messages/s, and bytes of a message to all followers."""

    rate: float
    wire_bytes: float


def rate(measured: Copying, window: int, round_trip_s: float, bits_per_s: float) -> float:
    """Return how many messages a second are confirmed to a publisher with such a window."""
    link_s = window * measured.wire_bytes * BITS / bits_per_s
    return window / (window / measured.rate + ROUND_TRIPS * round_trip_s + link_s)


def model(scenarios: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table for what was measured with two and three copies; "" if it was not."""
    found = [
        (f"{name.removeprefix('copies-')}, {copies}", Copying(each["rate"], each["wire_bytes"]))
        for name in MEASURED
        for copies in (TWO_COPIES, THREE_COPIES)
        if (each := _medians(scenarios, name, copies)).keys() >= {"rate", "wire_bytes"}
    ]
    return "\n".join(_lines(found)) if found else ""


def _medians(scenarios: Mapping[str, Mapping[str, Any]], name: str, copies: str) -> dict[str, Any]:
    medians: dict[str, Any] = scenarios.get(name, {}).get(copies, {}).get("median", {})
    return medians


def _lines(found: Sequence[tuple[str, Copying]]) -> list[str]:
    heads = ["round trip, ms", "Gbit/s", "window", *(f"{name}, messages/s" for name, _ in found)]
    lines = ["Model, over a link:", "", f"| {' | '.join(heads)} |"]
    lines.append(f"| {' | '.join(['--:'] * len(heads))} |")
    for round_trip_ms in ROUND_TRIPS_MS:
        for gbits_per_s in GBITS_PER_S:
            for window in WINDOWS:
                cells = [
                    f"{rate(each, window, round_trip_ms / 1000, gbits_per_s * 1e9):,.0f}"
                    for _, each in found
                ]
                numbers = (f"{round_trip_ms}", f"{gbits_per_s}", f"{window:,}", *cells)
                lines.append(f"| {' | '.join(numbers)} |")
    return lines
