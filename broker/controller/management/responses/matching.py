"""Matching names by the regular expression of a call, for a few seconds at most."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from shardmq.broker.controller.management.api_error import bad_request
from shardmq.broker.model.patterns import Pattern

MATCH_S_MAX: Final = 2.0  # in one call; a harmless expression takes 0.2 s for 100,000 names
MATCHED_ROWS: Final = 10  # matched before the processor is offered


class BoundedSearch:
    """An expression that may be matched for MATCH_S_MAX in all."""

    def __init__(
        self, pattern: Pattern, parameter: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Begin with all the time left. `parameter` of the query has the expression."""
        self._pattern = pattern
        self._parameter = parameter
        self._clock = clock
        self._left_s = MATCH_S_MAX

    def __call__(self, name: str) -> object | None:
        """Return something if the expression matches anywhere in the name, else None.

        Raises ApiError with 400 when the time is used up.
        """
        begun = self._clock()
        found = self._pattern.search(name)
        self._left_s -= self._clock() - begun
        if self._left_s < 0:
            raise bad_request(
                f"{self._parameter}: matching takes more than {MATCH_S_MAX:g} s; "
                "use a simpler expression"
            )
        return found
