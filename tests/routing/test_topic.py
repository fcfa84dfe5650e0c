"""The compiled trie says what the slow, obvious one says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.routing.topic import TopicTrie
from tests.reference import topic as reference

WORDS = st.sampled_from(["a", "b", "", "*", "#"])
TEXTS = st.lists(WORDS, max_size=6).map(".".join)
HISTORIES = st.lists(st.tuples(st.booleans(), TEXTS, st.integers(0, 3)), max_size=40)


@given(HISTORIES, st.lists(TEXTS, max_size=20))
def test_matches_like_the_reference_after_any_adds_and_removes(history, keys) -> None:
    trie, slow = TopicTrie(), reference.TopicTrie()
    for add, pattern, target in history:
        if add:
            trie.add(pattern, target)
            slow.add(pattern, target)
            continue
        if slow.added[pattern, target]:
            trie.remove(pattern, target)
            slow.remove(pattern, target)
        else:
            with pytest.raises(KeyError):
                trie.remove(pattern, target)
    for key in keys:
        assert trie.match(key) == slow.match(key)


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        ("a.#", "a", True),
        ("#", "", True),
        ("*", "", False),
        ("", "", True),
        ("a.*", "a.", True),
        ("#.b", "a.b.b", True),
        ("#.*", "", False),
        ("*.stock.#.us", "eur.stock.us", True),
    ],
)
def test_words_and_wildcards_as_rabbitmq_reads_them(pattern, key, expected) -> None:
    trie = TopicTrie()
    trie.add(pattern, "q")
    assert (trie.match(key) == {"q"}) is expected


def test_many_hashes_cost_no_more_than_their_number() -> None:
    trie = TopicTrie()
    trie.add(".".join(["#", "a"] * 30), "q")
    assert trie.match(".".join(["a"] * 100)) == {"q"}
    assert trie.match(".".join(["a"] * 100 + ["b"])) == set()
