"""Make the HTML page of the job `analytics`: one file without other parts. Nothing here does I/O.

A table is a list of rows that all have the same columns. In a plot a window of time lies at its
time, so a window without rows is a gap.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

Table = Sequence[Mapping[str, Any]]

PLOT_WIDTH, PLOT_HEIGHT = 900, 160
BAR_WIDTH = 400
TITLED_MAX = 1000  # up to so many windows each have a title, shown when the mouse points at them
STYLE = """
:root{color-scheme:light dark;
--ink:#1a1a1a;--paper:#fff;--back:#f3f4f6;--line:#d5d8dd;--mark:#0b62c4}
@media(prefers-color-scheme:dark){
:root{--ink:#e8e8e8;--paper:#16181c;--back:#22262c;--line:#3a4048;--mark:#6aa9ff}}
body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;padding:0 1em;max-width:920px}
body{color:var(--ink);background:var(--paper)}
h1,h2{overflow-wrap:anywhere}h2{margin:2em 0 .5em;font-size:1.15em}
.total{display:flex;flex-wrap:wrap;gap:.5em 2em}.total b{display:block;font-size:1.5em}
.wide{overflow-x:auto}table{border-collapse:collapse}
td,th{padding:2px 12px 2px 0;text-align:left;white-space:nowrap}
.name{max-width:min(22em,40vw);overflow:hidden;text-overflow:ellipsis}
tr+tr td{border-top:1px solid var(--line)}
.number{text-align:right;font-variant-numeric:tabular-nums}
svg{display:block;width:100%;background:var(--back)}svg path,svg rect{fill:var(--mark)}
td svg{min-width:120px;max-width:400px;height:12px}
.ends{display:flex;justify-content:space-between}
"""


def page(
    streams: str, totals: Mapping[str, Any], report: Mapping[str, Table], window_s: float
) -> str:
    """Return the page: a plot of each stream's rates, bars of keys and shards, and all tables.

    window_s: the length of a window in seconds.
    """
    parts = [f"<h1>{html.escape(streams)}</h1>", as_totals(totals)]
    for queue in sorted({row["queue"] for row in report["rates"]}):
        windows = [
            (datetime.fromisoformat(row["begins"]).replace(tzinfo=UTC), row["rows_per_second"])
            for row in report["rates"]
            if row["queue"] == queue
        ]
        parts.append(f"<h2>{html.escape(queue)}: rows a second</h2>{plot(windows, window_s)}")
    names = [f"{row['queue']} {row['routing_key']}" for row in report["hot keys"]]
    parts.append(
        f"<h2>rows of the hot keys</h2>{bars(names, [row['rows'] for row in report['hot keys']])}"
    )
    names = [f"{row['queue']}/{row['shard']}" for row in report["shards"]]
    parts.append(
        f"<h2>rows of the shards</h2>{bars(names, [row['rows'] for row in report['shards']])}"
    )
    parts += [f"<h2>{html.escape(title)}</h2>{as_table(table)}" for title, table in report.items()]
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
    title = f"<title>{html.escape(streams)}</title>"
    return f"<!doctype html>{head}{title}<style>{STYLE}</style>{''.join(parts)}\n"


def as_totals(totals: Mapping[str, Any]) -> str:
    shown = (
        f"<div>{html.escape(name)}<b>{as_word(value)}</b></div>" for name, value in totals.items()
    )
    return f"<div class=total>{''.join(shown)}</div>"


def plot(windows: Sequence[tuple[datetime, float]], window_s: float) -> str:
    """Return a plot with a column for each window, and the times of its two ends below."""
    begin, end = windows[0][0].timestamp(), windows[-1][0].timestamp() + window_s
    top, scale = max(value for _, value in windows) or 1, PLOT_WIDTH / (end - begin)
    width = max(1.0, window_s * scale)
    columns = [
        (
            (begins.timestamp() - begin) * scale,
            value / top * PLOT_HEIGHT,
            f"{as_time(begins)}: {value:,g}",
        )
        for begins, value in windows
    ]
    last = as_time(datetime.fromtimestamp(end, UTC))
    ends = f"<span>{as_time(windows[0][0])}</span><span>{last}</span>"
    shown = f'<svg viewBox="0 0 {PLOT_WIDTH} {PLOT_HEIGHT}">{as_columns(columns, width)}</svg>'
    return f"<div class=ends><span>{top:,g} at most</span></div>{shown}<div class=ends>{ends}</div>"


def as_columns(columns: Sequence[tuple[float, float, str]], width: float) -> str:
    """Return the columns as rectangles with titles, or as one outline where there are many.

    One of many columns is narrower than a pixel, so nobody can point at it to see its title.
    """
    if len(columns) <= TITLED_MAX:
        return "".join(
            f'<rect x="{x:.1f}" y="{PLOT_HEIGHT - height:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}"><title>{html.escape(title)}</title></rect>'
            for x, height, title in columns
        )
    steps = "".join(
        f"M{x:.1f} {PLOT_HEIGHT}v-{height:.1f}h{width:.1f}v{height:.1f}z"
        for x, height, _ in columns
    )
    return f'<path d="{steps}"/>'


def bars(names: Iterable[str], values: Sequence[float]) -> str:
    top = max(values, default=0) or 1
    rows = (
        f'<tr><td class=name title="{html.escape(name)}">{html.escape(name)}'
        f"<td class=number>{as_word(value)}<td width=100%>"
        f'<svg viewBox="0 0 {BAR_WIDTH} 12" preserveAspectRatio="none">'
        f'<rect width="{value / top * BAR_WIDTH:.0f}" height="12"/></svg>'
        for name, value in zip(names, values, strict=True)
    )
    return f"<div class=wide><table>{''.join(rows)}</table></div>"


def as_table(table: Table) -> str:
    if not table:
        return "<p>nothing"
    kinds = [
        " class=number" if isinstance(value, int | float) else "" for value in table[0].values()
    ]
    head = "".join(
        f"<th{kind}>{html.escape(name)}" for name, kind in zip(table[0], kinds, strict=True)
    )
    body = (
        "<tr>"
        + "".join(
            f"<td{kind}>{as_word(value)}" for value, kind in zip(row.values(), kinds, strict=True)
        )
        for row in table
    )
    return f"<div class=wide><table><tr>{head}{''.join(body)}</table></div>"


def as_time(when: datetime) -> str:
    return str(when.replace(tzinfo=None))


def as_word(value: Any) -> str:
    if value is None:
        return "-"
    return html.escape(f"{value:,}" if isinstance(value, int | float) else str(value))
