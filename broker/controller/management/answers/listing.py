"""Long lists: filtered, sorted, cut to columns and pages by the query, as RabbitMQ's API does; always in slices.

`shown` gives a page, or the rows slice by slice: of 100,000 queues neither the rows nor their text are there at once.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, Generic, TypeVar

from shardmq.broker.controller.management.answers.turns import Turns
from shardmq.broker.controller.management.call import NUMBER_MAX, ApiError, bad_request, number
from shardmq.broker.model import patterns

SLICE_ROWS = 60  # looked at, or put in order, before others have a turn
MADE_ROWS = 20  # and made, which takes ten times as long
FEW_SHARE = 8  # one page of so many, or the ones before it, is found without sorting all
PAGE_ROWS = 100
PAGE_ROWS_MAX = 500
REGEX_CHARS_MAX = 1_000

Row = dict[str, Any]
T = TypeVar("T")
Query = Mapping[str, str]
Keys = Callable[[list[T]], list[Any]]  # what to sort each of some things by


@dataclass(slots=True)
class Listing:
    """`rows` may be lazy, but must stand on its own: the catalog changes while it is read."""

    rows: Iterable[Row]


@dataclass(slots=True)
class Lazy(Generic[T]):
    """Things, with a `name` and a `vhost`, whose full row costs: numbers that others must be asked for.

    `plain`: the row without them, of which `columns` are the keys and `attributes` those that are the thing's own and
    can be compared. `order`: the one of pages that were asked for without one; None: as they are.
    `look`: asks for the numbers of some things, or (None) of all, and gives what makes full rows of them.
    `totals`: as `look`, for plain rows with nothing but how much there is (?disable_stats and ?enable_queue_totals).
    `keys`: what sorts by a column, without rows; None: it is not known there, rows must be made.
    `in_order`: the things as `order` has them, where somebody keeps them so.
    """

    things: Iterable[T]
    plain: Callable[[T], Row]
    columns: frozenset[str]
    attributes: frozenset[str]
    look: Callable[[list[T] | None], Awaitable[Callable[[T], Row]]]
    order: Callable[[T], Any] | None = None
    keys: Callable[[str], Awaitable[Keys[T] | None]] | None = None
    in_order: Callable[[], Sequence[T]] | None = None
    totals: Callable[[list[T] | None], Awaitable[Callable[[T], Row]]] | None = None


async def shown(listing: Listing | Lazy[Any], query: Query) -> Row | AsyncIterator[list[Row]]:
    """The page that was asked for, or all rows in slices."""
    name: Callable[[Any], str] = attrgetter("name")
    if isinstance(listing, Listing):
        things, name, lazy = listing.rows, _name_of_row, _LISTED
    else:
        things, lazy = listing.things, listing
    by_name = _name_filter(query)
    wanted: Callable[[Any], Any] = _any if by_name is None else lambda thing: by_name(name(thing))
    if "page" in query:
        return await _page(lazy, things, wanted, query, Turns())
    return _all(lazy, things, wanted, await _row(lazy, query), query, Turns())


async def _row(lazy: Lazy[T], query: Query) -> Callable[[T], Row]:
    needed = {column.partition(".")[0] for column in columns_of(query)}
    return lazy.plain if needed and needed <= lazy.columns else await _looked(lazy, query, None)


async def _looked(lazy: Lazy[T], query: Query, things: list[T] | None) -> Callable[[T], Row]:
    """What makes rows of these things, or (None) of all, as full as the query wants them."""
    if query.get("disable_stats") != "true":
        return await lazy.look(things)
    if query.get("enable_queue_totals") == "true" and lazy.totals is not None:
        return await lazy.totals(things)
    return lazy.plain


async def _all(
    lazy: Lazy[T],
    things: Iterable[T],
    wanted: Callable[[T], Any],
    row: Callable[[T], Row],
    query: Query,
    turns: Turns,
) -> AsyncIterator[list[Row]]:
    columns = columns_of(query)
    if query.get("sort"):
        _, kept = await _kept(things, wanted, turns)
        things, wanted = await _in_order(lazy, kept, query, turns), _any
    for _, part in _slices(filter(wanted, things), slice_rows=MADE_ROWS):
        yield [_cut(row(thing), columns) for thing in part]
        await turns.others_first()


async def _page(
    lazy: Lazy[T], things: Iterable[T], wanted: Callable[[T], Any], query: Query, turns: Turns
) -> Row:
    page, size = _number(query, "page", 1), _number(query, "page_size", PAGE_ROWS)
    if not 1 <= size <= PAGE_ROWS_MAX:
        raise bad_request(f"page_size: 1 to {PAGE_ROWS_MAX}")
    if lazy.in_order is not None and wanted is _any and not query.get("sort"):
        known = lazy.in_order()
        total = found = len(known)
        count = _page_count(found, page, size)
        on_page = _cut_out(known, page, size, query.get("sort_reverse") == "true")
    else:
        total, kept = await _kept(things, wanted, turns)
        found = sum(map(len, kept))
        count = _page_count(found, page, size)
        on_page = []
        for seen, part in _slices(
            await _in_order(lazy, kept, query, turns, page * size), page * size
        ):
            on_page += part[max(0, (page - 1) * size - (seen - len(part))) :]
            await turns.others_first()
    row = await _looked(lazy, query, on_page)
    columns = columns_of(query)
    items = [_cut(row(thing), columns) for thing in on_page]
    await turns.others_first()
    return {
        "filtered_count": found,
        "item_count": len(items),
        "items": items,
        "page": page,
        "page_count": count,
        "page_size": size,
        "total_count": total,
    }


def _page_count(found: int, page: int, size: int) -> int:
    count = max(1, -(-found // size))
    if not 1 <= page <= count:
        raise ApiError(
            400, "page_out_of_range", f"page out of range, page: {page} page size: {size}"
        )
    return count


def _cut_out(known: Sequence[T], page: int, size: int, reverse: bool) -> list[T]:
    begin, end = (page - 1) * size, page * size
    if not reverse:
        return list(known[begin:end])
    return list(known[max(0, len(known) - end) : len(known) - begin])[::-1]


def _slices(
    things: Iterable[T], count: int | None = None, slice_rows: int | None = None
) -> Iterable[tuple[int, list[T]]]:
    """Some at a time: how many there were with them, and they; `count`: no more than so many."""
    rest, seen = itertools.islice(things, count), 0
    while part := list(itertools.islice(rest, slice_rows or SLICE_ROWS)):
        seen += len(part)
        yield seen, part


async def _kept(
    things: Iterable[T], wanted: Callable[[T], Any], turns: Turns
) -> tuple[int, list[list[T]]]:
    """How many there are, and those that are wanted, in slices."""
    total, kept = 0, []
    for seen, part in _slices(things):
        total = seen
        kept.append(part if wanted is _any else [thing for thing in part if wanted(thing)])
        await turns.others_first()
    return total, kept


async def _in_order(
    lazy: Lazy[T], kept: list[list[T]], query: Query, turns: Turns, count: int | None = None
) -> Iterable[T]:
    """Sorted, the first `count` at least. Without a column: queues by their names, rows as they are."""
    reverse = query.get("sort_reverse") == "true"
    keys = await _keys(lazy, query.get("sort", ""))
    if keys is None:
        parts = [part[::-1] for part in reversed(kept)] if reverse else kept
        return itertools.chain.from_iterable(parts)
    if count is not None and count * FEW_SHARE < sum(map(len, kept)):
        return await _first(kept, keys, count, reverse, turns)
    runs = []
    for part in kept:
        runs.append(sorted(zip(keys(part), part, strict=True), key=_FIRST, reverse=reverse))
        await turns.others_first()
    return (thing for _, thing in heapq.merge(*runs, key=_FIRST, reverse=reverse))


async def _first(
    kept: list[list[T]], keys: Keys[T], count: int, reverse: bool, turns: Turns
) -> list[T]:
    """Where few are wanted of many: most are dropped at the first look."""
    best: list[tuple[Any, T]] = []
    for part in kept:
        seen: Iterable[tuple[Any, T]] = zip(keys(part), part, strict=True)
        if len(best) == count:
            bound = best[-1][0]
            seen = (
                [one for one in seen if one[0] > bound]
                if reverse
                else [one for one in seen if one[0] < bound]
            )
        if seen:
            best = sorted([*best, *seen], key=_FIRST, reverse=reverse)[:count]
        await turns.others_first()
    return [thing for _, thing in best]


async def _keys(lazy: Lazy[T], sort: str) -> Keys[T] | None:
    if not sort:
        return None if lazy.order is None else _each(lazy.order)
    if sort in lazy.attributes:
        return _each(attrgetter(sort))
    if lazy.keys is not None and (keys := await lazy.keys(sort)) is not None:
        return keys
    row = lazy.plain if sort.partition(".")[0] in lazy.columns else await lazy.look(None)
    return lambda part: [_sort_key(_at(row(thing), sort)) for thing in part]


def _each(key: Callable[[T], Any]) -> Keys[T]:
    return lambda part: [*map(key, part)]


_FIRST = itemgetter(0)


def _any(thing: Any) -> bool:
    return True


def _name_of_row(row: Row) -> str:
    return str(row.get("name", ""))


def _itself(row: Row) -> Row:
    return row


async def _listed(rows: list[Row] | None) -> Callable[[Row], Row]:
    return _itself


# Rows that are there as they are.
_LISTED: Lazy[Any] = Lazy((), _itself, frozenset(), frozenset(), _listed)


def columns_of(query: Mapping[str, str]) -> list[str]:
    return [column for column in query.get("columns", "").split(",") if column]


def cut(row: Row, query: Mapping[str, str]) -> Row:
    """One thing's row, to the columns that were asked for."""
    return _cut(row, columns_of(query))


def _name_filter(query: Mapping[str, str]) -> Callable[[str], Any] | None:
    name = query.get("name", "")
    if not name:
        return None
    if query.get("use_regex") != "true":
        part = name.lower()
        return lambda name: part in name.lower()
    try:
        pattern = patterns.compiled(name[:REGEX_CHARS_MAX], re.IGNORECASE)
    except patterns.BadPattern as error:
        raise bad_request(f"use_regex: {error}") from None
    return pattern.search


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    return number(name, query[name], least=-NUMBER_MAX) if name in query else default


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
