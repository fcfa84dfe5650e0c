"""Regular expressions of policies, permissions and searches, matched in bounded time. Pure.

Python's matcher backtracks: for some names of 40 characters `(a+)+$` takes longer than the universe
lasts, and everybody waits. An expression that may be of that sort (a repetition within a
repetition, or several repetitions in a row) is matched by RE2, whose time grows with the length of
the name times that of the expression. Such an expression is refused if RE2 does not know what it
has: references to groups, lookarounds. RE2 takes `$` for the end of the text alone, and knows
digits and word characters of ASCII alone, as RabbitMQ does. All other expressions are left to
Python, because policies of RabbitMQ often have lookaheads.
"""

from __future__ import annotations

import re
import re._constants as kind  # type: ignore[import-not-found] # of the parser beside it
import re._parser as parser  # type: ignore[import-not-found] # what it reads is what re matches
from collections.abc import Iterable
from typing import Any, Protocol

# How many ways Python's matcher may have to try from one character on. A repetition has one way for
# each of its lengths.
WAYS_MAX = 1 << 16
NAME_CHARS = 255

_REPEATS = (kind.MAX_REPEAT, kind.MIN_REPEAT)


class BadPattern(ValueError):
    """The expression is malformed, or cannot be matched in bounded time.

    msg: why. pos: where in the expression, or 0.
    """

    def __init__(self, msg: str, pos: int = 0, text: str = "") -> None:
        super().__init__(text or msg)
        self.msg = msg
        self.pos = pos


class Pattern(Protocol):
    """A compiled expression."""

    def search(self, string: str, /) -> object | None:
        """Return something if the expression matches anywhere in the string, else None."""


def compiled(text: str, flags: int = 0) -> Pattern:
    """Compile an expression. Raises BadPattern."""
    try:
        found = re.compile(text, flags)
        tree = parser.parse(text, flags)
        return found if _ways(tree) <= WAYS_MAX else _Bounded(text, flags)
    except _NotRe2 as error:
        raise BadPattern(f"it may take too long, and RE2 does not match it: {error}") from None
    except re.error as error:
        raise BadPattern(error.msg, error.pos or 0, str(error)) from None
    except (RecursionError, OverflowError) as error:
        raise BadPattern(str(error)) from None


def compiled_by_re2(text: str, mem_bytes_max: int) -> Pattern:
    """Compile an expression of RE2. Raises BadPattern, also if it needs more memory than that."""
    try:
        return _Bounded(text, 0, mem_bytes_max)
    except _NotRe2 as error:
        raise BadPattern(str(error)) from None


# -- which are harmless


def _ways(tree: Iterable[Any]) -> int:
    """Return how many ways may be tried; more than WAYS_MAX are not counted.

    The ways of parts in a row multiply. A repetition of something that varies has too many.
    """
    ways = 1
    for op, value in tree:
        inner = [part for part in _parts(op, value) if part is not None]
        if op in _REPEATS or op is kind.POSSESSIVE_REPEAT:
            low, high, _ = value
            if high > 1 and any(map(_varies, inner)):
                return WAYS_MAX + 1
            ways *= 1 + min(high - low, NAME_CHARS)
        if op is kind.BRANCH:
            ways *= sum(map(_ways, inner))
        else:
            for part in inner:
                ways *= _ways(part)
        if ways > WAYS_MAX:
            break
    return ways


def _varies(tree: Iterable[Any]) -> bool:
    """Return whether the expression can match in more than one way."""
    for op, value in tree:
        if op is kind.BRANCH or op in _REPEATS:
            return True
        if any(_varies(part) for part in _parts(op, value) if part is not None):
            return True
    return False


def _parts(op: Any, value: Any) -> list[Any]:
    """Return the expressions within one."""
    if op in _REPEATS or op is kind.POSSESSIVE_REPEAT:
        return [value[2]]
    if op is kind.SUBPATTERN:
        return [value[3]]
    if op is kind.BRANCH:
        return list(value[1])
    if op in (kind.ASSERT, kind.ASSERT_NOT):
        return [value[1]]
    if op is kind.ATOMIC_GROUP:
        return [value]
    if op is kind.GROUPREF_EXISTS:
        return [value[1], value[2]]
    return []


# -- those that may not be


class _NotRe2(ValueError):
    """RE2 cannot compile the expression; the text says why."""


class _Bounded:
    """An expression that RE2 matches."""

    def __init__(self, text: str, flags: int, mem_bytes_max: int | None = None) -> None:
        # Loaded when it is first needed: most brokers have no such expression.
        import re2  # type: ignore[import-untyped] # it has no stubs

        options = re2.Options()
        options.case_sensitive = not flags & re.IGNORECASE
        options.log_errors = False
        if mem_bytes_max is not None:
            options.max_mem = mem_bytes_max
        try:
            self._found = re2.compile(text.encode("utf-8", "surrogateescape"), options)
        except re2.error as error:
            raise _NotRe2(error.args[0].decode(errors="replace")) from None

    def search(self, string: str) -> object | None:
        found: object | None = self._found.search(string.encode("utf-8", "surrogateescape"))
        return found
