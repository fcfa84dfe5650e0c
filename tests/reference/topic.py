"""Topic patterns, slow and obvious: the twin of broker/routing/topic.pyx."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


def words(text: str) -> list[str]:
    return text.split(".") if text else []


def matches(pattern: list[str], key: list[str]) -> bool:
    if not pattern:
        return not key
    if pattern[0] == "#":
        return any(matches(pattern[1:], key[skipped:]) for skipped in range(len(key) + 1))
    return bool(key) and pattern[0] in ("*", key[0]) and matches(pattern[1:], key[1:])


class TopicTrie:
    def __init__(self) -> None:
        self.added: Counter[tuple[str, Hashable]] = Counter()

    def add(self, pattern: str, target: Hashable) -> None:
        self.added[pattern, target] += 1

    def remove(self, pattern: str, target: Hashable) -> None:
        if not self.added[pattern, target]:
            raise KeyError(pattern)
        self.added[pattern, target] -= 1

    def match(self, key: str) -> set[Hashable]:
        return {
            target
            for (pattern, target), times in self.added.items()
            if times and matches(words(pattern), words(key))
        }
