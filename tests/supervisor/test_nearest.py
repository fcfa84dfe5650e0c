"""The name that was meant is found among the known ones, in bounded time."""

from __future__ import annotations

from shardmq.supervisor.nearest import GIVEN_CHARS_MAX, did_you_mean


def test_the_nearest_name_is_named() -> None:
    assert did_you_mean("max-lenght", ["expires", "max-length"]) == "; did you mean max-length?"
    assert did_you_mean("zz", ["expires", "max-length"]) == ""
    assert did_you_mean("zz", ["expires"]) == "; did you mean expires?"


def test_a_long_name_has_no_near_one() -> None:
    known = ["a" * GIVEN_CHARS_MAX, "b"]
    assert did_you_mean("a" * GIVEN_CHARS_MAX, known)
    assert did_you_mean("a" * (GIVEN_CHARS_MAX + 1), known) == ""
    assert did_you_mean("a" * (GIVEN_CHARS_MAX + 1), ["a"]) == ""
