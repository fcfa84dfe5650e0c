"""Expressions match what Python says, and none of them for ever."""

from __future__ import annotations

import re
import re._constants as kind  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardmq.broker.model import patterns
from shardmq.broker.model.patterns import BadPattern, compiled

ATOMS = st.sampled_from(
    ["a", "b", ".", "[ab]", "[^a]", r"\w", r"\.", r"\d", "^", "$", "", "(?i:A)", r"\n"]
)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}", "{2,}"])).map(
            lambda both: f"({both[0]}){both[1]}"
        ),
    ),
    max_leaves=6,
)


NAMES = st.lists(st.text("abA.1é", max_size=6), min_size=1, max_size=6)


@settings(max_examples=500, deadline=None)
@given(EXPRESSIONS, NAMES)
def test_re2_finds_what_python_finds(text: str, names: list[str]) -> None:
    tried = re.compile(text, re.ASCII)
    bounded = patterns._Re2(text, 0, 1 << 20)
    for name in names:
        assert bool(bounded.search(name)) == bool(tried.search(name)), (text, name)


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(["^", r"\A", "(?i)^"]),
    st.lists(st.tuples(st.sampled_from(["(?!", "(?="]), EXPRESSIONS), min_size=1, max_size=5),
    EXPRESSIONS,
    st.sampled_from(["", "|b", "[)|]", r"\)"]),
    NAMES,
)
def test_lookaheads_at_the_beginning_hold_with_what_follows(
    head: str, aheads: list[tuple[str, str]], rest: str, end: str, names: list[str]
) -> None:
    text = head + "".join(f"{begin}{ahead})" for begin, ahead in aheads) + rest + end
    tried = re.compile(text, re.ASCII)
    try:
        found = compiled(text)
    except BadPattern:
        assert end == "|b" or len(aheads) > patterns.LOOKAHEADS_MAX
        return
    for name in names:
        assert bool(found.search(name)) == bool(tried.search(name)), (text, name)


@pytest.mark.parametrize(
    "text",
    [
        r"^(?!amq\.).*",
        r"^(?!amq\.|test\)x).*$",
        r"^(?![)]|a(b))(?=.*(c|d))[^]|)]*\|$",
        r"(?i)^(?!AMQ\.)(orders|bills)(-\w+)*$",
        r"\A(?!.*\.dlq$)[\w.-]+\.[a-z]+$",
        r"^(?!amq\.)(a+)+$",
    ],
)
def test_lookaheads_at_the_beginning_are_left_to_re2(text: str) -> None:
    assert isinstance(compiled(text), patterns._Lookaheads)
    for name in ("amq.x", "AMQ.x", "orders-a-b", "x.dlq", "a.b", "ab", "c|", "caa)|", "c]|", "aaa"):
        assert bool(compiled(text).search(name)) == bool(re.search(text, name)), name


def test_case_and_what_is_no_text_are_as_in_python() -> None:
    risky = "(x+)+Y$"
    assert compiled(risky, re.IGNORECASE).search("XXy")
    assert not compiled(risky).search("XXy")
    for surrogate in ("\udcff", "\ud800"):
        assert compiled(risky).search(f"{surrogate}xY")
        assert compiled(f"(?!x){surrogate}").search(surrogate)


@pytest.mark.parametrize(
    ("text", "name", "matches"),
    [
        ("(a+)+$", "a" * 254 + "!", False),
        (".*a.*b", "a" * 255, False),
        ("^(a|aa)+$", "a" * 254 + "!", False),
        ("^(a|a)*b", "a" * 255, False),
        ("(.*)*x$", "y" * 255, False),
        (".*.*.*.*.*.*x", "y" * 255, False),
        ("a?" * 60 + "a" * 60, "a" * 59, False),
        (r"^(([a-z])+.)+[A-Z]([a-z])+$", "a" * 255, False),
        ("^((ab?)*c?)*$", "ab" * 127, True),
        ("(x{1,20}){1,20}y", "x" * 255, False),
        ("^(?!amq)(a+)+$", "a" * 254 + "!", False),
        (r"^(?!x)(\w+\.)*\w+!$", "a." * 127, False),
    ],
)
def test_none_takes_for_ever(text: str, name: str, matches: bool) -> None:
    assert bool(compiled(text).search(name)) is matches
    assert not isinstance(compiled(text), re.Pattern)  # Python's matcher, which may backtrack


