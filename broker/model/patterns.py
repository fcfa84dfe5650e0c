"""Regular expressions of policies, permissions and searches, matched in bounded time. Pure.

Python's matcher backtracks: for some names of 40 characters `(a+)+$` takes longer than the universe
lasts, and everybody waits. An expression that may be of that sort (a repetition within a
repetition, or several repetitions in a row) is matched here by a set of steps that follows all ways
at once. The time grows with the length of the name times that of the expression. Such an expression
is refused if it also has what a set of steps cannot match: references to groups, lookarounds, word
boundaries, modes of lines. All other expressions are left to Python.

A library such as RE2 cannot take this place: end of text, digits and word characters mean something
else there, and it refuses lookaheads, which policies of RabbitMQ often have.
"""

from __future__ import annotations

import re
import re._constants as kind  # type: ignore[import-not-found] # of the parser beside it
import re._parser as parser  # type: ignore[import-not-found] # what it reads is what re matches
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

# How many ways Python's matcher may have to try from one character on. A repetition has one way for
# each of its lengths.
WAYS_MAX = 1 << 16
NAME_CHARS = 255
# Steps of an expression, with its counted repetitions written out.
STEPS_MAX = 1000

_REPEATS = (kind.MAX_REPEAT, kind.MIN_REPEAT)
_CATEGORIES: Final = {
    kind.CATEGORY_DIGIT: r"\d",
    kind.CATEGORY_NOT_DIGIT: r"\D",
    kind.CATEGORY_SPACE: r"\s",
    kind.CATEGORY_NOT_SPACE: r"\S",
    kind.CATEGORY_WORD: r"\w",
    kind.CATEGORY_NOT_WORD: r"\W",
}
_BEGIN, _END = "begin", "end"
_PLACES: Final = {kind.AT_BEGINNING: _BEGIN, kind.AT_BEGINNING_STRING: _BEGIN, kind.AT_END: _END}


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
        return found if _ways(tree) <= WAYS_MAX else _Together(tree)
    except re.error as error:
        raise BadPattern(error.msg, error.pos or 0, str(error)) from None
    except (RecursionError, OverflowError) as error:
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


# -- all ways at once

_Test = Callable[[str], object]
# One of: a test for the next character, a place to be at, or the steps that follow. After a
# character or a place the next step follows.
_Step = tuple[str, Any]
_CHARACTER, _PLACE, _SPLIT = "character", "place", "split"


class _Together:
    """An expression that is matched by a set of steps that goes along the text."""

    def __init__(self, tree: Any) -> None:
        self._steps: list[_Step] = []
        self._tests: dict[str, _Test] = {}
        flags = tree.state.flags
        if flags & re.MULTILINE:
            raise BadPattern("it may take too long, and looks at lines")
        self._add(tree, flags)

    def search(self, string: str) -> bool | None:
        end = len(string)
        last_line = (
            end - 1 if string.endswith("\n") else end
        )  # `$` is before a newline at the end, too
        steps, here = self._steps, set[int]()
        for at in range(end + 1):
            places = {_BEGIN} if at == 0 else set()
            if at in (end, last_line):
                places.add(_END)
            reached = self._reach({0} | here, places)
            if len(steps) in reached:
                return True
            if at == end:
                break
            character = string[at]
            here = {
                step + 1
                for step in reached
                if steps[step][0] is _CHARACTER and steps[step][1](character)
            }
        return None

    def _reach(self, begin: set[int], places: set[str]) -> set[int]:
        """Return all steps that can be reached without a character."""
        reached = set(begin)
        todo = list(begin)
        while todo:
            at = todo.pop()
            if at == len(self._steps):
                continue
            what, value = self._steps[at]
            if what is _SPLIT:
                following = value
            elif what is _PLACE and value in places:
                following = (at + 1,)
            else:
                continue
            new = [step for step in following if step not in reached]
            reached.update(new)
            todo += new
        return reached

    # -- from what the parser read

    def _add(self, tree: Iterable[Any], flags: int) -> None:
        for op, value in tree:
            if op in _REPEATS:
                low, high, inner = value
                self._add_repeat(low, high, inner, flags)
            elif op is kind.SUBPATTERN:
                _, add, remove, inner = value
                self._add(inner, (flags | add) & ~remove)
            elif op is kind.BRANCH:
                self._add_branch(value[1], flags)
            elif op is kind.AT and value in _PLACES:
                self._put(_PLACE, _PLACES[value])
            elif op in (kind.LITERAL, kind.NOT_LITERAL, kind.ANY, kind.IN):
                self._put(_CHARACTER, self._test(_source(op, value), flags))
            else:
                raise BadPattern(
                    f"it may take too long, and has what is not matched then ({str(op).lower()})"
                )

    def _put(self, what: str, value: Any) -> int:
        if len(self._steps) >= STEPS_MAX:
            raise BadPattern(f"it may take too long, and has more than {STEPS_MAX} steps")
        self._steps.append((what, value))
        return len(self._steps) - 1

    def _test(self, source: str, flags: int) -> _Test:
        """Make a test for one character, by Python's own rules."""
        key = f"{flags} {source}"
        if key not in self._tests:
            self._tests[key] = re.compile(
                source, flags & (re.IGNORECASE | re.ASCII | re.DOTALL)
            ).fullmatch
        return self._tests[key]

    def _add_repeat(self, low: int, high: int, inner: Any, flags: int) -> None:
        for _ in range(low):
            self._add(inner, flags)
        if high == kind.MAXREPEAT:
            begin = self._put(_SPLIT, ())
            self._add(inner, flags)
            self._put(_SPLIT, (begin,))
            self._steps[begin] = _SPLIT, (begin + 1, len(self._steps))
            return
        optional = []
        for _ in range(high - low):
            optional.append(self._put(_SPLIT, ()))
            self._add(inner, flags)
        for begin in optional:
            self._steps[begin] = _SPLIT, (begin + 1, len(self._steps))

    def _add_branch(self, ways: Iterable[Any], flags: int) -> None:
        split = self._put(_SPLIT, ())
        begins, ends = [], []
        for way in ways:
            begins.append(len(self._steps))
            self._add(way, flags)
            ends.append(self._put(_SPLIT, ()))
        self._steps[split] = _SPLIT, tuple(begins)
        for end in ends:
            self._steps[end] = _SPLIT, (len(self._steps),)


def _source(op: Any, value: Any) -> str:
    """Write an expression for one character."""
    if op is kind.ANY:
        return "."
    if op is kind.LITERAL:
        return _character(value)
    if op is kind.NOT_LITERAL:
        return f"[^{_character(value)}]"
    parts = []
    for part, what in value:
        if part is kind.NEGATE:
            parts.append("^")
        elif part is kind.LITERAL:
            parts.append(_character(what))
        elif part is kind.RANGE:
            parts.append(f"{_character(what[0])}-{_character(what[1])}")
        else:
            parts.append(_CATEGORIES[what])
    return f"[{''.join(parts)}]"


def _character(code: int) -> str:
    return f"\\U{code:08x}"
