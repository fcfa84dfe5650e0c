"""The page of the analytics, parsed again, has the numbers of the tables."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_shardmq.jobs import report

BEGIN = datetime(2026, 11, 20, 12, tzinfo=UTC)
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=300)
COUNTS = st.integers(1, 10**12)


class Page(HTMLParser):
    """Collect all text and the attributes of each tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def tables(queue: str, keys: list[tuple[str, int]]) -> dict[str, report.Table]:
    windows = [
        {
            "queue": queue,
            "begins": str(BEGIN.replace(tzinfo=None)),
            "rows": 60,
            "bytes": 60,
            "rows_per_second": 1.0,
        }
    ]
    hot = [
        {"queue": queue, "routing_key": key, "rows": rows, "bytes": 0, "share": 0.5}
        for key, rows in keys
    ]
    return {"rates": windows, "hot keys": hot, "shards": []}


@given(NAMES, st.lists(st.tuples(NAMES, COUNTS), max_size=5))
def test_names_are_shown_as_they_are_whatever_they_hold(
    queue: str, keys: list[tuple[str, int]]
) -> None:
    shown = Page(report.page(queue, {"rows": 1, "skew": None}, tables(queue, keys), 60.0))
    plain = Page(
        report.page("q", {"rows": 1, "skew": None}, tables("q", [("k", n) for _, n in keys]), 60.0)
    )
    assert [tag for tag, _ in shown.tags] == [tag for tag, _ in plain.tags]
    text = "".join(shown.words)
    for key, rows in keys:
        assert f"{queue} {key}" in text and f"{rows:,}" in text


@pytest.mark.parametrize("count", [1, 7, report.TITLED_MAX + 1])
def test_a_window_lies_where_its_time_is_and_one_without_rows_is_a_gap(count: int) -> None:
    # two windows before the last one have no rows
    there = [n for n in range(count + 2) if n not in (count - 1, count)]
    windows = [(BEGIN + timedelta(seconds=10 * n), float(n + 1)) for n in there]
    page = Page(report.plot(windows, 10.0))
    width = report.PLOT_WIDTH / (there[-1] - there[0] + 1)
    columns = [(float(tag["x"]), float(tag["height"])) for name, tag in page.tags if name == "rect"]
    if not columns:
        (path,) = (tag["d"] for name, tag in page.tags if name == "path")
        corners = [piece.split("v-") for piece in path.split("M")[1:]]
        columns = [(float(left.split()[0]), float(right.split("h")[0])) for left, right in corners]
    assert len(columns) == len(there)
    for (x, height), n in zip(columns, there, strict=True):
        assert x == pytest.approx((n - there[0]) * width, abs=0.1)
        assert height == pytest.approx((n + 1) / (there[-1] + 1) * report.PLOT_HEIGHT, abs=0.1)
    words = "".join(page.words)
    assert str(windows[0][0].replace(tzinfo=None)) in words
    assert str((windows[-1][0] + timedelta(seconds=10)).replace(tzinfo=None)) in words


def test_nothing_is_a_page_too() -> None:
    shown = Page(
        report.page(
            "q", {"rows": 0, "skew": None}, {"rates": [], "hot keys": [], "shards": []}, 0.0
        )
    )
    assert "".join(shown.words).count("nothing") == 3
