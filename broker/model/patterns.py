"""Regular expressions of policies, permissions and searches, matched in bounded time. Pure.

RE2 matches every expression that it knows. Its time grows with the length of the name times the
size of the compiled expression, which its memory bound limits. RE2 takes `$` for the end of the
text alone, and `\\w` and `\\d` for characters of ASCII alone.

RE2 does not know lookarounds and references to groups, which RabbitMQ takes. Policies often have
lookaheads at the beginning: `^(?!amq\\.).*`. Then RE2 matches each lookahead and the rest by
themselves. Python's matcher matches what is left. It backtracks: for some names of 40 characters
`(a+)+$` takes longer than the universe lasts, and everybody waits. So the most steps that it may
take for a name are counted from the expression alone, and an expression with too many is refused. A
limit of time would not do: every process must find the same matches, however busy it is.
"""

from __future__ import annotations

import re
import re._constants as kind  # type: ignore[import-not-found] # of the parser beside it
import re._parser as parser  # type: ignore[import-not-found] # what it reads is what re matches
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

CHARS_MAX: Final = 4096
# RE2 gets so much memory for an expression, and so much more for each of its characters: a list of
# names needs 16 to 64 bytes for a character. Then a name of 255 characters takes 2 ms at the most,
# 6 ms if the expression has 3,000 characters; most expressions take 1 to 3 us.
RE2_BYTES_MAX: Final = 64 << 10
RE2_BYTES_PER_CHAR: Final = 32
# Lookaheads at the beginning, each with a quarter of that memory.
LOOKAHEADS_MAX: Final = 4
LOOKAHEAD_BYTES_MAX: Final = RE2_BYTES_MAX // 4
# Python's matcher may take so many steps for a name, which is 1 ms at the most.
STEPS_MAX: Final = 1 << 18
NAME_CHARS: Final = 255
# A reference to a group compares up to 255 characters, which takes as long as so many steps.
REFERENCE_STEPS: Final = 16
# Ranges of sets have so many characters together: `re` visits each when it compiles.
SET_CHARS_MAX: Final = 1 << 17

_HUGE_NUMBER: Final = re.compile(r"(?<!\\)\{\d*,?\d{9}")  # RE2 takes such a repetition for text
_BEGINNING: Final = re.compile(r"(?:\(\?[is]+\))?(?:\^|\\A)")
_LOOKAHEADS: Final = ("(?=", "(?!")
# Parts in which a parenthesis or a bar may be one of the text, in ways that `_marks` does not know.
_UNKNOWN_MARKS: Final = ("[:", "\\Q", "(?#")

_ONE_STEP: Final = (kind.LITERAL, kind.NOT_LITERAL, kind.ANY, kind.AT, kind.FAILURE)
_REPEATS: Final = (kind.MAX_REPEAT, kind.MIN_REPEAT, kind.POSSESSIVE_REPEAT)
_BEGINNINGS: Final = (kind.AT_BEGINNING, kind.AT_BEGINNING_STRING)


class BadPattern(ValueError):
    """The expression is malformed, too long, or cannot be matched in bounded time.

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


# Most permissions and many policies match everything, and a broker that has no others does without
# RE2, which takes 3 MB.
EVERYTHING: Final[dict[str, Pattern]] = dict.fromkeys(("", ".*"), re.compile(""))


def compiled(text: str, flags: int = 0) -> Pattern:
    """Compile an expression. Raises BadPattern."""
    if len(text) > CHARS_MAX:
        raise BadPattern(f"longer than {CHARS_MAX} characters")
    if text in EVERYTHING:
        return EVERYTHING[text]
    if (huge := _HUGE_NUMBER.search(text)) is not None:
        raise BadPattern("the repetition number is too large", huge.start())
    try:
        return _by_re2(text, flags, RE2_BYTES_MAX)
    except _NotRe2 as error:
        why = f"it may take too long, and RE2 does not match it: {error}"
    try:
        if (parts := _behind_lookaheads(text, flags)) is not None:
            return parts
        if _steps(parser.parse(text, flags)) > STEPS_MAX:
            raise BadPattern(why)
        return re.compile(text, flags | re.ASCII)
    except re.error as error:
        raise BadPattern(error.msg, error.pos or 0, str(error)) from None
    except (RecursionError, OverflowError) as error:
        raise BadPattern(str(error)) from None


def compiled_by_re2(text: str, mem_bytes_max: int) -> Pattern:
    """Compile an expression of RE2. Raises BadPattern, also if it needs more memory than that."""
    try:
        return _Re2(text, 0, mem_bytes_max, has_groups=True)
    except _NotRe2 as error:
        raise BadPattern(str(error)) from None


# -- by RE2


class _NotRe2(ValueError):
    """RE2 cannot compile the expression; the text says why."""


class _Re2:
    """An expression that RE2 matches."""

    def __init__(self, text: str, flags: int, bytes_max: int, *, has_groups: bool = False) -> None:
        """Compile; with `has_groups` the memory must also do for where groups begin and end.

        Nobody asks for that. Without it searches are quicker.
        """
        import re2  # type: ignore[import-untyped] # it has no stubs

        options = re2.Options()
        options.case_sensitive = not flags & re.IGNORECASE
        options.log_errors = False
        options.never_capture = not has_groups
        options.max_mem = bytes_max
        try:
            self._found = re2.compile(text.encode("utf-8", "surrogatepass"), options)
        except re2.error as error:
            raise _NotRe2(error.args[0].decode(errors="replace")) from None

    def search(self, string: str) -> object | None:
        found: object | None = self._found.search(string.encode("utf-8", "surrogatepass"))
        return found


def _by_re2(text: str, flags: int, bytes_max: int) -> _Re2:
    return _Re2(text, flags, bytes_max + RE2_BYTES_PER_CHAR * len(text))


class _Lookaheads:
    """Lookaheads at the beginning of an expression, with what follows them."""

    def __init__(self, parts: list[tuple[bool, Pattern]]) -> None:
        """Each part has to match, or (False) must not match, at the beginning of the name."""
        self._parts = parts

    def search(self, string: str) -> object | None:
        for matches, part in self._parts:
            if (part.search(string) is not None) is not matches:
                return None
        return self


def _behind_lookaheads(text: str, flags: int) -> Pattern | None:
    """Return an expression that begins with `^` and lookaheads, if RE2 knows all the parts."""
    head = _BEGINNING.match(text)
    if head is None or any(odd in text for odd in _UNKNOWN_MARKS):
        return None
    rest, parts = text[head.end() :], list[tuple[bool, Pattern]]()
    try:
        while rest.startswith(_LOOKAHEADS) and len(parts) < LOOKAHEADS_MAX:
            end = next((at for at, mark, depth in _marks(rest) if not depth and mark == ")"), None)
            if end is None:
                return None
            ahead = _by_re2(f"{head[0]}(?:{rest[3:end]})", flags, LOOKAHEAD_BYTES_MAX)
            parts.append((rest[2] == "=", ahead))
            rest = rest[end + 1 :]
        if not parts or rest.startswith(("*", "+", "?", "{")):
            return None
        if any(not depth and mark == "|" for _, mark, depth in _marks(rest)):
            return None  # `^` and the lookaheads belong to the first alternative only
        return _Lookaheads([*parts, (True, _by_re2(head[0] + rest, flags, RE2_BYTES_MAX))])
    except _NotRe2:
        return None


def _marks(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield the parentheses and bars that are neither escaped nor in a set.

    Each comes with its index and the depth outside it.
    """
    depth, is_escaped, set_at = 0, False, -1
    for at, char in enumerate(text):
        if is_escaped or char == "\\":
            is_escaped = not is_escaped
        elif set_at >= 0:
            # The first character of a set is in the set, also if it is "]".
            if char == "]" and at > set_at + 1 + (text[set_at + 1] == "^"):
                set_at = -1
        elif char == "[":
            set_at = at
        elif char in "()|":
            depth -= char == ")"
            yield at, char, depth
            depth += char == "("


