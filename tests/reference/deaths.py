"""x-death as RabbitMQ's rule says it, on headers as Python values: slow and obvious."""

from __future__ import annotations

import datetime
from typing import Any


def headers_after(
    headers: dict[str, Any],
    expiration: str | None,
    *,
    queue: str,
    reason: str,
    time_s: int,
    exchange: str,
    key: str,
    without_cc: bool,
) -> dict[str, Any]:
    after = {
        k: v
        for k, v in headers.items()
        if k not in ("x-dead-letter-exchange", "x-dead-letter-routing-key")
    }
    said = after.get("x-death")
    tables = grouped(said) if isinstance(said, list) else []
    same = [
        t
        for t in tables
        if isinstance(t, dict) and (t.get("queue"), t.get("reason")) == (queue, reason)
    ]
    others = [t for t in tables if not same or t is not same[0]]
    cc = after.get("CC")
    death = {
        "queue": queue,
        "reason": reason,
        "exchange": exchange,
        "routing-keys": [
            key,
            *([k for k in cc if isinstance(k, str)] if isinstance(cc, list) else []),
        ],
        "time": datetime.datetime.fromtimestamp(time_s, datetime.UTC),
        "count": 1,
    }
    if expiration is not None:
        death["original-expiration"] = expiration
    if same:
        count = same[0].get("count")
        known = type(count) is int and 0 < count < 1 << 62
        death = same[0] | {"count": count + 1 if known else 1}
    after["x-death"] = [death, *others]
    place = {"queue": queue, "reason": reason, "exchange": exchange}
    if not isinstance(said, list):
        after |= {f"x-first-death-{name}": value for name, value in place.items()}
    after |= {f"x-last-death-{name}": value for name, value in place.items()}
    if without_cc:
        after.pop("CC", None)
        after.pop("BCC", None)
    return after


def grouped(tables: list[Any]) -> list[Any]:
    """Join the entries of each queue and reason.

    Their number becomes the count, unless the first has a count. An entry that is alone stays.
    """
    if len(tables) == 1:
        return tables
    kept: list[Any] = []
    for table in tables:
        alike = [
            t
            for t in tables
            if isinstance(t, dict) and isinstance(table, dict) and place_of(t) == place_of(table)
        ]
        if not alike:
            kept.append(table)
        elif alike[0] is table:
            kept.append({"count": len(alike), **table})
    return kept


def place_of(table: dict[str, Any]) -> tuple[Any, Any]:
    return table.get("queue"), table.get("reason")


def comes_round(queue: str, deaths: list[tuple[str, str]]) -> bool:
    """Up to the last time it left this queue nobody rejected it."""
    names = [name for name, _ in deaths]
    if queue not in names:
        return False
    return all(reason != "rejected" for _, reason in deaths[: names.index(queue) + 1])
