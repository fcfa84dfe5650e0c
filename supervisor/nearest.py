"""Find the name that somebody meant who wrote a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NEAR = 0.75  # A name is near another if difflib finds at least this part of it the same.
# Names that are longer have no near ones. The time of difflib grows with the square of the length.
GIVEN_CHARS_MAX = 100


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Return "; did you mean NAME?" with the nearest of the names, or "" if none is near.

    A single name counts as near in any case. A call takes up to a millisecond for 50 names, so a
    caller whose input has many unknown names asks for the first few alone.
    """
    if len(given) > GIVEN_CHARS_MAX:
        return ""
    candidates = list(names)
    if len(candidates) == 1:
        return f"; did you mean {candidates[0]}?"
    near = difflib.get_close_matches(given, candidates, n=1, cutoff=NEAR)
    return f"; did you mean {near[0]}?" if near else ""