@pytest.mark.parametrize(
    "text",
    [
        r"(a)\1",
        r"^(\w+)-\1$",
        r"^((?!tmp|old).)*$",
        r"^.*(?<!\.dlq)$",
        r"^(?!amq\.).*|^amq\.gen-",
        "^a{1001}$",
        "(?x) ^ amq",
        "^a++b",
    ],
)
def test_what_re2_does_not_know_and_cannot_take_long_is_left_to_python(text: str) -> None:
    assert isinstance(compiled(text), re.Pattern)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(", "missing"),
        (r"(?!amq\.)(a+)+$", "RE2 does not match it: invalid perl operator: (?!"),
        (r"(?!amq\.).*a.*b", "RE2 does not match it: invalid perl operator: (?!"),
        (r"^(?!a)|(a+)+$", "RE2 does not match it: invalid perl operator: (?!"),
        (r"((a+)+)\1$", "RE2 does not match it: invalid escape sequence"),
        (r"(a+)\1$", "RE2 does not match it: invalid escape sequence"),
        (r"(?!x)(?:x{1,20}){1,20}y", "RE2 does not match it"),
        ("((a{1,100}){1,100})+", "RE2 does not match it"),
        ("(?i)(?=a)" + "[\0-\uffff]" * 3, "RE2 does not match it"),
        ("(?!a)" + r"[\w.]{0,250}" * 300, "RE2 does not match it"),
        ("a{1,99999999999}", "repetition number is too large"),
        ("(" * 2000 + ")" * 2000 + "(?!a)", "recursion"),
        ("a" * 4097, "longer than 4096 characters"),
    ],
)
def test_what_is_none_or_cannot_be_bounded_is_said(text: str, why: str) -> None:
    with pytest.raises(BadPattern, match=re.escape(why)):
        compiled(text)


def test_a_long_list_of_names_is_taken() -> None:
    names = [f"{i * 7919 % 1000:03}.orders" for i in range(180)]
    assert compiled("|".join(names)).search(names[-1])
    longer = [f"{i * 7919 % 1000:03}.orders" for i in range(360)]
    assert compiled(f"^({'|'.join(longer)})$").search(longer[-1])


# -- how many steps Python's matcher takes

RISKY = st.recursive(
    st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "^", "$", "", "(?!)"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(st.sampled_from(["(?!", "(?=", "(?>"]), inner).map(
            lambda two: "".join(two) + ")"
        ),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}", "{2,}", "*+"])).map(
            lambda both: f"({both[0]}){both[1]}"
        ),
    ),
    max_leaves=8,
)


class Slow:
    """A matcher that tries all ways one after the other, as Python's does, and counts its steps."""

    def __init__(self, name: str, steps_max: int) -> None:
        self.name = name
        self.steps_left = steps_max

    def search(self, tree: Any) -> bool:
        return any(
            True for start in range(len(self.name) + 1) for _ in self.ends(list(tree), start)
        )

    def ends(self, parts: list[Any], at: int) -> Iterator[int]:
        """Yield where the parts may end that begin here, once for each way."""
        if not parts:
            yield at
            return
        for end in self.ends_of_one(*parts[0], at):
            yield from self.ends(parts[1:], end)

    def ends_of_one(self, op: Any, value: Any, at: int) -> Iterator[int]:
        self.steps_left -= op is not kind.SUBPATTERN
        assert self.steps_left >= 0
        if op is kind.AT:
            if at == (0 if value is kind.AT_BEGINNING else len(self.name)):
                yield at
        elif op in (kind.LITERAL, kind.NOT_LITERAL, kind.ANY, kind.IN):
            if at < len(self.name) and self.fits(op, value, self.name[at]):
                yield at + 1
        elif op is kind.SUBPATTERN:
            yield from self.ends(list(value[3]), at)
        elif op is kind.BRANCH:
            for each in value[1]:
                yield from self.ends(list(each), at)
        elif op in (kind.ASSERT, kind.ASSERT_NOT):
            if any(True for _ in self.ends(list(value[1]), at)) is (op is kind.ASSERT):
                yield at
        elif op is kind.ATOMIC_GROUP:
            yield from list(self.ends(list(value), at))[:1]
        elif op in (kind.MAX_REPEAT, kind.MIN_REPEAT):
            yield from self.repeated(op is kind.MIN_REPEAT, *value, at)
        elif op is kind.POSSESSIVE_REPEAT:
            yield from list(self.repeated(False, *value, at))[:1]

    def repeated(self, is_lazy: bool, low: int, high: int, tree: Any, at: int) -> Iterator[int]:
        if is_lazy and low <= 0:
            yield at
        if high > 0:
            for end in self.ends(list(tree), at):
                if end > at or low > 0:
                    yield from self.repeated(is_lazy, low - 1, high - 1, tree, end)
        if not is_lazy and low <= 0:
            yield at

    @staticmethod
    def fits(op: Any, value: Any, char: str) -> bool:
        if op is kind.ANY:
            return char != "\n"
        if op is kind.IN:
            is_in = any(what is kind.LITERAL and each == ord(char) for what, each in value)
            return is_in is not (value[0][0] is kind.NEGATE)
        return (ord(char) == value) is (op is kind.LITERAL)


@settings(max_examples=300, deadline=None)
@given(RISKY, st.text("ab", max_size=30), st.sampled_from(["a" * 30, "a" * 29 + "b", "ab" * 15]))
def test_no_search_takes_more_steps_than_were_counted(text: str, name: str, other: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patterns, "NAME_CHARS", 30)
        patch.setattr(patterns, "STEPS_MAX", 5000)
        tree = parser.parse(text)
        counted = patterns._steps(tree)
        assume(counted <= 5000)
        for each in (name, other):
            assert Slow(each, counted).search(tree) == bool(re.search(text, each)), (text, each)


def test_a_broker_whose_patterns_match_everything_does_without_re2() -> None:
    code = (
        "import sys; from shardmq.broker.model.patterns import compiled;"
        "assert compiled('.*').search('a') and compiled('').search('');"
        "assert 're2' not in sys.modules; compiled('^a'); assert 're2' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
