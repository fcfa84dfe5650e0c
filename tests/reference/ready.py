"""shardd/queues/order.pxi in plain Python: entries in order, and a way back to their places."""

from __future__ import annotations

from array import array

PLACE = ~15
EXPIRY = (1 << 56) - 1


class Ready:
    def __init__(self) -> None:
        self._entries: list[int] = []

    def __len__(self) -> int:
        return len(self._entries)

    def push_many(self, entries: array[int]) -> None:
        self._entries += entries

    def peek(self, most: int) -> array[int]:
        return array("Q", self._entries[: max(0, most)])

    def first(self) -> int:
        return self._entries[0] if self._entries else 0

    def drop(self, most: int) -> None:
        del self._entries[: max(0, most)]

    def take_all(self) -> array[int]:
        entries, self._entries = self._entries, []
        return array("Q", entries)

    def merge(self, entries: array[int]) -> None:
        self._entries = sorted([*self._entries, *entries], key=lambda entry: entry & PLACE)


def merged(a: array[int], b: array[int]) -> array[int]:
    return array("Q", sorted([*a, *b], key=lambda entry: entry & PLACE))


def marked(entries: array[int]) -> array[int]:
    return array("Q", [entry | 1 for entry in entries])


def same_mark(entries: array[int], start: int) -> int:
    stop = start
    while stop < len(entries) and entries[stop] & 1 == entries[start] & 1:
        stop += 1
    return stop


def total(sizes: array[int]) -> int:
    return sum(sizes)


def judge(
    entries: array[int],
    facts: array[int] | None,
    times: array[int] | None,
    now: int,
    ttl: int | None,
    levels: int,
) -> tuple[array[int], list[tuple[int, array[int]]]]:
    kept = array("Q")
    parts: dict[int, array[int]] = {}
    for i, entry in enumerate(entries):
        fact = facts[i] if facts is not None else 0
        published = times[i] if times is not None else now
        priority = min(fact >> 56, levels)
        expiry = fact & EXPIRY
        if ttl is not None:
            expiry = min(expiry or EXPIRY, published + ttl)
        if expiry:
            expiry = min(max(expiry, now), EXPIRY)
        kept.append(priority << 56 | expiry)
        parts.setdefault(priority, array("Q")).append(entry)
    return kept, sorted(parts.items())


def runs(
    entries: array[int], facts: array[int], before: int | None
) -> tuple[array[int], array[int]]:
    firsts, kept = array("Q"), array("Q")
    for entry, fact in zip(entries, facts, strict=True):
        if fact != before:
            firsts.append(entry & PLACE)
            kept.append(fact)
        before = fact
    return firsts, kept
