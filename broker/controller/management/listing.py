"""Long lists: made in slices, then filtered, sorted, cut to columns and pages by the query, as RabbitMQ's API does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from broker.controller.management.call import ApiError, bad_request

SLICE_ROWS = 1_000  # rows between two turns of the event loop
PAGE_ROWS = 100
PAGE_ROWS_MAX = 500
REGEX_CHARS_MAX = 1_000

Row = dict[str, Any]


@dataclass(slots=True)
class Listing:
    """`rows` may be lazy, but must stand on its own: the catalog changes while it is read."""

    rows: Iterable[Row]


async def shown(listing: Listing, query: Mapping[str, str]) -> Any:
    """Rows, or the page of them that was asked for."""
    wanted = _name_filter(query)
    rows: list[Row] = []
    total = 0
    for row in listing.rows:
        total += 1
        if wanted(row):
            rows.append(row)
        if total % SLICE_ROWS == 0:
            await asyncio.sleep(0)
    if sort := query.get("sort"):
        rows.sort(key=lambda row: _sort_key(_at(row, sort)), reverse=query.get("sort_reverse") == "true")
    columns = columns_of(query)
    if "page" in query:
        return _page(rows, total, columns, query)
    return [_cut(row, columns) for row in rows] if columns else rows


def columns_of(query: Mapping[str, str]) -> list[str]:
    return [column for column in query.get("columns", "").split(",") if column]


def cut(row: Row, query: Mapping[str, str]) -> Row:
    """One thing's row, to the columns that were asked for."""
    return _cut(row, columns_of(query))


def _name_filter(query: Mapping[str, str]) -> Callable[[Row], bool]:
    name = query.get("name", "")
    if not name:
        return lambda row: True
    if query.get("use_regex") != "true":
        return lambda row: name.lower() in str(row.get("name", "")).lower()
    try:
        pattern = re.compile(name[:REGEX_CHARS_MAX], re.IGNORECASE)
    except re.error as error:
        raise bad_request(f"use_regex: {error}") from None
    return lambda row: pattern.search(str(row.get("name", ""))) is not None


def _page(rows: list[Row], total: int, columns: list[str], query: Mapping[str, str]) -> Row:
    page, size = _number(query, "page", 1), _number(query, "page_size", PAGE_ROWS)
    if not 1 <= size <= PAGE_ROWS_MAX:
        raise bad_request(f"page_size: 1 to {PAGE_ROWS_MAX}")
    count = max(1, -(-len(rows) // size))
    if not 1 <= page <= count:
        raise ApiError(400, "page_out_of_range", f"page out of range, page: {page} page size: {size}")
    items = [_cut(row, columns) for row in rows[(page - 1) * size : page * size]]
    return {
        "filtered_count": len(rows),
        "item_count": len(items),
        "items": items,
        "page": page,
        "page_count": count,
        "page_size": size,
        "total_count": total,
    }


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(query.get(name, default))
    except ValueError:
        raise bad_request(f"{name}: not a number") from None


def _at(row: Row, path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _sort_key(value: Any) -> tuple[int, Any]:
    """Anything can be compared with anything: absent, numbers, the rest as text."""
    if value is None:
        return (0, 0)
    if isinstance(value, int | float):
        return (1, value)
    return (2, str(value))


def _cut(row: Row, columns: list[str]) -> Row:
    if not columns:
        return row
    cut: Row = {}
    for column in columns:
        value = _at(row, column)
        if value is None:
            continue
        *parents, last = column.split(".")
        place = cut
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return cut
