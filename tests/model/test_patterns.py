"""Expressions match what Python says, and none of them for ever."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
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


@settings(max_examples=500, deadline=None)
@given(EXPRESSIONS, st.lists(st.text("abA.1é", max_size=6), min_size=1, max_size=6))
def test_re2_finds_what_python_finds(text: str, names: list[str]) -> None:
    tried = re.compile(text, re.ASCII)
    bounded = patterns._Bounded(text, 0)
    for name in names:
        assert bool(bounded.search(name)) == bool(tried.search(name)), (text, name)


def test_case_and_what_is_no_text_are_as_in_python() -> None:
    risky = "(x+)+Y$"
    assert compiled(risky, re.IGNORECASE).search("XXy")
    assert not compiled(risky).search("XXy")
    assert compiled(risky).search("\udcffxY")


@pytest.mark.parametrize(
    ("text", "name", "matches"),
    [
        ("(a+)+$", "a" * 254 + "!", False),
        ("^(a|aa)+$", "a" * 254 + "!", False),
        ("^(a|a)*b", "a" * 255, False),
        ("(.*)*x$", "y" * 255, False),
        (".*.*.*.*.*.*x", "y" * 255, False),
        ("a?" * 60 + "a" * 60, "a" * 59, False),
        (r"^(([a-z])+.)+[A-Z]([a-z])+$", "a" * 255, False),
        ("^((ab?)*c?)*$", "ab" * 127, True),
        ("(x{1,20}){1,20}y", "x" * 255, False),
    ],
)
def test_none_takes_for_ever(text: str, name: str, matches: bool) -> None:
    assert bool(compiled(text).search(name)) is matches


@pytest.mark.parametrize(
    "text",
    [
        r"^(?!amq\.).*",
        r"^amq\.",
        ".*",
        "^(orders|bills)$",
        r"(?i)^x.*\d$",
        "",
        r"(a)\1",
        r"\bx\b",
        "^a{200}$",
    ],
)
def test_what_cannot_take_long_is_left_to_python(text: str) -> None:
    assert isinstance(compiled(text), re.Pattern)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(", "missing"),
        (r"^(?!amq\.)(a+)+$", "RE2 does not match it: invalid perl operator: (?!"),
        (r"((a+)+)\1$", "RE2 does not match it: invalid escape sequence"),
        ("((a{1,100}){1,100})+", "RE2 does not match it"),
        ("a{1,99999999999}", "repetition number is too large"),
        ("(" * 3000 + ")" * 3000, "recursion"),
    ],
)
def test_what_is_none_or_cannot_be_bounded_is_said(text: str, why: str) -> None:
    with pytest.raises(BadPattern, match=re.escape(why)):
        compiled(text)
