"""Where queues live: the same answer for ever, evenly, and stable when shards are added."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.routing.hashing import hash64, jump
from shardmq.broker.routing.placement import place


@pytest.mark.row("K9")
@given(st.text(max_size=20), st.text(max_size=20), st.integers(1, 64))
def test_a_new_shard_takes_queues_and_moves_none_between_old_ones(vhost, queue, shards) -> None:
    before, after = place(vhost, queue, shards), place(vhost, queue, shards + 1)
    assert 0 <= before < shards
    assert after in (before, shards)


@given(st.integers(2, 16))
def test_no_shard_has_much_more_than_its_part(shards) -> None:
    counts = Counter(place("/", f"queue-{n}", shards) for n in range(4_000))
    assert len(counts) == shards
    assert max(counts.values()) < 1.5 * 4_000 / shards


def test_hashes_and_places_are_the_same_on_every_day() -> None:
    assert hash64("a") == hash64(b"a") == 0x2F42665B399EF840
    assert [place("/", f"q{n}", 8) for n in range(8)] == PLACES


@given(st.integers(0, 2**64 - 1))
def test_one_bucket_takes_everything(key) -> None:
    assert jump(key, 1) == 0


PLACES = [1, 7, 5, 5, 6, 2, 3, 3]
