"""Pages and slices of a long list have the rows that plain code gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.broker.controller.management.api_error import ApiError
from shardmq.broker.controller.management.responses import listing, matching
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork
from shardmq.broker.controller.management.responses.listing import LazyListing, Listing, shown
from shardmq.broker.model import patterns


class Thing(NamedTuple):
    vhost: str
    name: str
    messages: int


class Asked(Exception):
    """Numbers of everything, though some would do."""


things = st.lists(
    st.builds(
        Thing, st.sampled_from("ab"), st.text("xyz", min_size=1, max_size=3), st.integers(0, 5)
    ),
    max_size=60,
)
sorts = st.sampled_from(["", "name", "vhost", "plain", "messages"])


def lazy(
    of: list[Thing], all_numbers: bool = True, kept_in_order: bool = False
) -> LazyListing[Thing]:
    def plain(thing: Thing) -> dict[str, Any]:
        return {"name": thing.name, "vhost": thing.vhost, "plain": len(thing.name)}

    async def look(some: list[Thing] | None) -> Callable[[Thing], dict[str, Any]]:
        if some is None and not all_numbers:
            raise Asked
        return lambda thing: {**plain(thing), "messages": thing.messages}

    columns = frozenset(("name", "vhost", "plain"))
    order = attrgetter("vhost", "name")
    in_order = (lambda: sorted(of, key=order)) if kept_in_order else None
    return LazyListing(
        of, plain, columns, frozenset(("name", "vhost")), look, order, in_order=in_order
    )


async def whole(what: Listing | LazyListing[Any], query: dict[str, str]) -> Any:
    found = await shown(what, query)
    if isinstance(found, dict):
        return {**found, "items": [row async for part in found["items"] for row in part]}
    return [row async for part in found for row in part]


def expected(
    of: list[Thing], sort: str, reverse: bool, name: str, is_page: bool
) -> list[tuple[str, str, int]]:
    kept = [thing for thing in of if name in thing.name]
    keys: dict[str, Callable[[Thing], Any]] = {
        "name": attrgetter("name"), "vhost": attrgetter("vhost"),
        "messages": attrgetter("messages"), "plain": lambda thing: len(thing.name),
        "": attrgetter("vhost", "name") if is_page else lambda thing: 0,
    }  # fmt: skip
    return [tuple(thing) for thing in sorted(kept, key=keys[sort], reverse=reverse)]


@settings(max_examples=200, deadline=None)
@given(
    things,
    sorts,
    st.booleans(),
    st.sampled_from(["", "x", "yz"]),
    st.integers(1, 9),
    st.integers(1, 7),
    st.booleans(),
)
def test_pages_joined_are_the_whole_list_in_order(
    of: list[Thing], sort: str, reverse: bool, name: str, size: int, slice_rows: int, kept: bool
) -> None:
    query = {
        "sort": sort,
        "sort_reverse": str(reverse).lower(),
        "name": name,
        "page_size": str(size),
    }
    if kept:  # what is kept in order has no equals
        of = list({(thing.vhost, thing.name): thing for thing in of}.values())

    async def pages() -> list[tuple[str, str, int]]:
        rows: list[Any] = []
        count = 1
        while len(rows) < count:
            page = await whole(lazy(of, kept_in_order=kept), {**query, "page": str(len(rows) + 1)})
            count = page["page_count"]
            assert page["total_count"] == len(of)
            rows.append(page["items"])
            assert page["item_count"] == len(rows[-1])
        return [(row["vhost"], row["name"], row["messages"]) for page in rows for row in page]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "SLICE_ROWS", slice_rows)
        assert asyncio.run(pages()) == expected(of, sort, reverse, name, True)


@settings(max_examples=200, deadline=None)
@given(
    things, sorts, st.booleans(), st.sampled_from(["", "x", "yz"]), st.integers(1, 7), st.booleans()
)
def test_a_list_in_slices_is_the_whole_list_in_order(
    of: list[Thing], sort: str, reverse: bool, name: str, slice_rows: int, is_lazy: bool
) -> None:
    query = {"sort": sort, "sort_reverse": str(reverse).lower(), "name": name}
    rows = [
        {"vhost": t.vhost, "name": t.name, "plain": len(t.name), "messages": t.messages} for t in of
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "SLICE_ROWS", slice_rows)
        found = asyncio.run(whole(lazy(of) if is_lazy else Listing(rows), query))
    assert [(row["vhost"], row["name"], row["messages"]) for row in found] == expected(
        of, sort, reverse and bool(sort), name, False
    )


@pytest.mark.parametrize("is_lazy", [True, False], ids=["lazy", "listing"])
@pytest.mark.parametrize("more", [{}, {"sort": "name"}, {"page": "1"}], ids=str)
async def test_a_search_is_done_in_slices_and_for_a_bounded_time(
    more: dict[str, str], is_lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Thing("a", f"x{number}", 0) for number in range(100)]
    rows = [thing._asdict() for thing in found]
    searched: list[int] = [0]
    now = 0.0

    class Slow:
        def search(self, name: str) -> None:
            nonlocal now
            searched[-1] += 1
            now += 0.025

    async def offer(work: SlicedWork) -> None:
        searched.append(0)

    monkeypatch.setattr(SlicedWork, "yield_to_others", offer)
    monkeypatch.setattr(patterns, "compiled", lambda *_: Slow())
    monkeypatch.setattr(
        listing, "BoundedSearch", partial(matching.BoundedSearch, clock=lambda: now)
    )
    query = {"name": "x", "use_regex": "true", **more}
    with pytest.raises(ApiError, match="use_regex: matching takes more than 2 s"):
        await whole(lazy(found) if is_lazy else Listing(rows), query)
    assert 80 <= sum(searched) <= 81 and max(searched) == matching.MATCHED_ROWS


@pytest.mark.parametrize("is_lazy", [True, False], ids=["lazy", "listing"])
@pytest.mark.parametrize("sort", ["", "messages"])
@pytest.mark.parametrize("page", [{}, {"page": "1"}, {"page": "2", "page_size": "3"}], ids=str)
async def test_each_row_with_samples_is_made_in_a_slice_of_its_own(
    page: dict[str, str], sort: str, is_lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_max = 0

    def row(thing: Thing) -> dict[str, Any]:
        nonlocal made, made_max
        made += 1
        made_max = max(made_max, made)
        return {"name": thing.name, "vhost": thing.vhost, "messages": thing.messages}

    async def collect(some: list[Thing] | None) -> Callable[[Thing], dict[str, Any]]:
        return row

    async def yield_to_others(work: SlicedWork) -> None:
        nonlocal made
        made = 0

    monkeypatch.setattr(SlicedWork, "yield_to_others", yield_to_others)
    many = [Thing("a", f"q{i:02}", 99 - i) for i in range(30)]
    names = frozenset(("name",))
    what = LazyListing(many, row, names, names, collect) if is_lazy else Listing(map(row, many))
    found = await whole(what, {**page, "sort": sort, "lengths_age": "60", "lengths_incr": "5"})
    assert len(found["items"] if page else found) == int(page.get("page_size", 30))
    assert made_max == 1


@pytest.mark.parametrize("name", ["", "q1"])
async def test_rows_with_too_many_samples_are_refused_before_any_is_made(name: str) -> None:
    counted = []

    def check_samples(rows: int) -> None:
        counted.append(rows)
        if rows > 5:
            raise ApiError(400, "bad_request", "too many")

    many = [Thing("a", f"q{i}", i) for i in range(20)]
    what = lazy(many, all_numbers=False)
    what.check_samples = check_samples
    assert len((await whole(what, {"page": "2", "page_size": "5", "name": name}))["items"]) == 5
    for query in ({}, {"page": "1", "page_size": "6"}):
        with pytest.raises(ApiError):
            await whole(what, {**query, "name": name})
    assert counted == [5, 11 if name else 20, 6]


@pytest.mark.parametrize("sort", ["", "name", "vhost", "plain"])
async def test_a_page_asks_only_for_the_numbers_it_shows(sort: str) -> None:
    many = [Thing("a", f"q{i}", i) for i in range(50)]
    page = await whole(
        lazy(many, all_numbers=False), {"page": "2", "page_size": "10", "sort": sort}
    )
    assert len(page["items"]) == 10
    assert "messages" in page["items"][0]


@pytest.mark.row("G4.7")
async def test_who_wants_no_numbers_waits_for_none() -> None:
    many = [Thing("a", "q", 1)]
    assert await whole(lazy(many, all_numbers=False), {"columns": "name,vhost"}) == [
        {"name": "q", "vhost": "a"}
    ]
    (row,) = await whole(lazy(many, all_numbers=False), {"disable_stats": "true"})
    assert "messages" not in row
    with pytest.raises(Asked):
        await whole(lazy(many, all_numbers=False), {})


@pytest.mark.parametrize(
    "query",
    [
        {"page": "0"},
        {"page": "2"},
        {"page": "x"},
        {"page": "1", "page_size": "501"},
        {"page": "-1"},
        {"page": "1" * 5000},
        {"name": "(", "use_regex": "true"},
    ],
)
async def test_what_cannot_be_a_page_is_400(query: dict[str, str]) -> None:
    with pytest.raises(ApiError) as refused:
        await whole(lazy([Thing("a", "q", 1)]), query)
    assert refused.value.status == 400


@pytest.mark.row("G1.11")
@pytest.mark.parametrize(
    ("query", "error", "reason"),
    [
        (
            "page=4&page_size=3",
            "page_out_of_range",
            "Page out of range, page: 4 page size: 3, len: 7",
        ),
        ("page=0&page_size=3", "invalid_pagination_parameters", "page number 0, page size 3"),
        ("page=-1", "invalid_pagination_parameters", "page number -1, page size undefined"),
        ("page=1&page_size=0", "invalid_pagination_parameters", "page number 1, page size 0"),
        ("page=1&page_size=501", "invalid_pagination_parameters", "page number 1, page size 501"),
    ],
    ids=["behind-the-last", "zeroth", "negative", "no-rows", "too-many-rows"],
)
async def test_pages_that_cannot_be_are_refused_in_rabbitmqs_words(
    query: str, error: str, reason: str
) -> None:
    rows = [{"vhost": "/", "name": f"q{number}"} for number in range(7)]
    with pytest.raises(ApiError) as refused:
        await whole(Listing(rows), dict(part.split("=") for part in query.split("&")))
    said = reason if reason.startswith("Page") else f"Invalid pagination parameters: {reason}"
    assert (refused.value.status, refused.value.error, refused.value.reason) == (400, error, said)


@pytest.mark.row("G1.11")
async def test_the_first_page_of_nothing_is_none_of_no_pages() -> None:
    page = await whole(Listing([{"name": "q"}]), {"page": "1", "name": "none"})
    assert (page["page"], page["page_count"], page["items"]) == (1, 0, [])
    assert (page["filtered_count"], page["total_count"]) == (0, 1)
