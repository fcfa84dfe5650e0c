"""How far imports of definitions are. Holds numbers, does nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

REMEMBERED_MAX = 20


@dataclass(slots=True)
class Import:
    """`total` things to make, 0 until the document is read; times in seconds since 1970, `ended_at` 0 till then."""

    id: int
    user: str
    vhost: str | None
    begun_at: float
    state: str = "reading"  # then "running", and "done" or "failed: why"
    done: int = 0
    total: int = 0
    ended_at: float = 0.0
    warnings: list[str] = field(default_factory=list)  # what of it has no effect here


class Imports:
    """The last ones, the newest first."""

    def __init__(self) -> None:
        self._count = 0
        self._last: deque[Import] = deque(maxlen=REMEMBERED_MAX)

    def begin(self, user: str, vhost: str | None, now: float) -> Import:
        self._count += 1
        self._last.appendleft(Import(self._count, user, vhost, now))
        return self._last[0]

    def rows(self) -> list[dict[str, Any]]:
        return [asdict(each) for each in self._last]
