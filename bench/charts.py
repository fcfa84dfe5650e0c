"""Draw charts as SVG from numbers alone: lines over a logarithmic or named axis, and bars.

    lines(title, {"series": {x: y}}, ...)     bars(title, {"series": {"row": value}}, ...)

Both return the text of an SVG. A missing value leaves a gap, not a zero. The ground is white, so
that a chart reads the same in a dark page. This module knows nothing of brokers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from html import escape

Series = dict[str, dict[str, float]]

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8e6c8a", "#c98600")
WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 82, 20, 62, 50
ROW = 16
NAMES_WIDTH = 150
FONT = "font-family='sans-serif' font-size='12'"


def short(value: float) -> str:
    """Return a number in short form: 1,500,000 as 1.5M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' {more}>{escape(words)}</text>"


def document(title: str, about: str, height: float, parts: Iterable[str]) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height:.0f}' "
        f"viewBox='0 0 {WIDTH} {height:.0f}' {FONT} fill='#222'>"
        f"<rect width='100%' height='100%' fill='white'/>"
    )
    lines = [
        head,
        text(12, 20, title, more="font-size='15' font-weight='bold'"),
        text(12, 37, about, more="fill='#666'"),
    ]
    return "\n".join([*lines, *parts, "</svg>\n"])


def legend(names: Iterable[str], y: float) -> list[str]:
    parts, x = [], float(LEFT)
    for at, name in enumerate(names):
        parts.append(
            f"<rect x='{x}' y='{y - 9}' width='10' height='10'"
            f" fill='{COLOURS[at % len(COLOURS)]}'/>"
        )
        parts.append(text(x + 14, y, name))
        x += 34 + 6.6 * len(name)
    return parts


def scale(
    values: list[float], start: float, end: float, from_zero: bool
) -> tuple[Callable[[float], float], list[float]]:
    """Return a function from values to positions, and the values of the grid lines.

    The scale is linear from zero, or logarithmic over whole decades.
    """
    if from_zero:
        top = max(values)
        step = 10 ** math.floor(math.log10(top))
        step = next(step * part for part in (0.2, 0.5, 1, 2) if top / (step * part) <= 6)
        count = math.ceil(top / step)
        return lambda value: start + (end - start) * value / (count * step), [
            step * at for at in range(count + 1)
        ]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    return (
        lambda value: start + (end - start) * (math.log10(value) - low) / (high - low),
        [10.0**power for power in range(low, high + 1)],
    )


def lines(
    title: str, series: Series, about: str = "", x_title: str = "", from_zero: bool = False
) -> str:
    """Draw a line for each series; the x axis has the names of the points at equal distances."""
    points = list(dict.fromkeys(x for line in series.values() for x in line))
    values = [value for line in series.values() for value in line.values() if value > 0]
    if not values:
        return document(title, "nothing was measured", 60, [])
    place, grid = scale(values, HEIGHT - BOTTOM, TOP + 12, from_zero)
    step = (WIDTH - LEFT - RIGHT) / max(1, len(points))
    xs = {point: LEFT + step * (at + 0.5) for at, point in enumerate(points)}
    parts = legend(series, TOP - 8)
    for value in grid:
        y = place(value)
        parts.append(
            f"<line x1='{LEFT}' y1='{y:.1f}' x2='{WIDTH - RIGHT}' y2='{y:.1f}' stroke='#ddd'/>"
        )
        parts.append(text(LEFT - 8, y + 4, short(value), "end"))
    parts += [text(x, HEIGHT - BOTTOM + 18, point, "middle") for point, x in xs.items()]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_title, "middle", "fill='#666'"))
    for at, line in enumerate(series.values()):
        colour = COLOURS[at % len(COLOURS)]
        dots = [(xs[x], place(value), value) for x, value in line.items() if value > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in dots)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>")
        for x, y, value in dots:
            parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{colour}'/>")
            parts.append(text(x, y - 8, short(value), "middle", f"fill='{colour}' font-size='11'"))
    return document(title, about, HEIGHT, parts)


def bars(title: str, series: Series, about: str = "") -> str:
    """Draw a group of bars for each row, one bar for each series.

    The scale is logarithmic, because the compared values differ by decades.
    """
    rows = list(dict.fromkeys(row for bar in series.values() for row in bar))
    values = [value for bar in series.values() for value in bar.values() if value > 0]
    if not values:
        return document(title, "nothing was measured", 60, [])
    group = ROW * len(series) + 8
    bottom = TOP + group * len(rows)
    place, grid = scale(values, NAMES_WIDTH, WIDTH - 60, from_zero=False)
    parts = legend(series, TOP - 8)
    for value in grid:
        x = place(value)
        parts.append(f"<line x1='{x:.1f}' y1='{TOP}' x2='{x:.1f}' y2='{bottom}' stroke='#ddd'/>")
        parts.append(text(x, bottom + 18, short(value), "middle"))
    for at, row in enumerate(rows):
        top = TOP + group * at + 4
        parts.append(text(NAMES_WIDTH - 8, top + group / 2, row, "end"))
        for index, bar in enumerate(series.values()):
            if (value := bar.get(row, 0)) <= 0:
                continue
            y, width = top + ROW * index, max(1.0, place(value) - NAMES_WIDTH)
            colour = COLOURS[index % len(COLOURS)]
            parts.append(
                f"<rect x='{NAMES_WIDTH}' y='{y}' width='{width:.1f}' height='{ROW - 3}'"
                f" fill='{colour}'/>"
            )
            parts.append(
                text(NAMES_WIDTH + width + 4, y + ROW - 5, short(value), more="font-size='11'")
            )
    return document(title, about, bottom + 34, parts)
