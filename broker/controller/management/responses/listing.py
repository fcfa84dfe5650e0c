"""Long lists: filtered, sorted, cut to columns and pages by the query, as RabbitMQ's API does.

`shown` gives the rows of a page, or all rows, slice by slice. With 100,000 queues neither all rows
nor their text are in memory at a time.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Generic, TypeVar

from shardmq.broker.controller.management.api_error import ApiError, bad_request
from shardmq.broker.controller.management.numbers import NUMBER_MAX, number
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork
from shardmq.broker.controller.management.responses.matching import MATCHED_ROWS, BoundedSearch
from shardmq.broker.model import patterns

SLICE_ROWS = 60  # filtered or sorted before the processor is offered
MADE_ROWS = 20  # the same for rows to be made, each of which takes ten times as long
SAMPLED_ROWS = 1  # the same for rows with samples of the past, each of which has thousands
FEW_SHARE = 8  # the first rows, up to one in so many of all, are found without sorting all
PAGE_ROWS = 100
PAGE_ROWS_MAX = 500
REGEX_CHARS_MAX = 1_000

Row = dict[str, Any]
T = TypeVar("T")
Query = Mapping[str, str]
Keys = Callable[[list[T]], list[Any]]  # rework the sort keys of a list of things


@dataclass(slots=True)
class Listing:
    """Rows that cost little.

    `rows` may be a generator, but must not iterate over the catalog, which may change meanwhile.
    `searched` are the columns in which `name` of the query is searched for.
    """

    rows: Iterable[Row]
    searched: Sequence[str] = ("name",)


# Columns by which RabbitMQ sorts lists where the query names none; rows without `name` are
# permissions and limits.
NAMES = ("vhost", "name", "user", "exchange")


def by_name(rows: Iterable[Row]) -> Listing:
    """Return a listing of few rows in the order of their vhosts and names."""
    return Listing(sorted(rows, key=lambda row: [row.get(column, "") for column in NAMES]))


@dataclass(slots=True)
class LazyListing(Generic[T]):
    """Things with a `name` and a `vhost` whose full rows need numbers of other processes.

    `plain`: makes a row without these numbers. `columns` are the keys of such rows, `attributes`
    those of them that are comparable attributes of the thing.
    `collect`: collects the numbers of some things, or with None of all, and rework a function that
    makes full rows.
    `order`: the sort key of lists for which the query names no column; None: as they come.
    `keys`: rework what computes the sort keys of a column without rows, or None for a column that
    can only be sorted by its rows.
    `in_order`: rework the things in the order of `order`, where they are kept sorted.
    `totals`: as `collect`, for plain rows with only the numbers of messages (?disable_stats with
    ?enable_queue_totals).
    `check_samples`: raises ApiError if an answer with that many rows has too many samples. None if
    no samples are asked for.
    """

    things: Iterable[T]
    plain: Callable[[T], Row]
    columns: frozenset[str]
    attributes: frozenset[str]
    collect: Callable[[list[T] | None], Awaitable[Callable[[T], Row]]]
    order: Callable[[T], Any] | None = None
    keys: Callable[[str], Awaitable[Keys[T] | None]] | None = None
    in_order: Callable[[], Sequence[T]] | None = None
    totals: Callable[[list[T] | None], Awaitable[Callable[[T], Row]]] | None = None
    check_samples: Callable[[int], None] | None = None


def _any(thing: Any) -> bool:
    return True


async def shown(
    listing: Listing | LazyListing[Any], query: Query
) -> Row | AsyncIterator[list[Row]]:
    """Return the page that the query asks for, or all rows in slices.

    The `items` of a page are an iterator of slices, too.
    """
    wanted: Callable[[Any], Any] = _any
    is_wanted = _name_filter(query)
    if isinstance(listing, Listing):
        things, lazy = listing.rows, _LISTED
        if is_wanted is not None:
            wanted = partial(_is_found, is_wanted, listing.searched)
    else:
        things, lazy = listing.things, listing
        if is_wanted is not None:
            wanted = lambda thing: is_wanted(thing.name)  # noqa: E731
    if "page" in query:
        return await _page(lazy, things, wanted, query, SlicedWork())
    work = SlicedWork()
    if lazy.check_samples is not None:
        _, kept = await _kept(things, wanted, _pulled_rows(lazy, query), work)
        lazy.check_samples(sum(map(len, kept)))
        things, wanted = itertools.chain.from_iterable(kept), _any
    needed = {column.partition(".")[0] for column in columns_of(query)}
    row = lazy.plain if needed and needed <= lazy.columns else await _rows_of(lazy, query, None)
    return _all(lazy, things, wanted, row, query, work)


async def _rows_of(
    lazy: LazyListing[T], query: Query, things: list[T] | None
) -> Callable[[T], Row]:
    """Return what makes rows of these things, or with None of all, with the numbers asked for."""
    if query.get("disable_stats") != "true":
        return await lazy.collect(things)
    if query.get("enable_queue_totals") == "true" and lazy.totals is not None:
        return await lazy.totals(things)
    return lazy.plain


async def _all(
    lazy: LazyListing[T],
    things: Iterable[T],
    wanted: Callable[[T], Any],
    row: Callable[[T], Row],
    query: Query,
    work: SlicedWork,
) -> AsyncIterator[list[Row]]:
    if query.get("sort"):
        _, kept = await _kept(things, wanted, _pulled_rows(lazy, query), work)
        things, wanted = await _in_order(lazy, kept, query, work), _any
    async for part in _made(things, row, query, work, wanted):
        yield part


async def _made(
    things: Iterable[T],
    row: Callable[[T], Row],
    query: Query,
    work: SlicedWork,
    wanted: Callable[[T], Any] = _any,
) -> AsyncIterator[list[Row]]:
    """Yield the rows of the wanted things, slice by slice; a slice may be empty."""
    columns = columns_of(query)
    made_rows = SAMPLED_ROWS if _has_samples(query) else MADE_ROWS
    if wanted is not _any and _is_regex(query):
        made_rows = min(made_rows, MATCHED_ROWS)
    for _, part in _slices(things, slice_rows=made_rows):
        yield [_cut(row(thing), columns) for thing in part if wanted(thing)]
        await work.yield_to_others()


def _has_samples(query: Query) -> bool:
    return any(name.endswith("_age") for name in query)


def _pulled_rows(lazy: LazyListing[Any], query: Query) -> int:
    """Return how many things to filter in a slice: the rows of a Listing are made meanwhile."""
    if lazy is _LISTED and _has_samples(query):
        return SAMPLED_ROWS
    return MATCHED_ROWS if _is_regex(query) else SLICE_ROWS


def _is_regex(query: Query) -> bool:
    return bool(query.get("name")) and query.get("use_regex") == "true"


async def _page(
    lazy: LazyListing[T],
    things: Iterable[T],
    wanted: Callable[[T], Any],
    query: Query,
    work: SlicedWork,
) -> Row:
    page, size = _number(query, "page", 1), _number(query, "page_size", PAGE_ROWS)
    if page < 1 or not 1 <= size <= PAGE_ROWS_MAX:
        given = query.get("page_size", "undefined")
        reason = f"Invalid pagination parameters: page number {page}, page size {given}"
        raise ApiError(400, "invalid_pagination_parameters", reason)
    if lazy.in_order is not None and wanted is _any and not query.get("sort"):
        known = lazy.in_order()
        total = found = len(known)
        count = _page_count(found, page, size)
        begin, end = (page - 1) * size, page * size
        if query.get("sort_reverse") == "true":
            on_page = list(known[max(0, found - end) : found - begin])[::-1]
        else:
            on_page = list(known[begin:end])
    else:
        total, kept = await _kept(things, wanted, _pulled_rows(lazy, query), work)
        found = sum(map(len, kept))
        count = _page_count(found, page, size)
        on_page = []
        for seen, part in _slices(
            await _in_order(lazy, kept, query, work, page * size), page * size
        ):
            on_page += part[max(0, (page - 1) * size - (seen - len(part))) :]
            await work.yield_to_others()
    if lazy.check_samples is not None:
        lazy.check_samples(len(on_page))
    row = await _rows_of(lazy, query, on_page)
    return {
        "filtered_count": found,
        "item_count": len(on_page),
        "items": _made(on_page, row, query, work),
        "page": page,
        "page_count": count,
        "page_size": size,
        "total_count": total,
    }


def _page_count(found: int, page: int, size: int) -> int:
    count = -(-found // size)
    if page > max(1, count):
        reason = f"Page out of range, page: {page} page size: {size}, len: {found}"
        raise ApiError(400, "page_out_of_range", reason)
    return count


def _slices(
    things: Iterable[T], count: int | None = None, slice_rows: int | None = None
) -> Iterable[tuple[int, list[T]]]:
    """Yield slices, each with the number of things up to its end; in all at most `count` things."""
    rest, seen = itertools.islice(things, count), 0
    while part := list(itertools.islice(rest, slice_rows or SLICE_ROWS)):
        seen += len(part)
        yield seen, part


async def _kept(
    things: Iterable[T], wanted: Callable[[T], Any], slice_rows: int, work: SlicedWork
) -> tuple[int, list[list[T]]]:
    """Return the number of all things, and the wanted ones in slices of at most SLICE_ROWS."""
    total = 0
    kept: list[list[T]] = [[]]
    for seen, part in _slices(things, slice_rows=slice_rows):
        total = seen
        if len(kept[-1]) + len(part) > SLICE_ROWS:
            kept.append([])
        kept[-1] += part if wanted is _any else [thing for thing in part if wanted(thing)]
        await work.yield_to_others()
    return total, kept


async def _in_order(
    lazy: LazyListing[T],
    kept: list[list[T]],
    query: Query,
    work: SlicedWork,
    count: int | None = None,
) -> Iterable[T]:
    """Return all things, or at least the first `count`, in the order that the query asks for."""
    reverse = query.get("sort_reverse") == "true"
    keys = await _keys(lazy, query.get("sort", ""))
    if keys is None:
        parts = [part[::-1] for part in reversed(kept)] if reverse else kept
        return itertools.chain.from_iterable(parts)
    if count is not None and count * FEW_SHARE < sum(map(len, kept)):
        return await _first(kept, keys, count, query, work)
    runs = []
    for part in kept:
        made = await _computed(keys, part, query, work)
        runs.append(sorted(zip(made, part, strict=True), key=_KEY, reverse=reverse))
    return (thing for _, thing in heapq.merge(*runs, key=_KEY, reverse=reverse))


async def _first(
    kept: list[list[T]], keys: Keys[T], count: int, query: Query, work: SlicedWork
) -> list[T]:
    """Return the first `count` things: most others are dropped by one comparison."""
    reverse = query.get("sort_reverse") == "true"
    best: list[tuple[Any, T]] = []
    for part in kept:
        made = await _computed(keys, part, query, work)
        seen: Iterable[tuple[Any, T]] = zip(made, part, strict=True)
        if len(best) == count:
            bound = best[-1][0]
            seen = (
                [one for one in seen if one[0] > bound]
                if reverse
                else [one for one in seen if one[0] < bound]
            )
        if seen:
            best = sorted([*best, *seen], key=_KEY, reverse=reverse)[:count]
    return [thing for _, thing in best]


async def _computed(keys: Keys[T], part: list[T], query: Query, work: SlicedWork) -> list[Any]:
    """Return the sort keys of a slice. Keys of some columns are computed by making the rows."""
    found: list[Any] = []
    for _, some in _slices(part, slice_rows=SAMPLED_ROWS if _has_samples(query) else SLICE_ROWS):
        found += keys(some)
        await work.yield_to_others()
    return found


async def _keys(lazy: LazyListing[T], sort: str) -> Keys[T] | None:
    if not sort:
        return None if lazy.order is None else _each(lazy.order)
    if sort in lazy.attributes:
        return _each(attrgetter(sort))
    if lazy.keys is not None and (keys := await lazy.keys(sort)) is not None:
        return keys
    row = lazy.plain if sort.partition(".")[0] in lazy.columns else await lazy.collect(None)
    return lambda part: [_sort_key(_at(row(thing), sort)) for thing in part]


def _each(key: Callable[[T], Any]) -> Keys[T]:
    return lambda part: [*map(key, part)]


_KEY = itemgetter(0)


def _itself(row: Row) -> Row:
    return row


async def _nothing_to_collect(rows: list[Row] | None) -> Callable[[Row], Row]:
    return _itself


# How the rows of a Listing are made: they are there already.
_LISTED: LazyListing[Any] = LazyListing((), _itself, frozenset(), frozenset(), _nothing_to_collect)


def columns_of(query: Mapping[str, str]) -> list[str]:
    return [column for column in query.get("columns", "").split(",") if column]


def cut(row: Row, query: Mapping[str, str]) -> Row:
    """Return a single row, cut to the columns that the query asks for."""
    return _cut(row, columns_of(query))


def _name_filter(query: Mapping[str, str]) -> Callable[[str], Any] | None:
    name = query.get("name", "")
    if not name:
        return None
    if not _is_regex(query):
        part = name.lower()
        return lambda name: part in name.lower()
    try:
        pattern = patterns.compiled(name[:REGEX_CHARS_MAX], re.IGNORECASE)
    except patterns.BadPattern as error:
        raise bad_request(f"use_regex: {error}") from None
    return BoundedSearch(pattern, "use_regex")


def _is_found(is_wanted: Callable[[str], Any], searched: Sequence[str], row: Row) -> bool:
    """Return whether a text in one of the searched columns is wanted."""
    return any(is_wanted(str(_at(row, column) or "")) for column in searched)


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    return number(name, query[name], least=-NUMBER_MAX) if name in query else default


def _at(row: Row, path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _sort_key(value: Any) -> tuple[int, Any]:
    """Return a key by which any values compare: first None, then numbers, then the rest as text."""
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