# -- by Python's matcher


def _steps(tree: Any) -> int:
    """Return the most steps that Python's matcher takes to search a name, or more."""
    count = _Count()
    _, steps = count.row(tree)
    if count.set_chars > SET_CHARS_MAX:
        return STEPS_MAX + 1
    is_anchored = not tree.state.flags & re.MULTILINE and tree and tree[0][0] is kind.AT
    if is_anchored and tree[0][1] in _BEGINNINGS:
        return steps + NAME_CHARS  # at all other characters the first step fails
    return steps * (NAME_CHARS + 1)


class _Count:
    """Counts in how many ways an expression may match from one character on, and in what steps.

    The steps are those that lead to all the ways: the matcher tries one after the other when what
    follows does not match. Numbers above STEPS_MAX need not be right.
    """

    def __init__(self) -> None:
        self.set_chars = 0

    def row(self, tree: Iterable[Any]) -> tuple[int, int]:
        """Return the ways and steps of parts in a row: each is tried in all ways of those before.

        The ways multiply.
        """
        ways, steps = 1, 0
        for op, value in tree:
            its_ways, its_steps = self._part(op, value)
            steps += ways * its_steps
            ways *= its_ways
            if steps > STEPS_MAX or ways > STEPS_MAX:
                return STEPS_MAX + 1, STEPS_MAX + 1
        return ways, steps

    def _part(self, op: Any, value: Any) -> tuple[int, int]:
        if op in _ONE_STEP:
            return 1, 1
        if op is kind.IN:
            self.set_chars += sum(each[1] - each[0] for what, each in value if what is kind.RANGE)
            return 1, len(value)
        if op in _REPEATS:
            ways, steps = self._repeat(*value)
            return (1 if op is kind.POSSESSIVE_REPEAT else ways), steps
        if op is kind.SUBPATTERN:
            return self.row(value[3])
        if op is kind.BRANCH:
            found = [self.row(each) for each in value[1]]
            return sum(ways for ways, _ in found), sum(1 + steps for _, steps in found)
        if op in (kind.ASSERT, kind.ASSERT_NOT):
            return 1, 1 + self.row(value[1])[1]
        if op is kind.ATOMIC_GROUP:
            return 1, 1 + self.row(value)[1]
        if op is kind.GROUPREF:
            return 1, REFERENCE_STEPS
        if op is kind.GROUPREF_EXISTS:
            found = [self.row(each) for each in value[1:] if each is not None]
            return 1 + sum(ways for ways, _ in found), 1 + sum(steps for _, steps in found)
        return STEPS_MAX + 1, STEPS_MAX + 1

    def _repeat(self, low: int, high: int, tree: Iterable[Any]) -> tuple[int, int]:
        """Return the ways and steps of `low` to `high` times the same."""
        its_ways, its_steps = self.row(tree)
        ways, steps, ends = 0, 1, 1  # `ends`: the ways to match the first `times`
        for times in range(min(high, max(low, NAME_CHARS)) + 1):
            if times >= low:
                ways += ends
            if times < high:
                steps += ends * (1 + its_steps)
            ends *= its_ways
            if steps > STEPS_MAX or ways > STEPS_MAX:
                return STEPS_MAX + 1, STEPS_MAX + 1
        return ways, steps
