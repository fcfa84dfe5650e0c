"""Filters select the same rows of an archive as at the broker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_shardmq.matching import topic_pattern
from pyspark_shardmq.schema import arrow_schema

WORDS = st.lists(st.sampled_from(["a", "b", "", "a+", "é"]), min_size=1, max_size=5)
PATTERNS = st.lists(st.sampled_from(["a", "b", "*", "#", "", "a+"]), min_size=1, max_size=5)


def model(pattern: list[str], words: list[str]) -> bool:
    """Match a pattern in a slow and obvious way."""
    if not pattern:
        return not words
    if pattern[0] == "#":
        return any(model(pattern[1:], words[n:]) for n in range(len(words) + 1))
    return bool(words) and pattern[0] in ("*", words[0]) and model(pattern[1:], words[1:])


@given(PATTERNS, WORDS)
def test_topic_patterns_match_as_in_amqp(pattern: list[str], words: list[str]) -> None:
    assert bool(topic_pattern(".".join(pattern)).fullmatch(".".join(words))) == model(
        pattern, words
    )


def test_every_word_of_a_filter_over_rows() -> None:
    pa = pytest.importorskip("pyarrow")
    from pyspark_shardmq.matching import matches

    rows = [
        {"routing_key": "a.b", "exchange": "x", "timestamp": 5_000},
        {"routing_key": "a.c", "exchange": "x", "timestamp": 6_999},
        {"routing_key": "b", "exchange": "", "timestamp": 7_000},
    ]
    batch = pa.RecordBatch.from_pylist(
        rows, schema=arrow_schema(["timestamp", "exchange", "routing_key"])
    )
    for filters, wanted in [
        (["routing_key:a.*"], [True, True, False]),
        (["key:b"], [False, False, True]),
        (["exchange:x", "since:6"], [False, True, False]),
        (["until:7"], [True, True, False]),
        ([], [True, True, True]),
    ]:
        assert matches(batch, filters).to_pylist() == wanted
