"""The progress of imports of definitions."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

REMEMBERED_MAX = 20


@dataclass(slots=True)
class Import:
    """The progress of an import. Times are seconds since 1970; `ended_at` is 0 while it runs."""

    id: int
    user: str
    vhost: str | None
    begun_at: float
    state: str = "reading"  # then "running", and "done" or "failed: why"
    done: int = 0  # things of the document that are made
    total: int = 0  # things in the document, 0 until it is read
    ended_at: float = 0.0
    warnings: list[str] = field(default_factory=list)  # about things that have no effect here


class Imports:
    """The last REMEMBERED_MAX imports, the newest first."""

    def __init__(self) -> None:
        self._count = 0
        self._last: deque[Import] = deque(maxlen=REMEMBERED_MAX)

    def begin(self, user: str, vhost: str | None, now: float) -> Import:
        self._count += 1
        self._last.appendleft(Import(self._count, user, vhost, now))
        return self._last[0]

    def rows(self) -> list[dict[str, Any]]:
        return [asdict(each) for each in self._last]
