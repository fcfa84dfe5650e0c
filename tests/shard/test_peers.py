"""Batches wait to be confirmed: none is before its turn, and none that failed ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.peers import (
    APPENDING,
    CONFIRMABLE,
    FAILED,
    NEXT_STATES,
    WAITING,
    BatchMissing,
    BatchState,
    HeldBatch,
    Peer,
)
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire.lane import joined

REFUSED = [(9, 1, 4, 5)]
ACTS = {
    "wait": lambda held: held.wait_for(3),
    "need nothing": lambda held: held.need_no_sync(),
    "refuse": lambda held: held.refuse(REFUSED),
    "fail": lambda held: held.fail(),
}


def new_peer() -> Peer:
    return Peer(0, 5, "peer-0", 7, 0)


def in_state(state: BatchState) -> HeldBatch:
    held = HeldBatch(1)
    if state is WAITING:
        held.wait_for(3)
    elif state is CONFIRMABLE:
        held.need_no_sync()
    elif state is FAILED:
        held.fail()
    assert held.state is state
    return held


def confirmed(peer: Peer) -> list[tuple[int, list[tuple[int, int, int, int]]]]:
    outgoing: list = []  # type: ignore[type-arg] # of Outgoing
    peer.take(outgoing)
    return [envelope.read_confirmed(joined(each.message)) for each in outgoing]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("state", BatchState)
def test_a_batch_changes_its_state_as_the_table_says_and_never_back(
    state: BatchState, act: str
) -> None:
    held = in_state(state)
    try:
        ACTS[act](held)
    except AssertionError:
        assert held.state is state
    assert held.state is state or held.state in NEXT_STATES[state]


@given(
    st.lists(
        st.tuples(st.sampled_from(["wait", "need nothing", "fail", "append"]), st.integers(1, 5)),
        max_size=9,
    )
)
def test_confirms_reach_up_to_the_first_batch_that_is_not_confirmable(
    fates: list[tuple[str, int]],
) -> None:
    peer = new_peer()
    for batch, (fate, sync) in enumerate(fates, 1):
        held = peer.hold(batch)
        if fate == "wait":
            held.refused = [(9, 1, batch, batch)]
            held.wait_for(sync)
        elif fate == "need nothing":
            held.refuse([(9, 1, batch, batch)])
        elif fate == "fail":
            held.fail()
    told: list[int] = []
    for ended in range(6):
        peer.confirm(ended)
        for batch, refused in confirmed(peer):
            assert refused == [(9, 1, n, n) for n in range(len(told) + 1, batch + 1)]
            told += range(len(told) + 1, batch + 1)
        good = [
            fate == "need nothing" or (fate == "wait" and sync <= ended) for fate, sync in fates
        ]
        assert len(told) == (good.index(False) if False in good else len(good))


def test_an_earlier_batch_that_waits_does_not_hide_one_that_failed() -> None:
    peer = new_peer()
    peer.hold(1).wait_for(1)
    peer.hold(2).fail()
    peer.hold(3).need_no_sync()
    peer.confirm(0)
    assert confirmed(peer) == []
    peer.confirm(9)
    assert confirmed(peer) == [(1, [])]


def test_a_batch_in_the_hands_of_the_store_is_not_confirmed() -> None:
    peer = new_peer()
    assert peer.hold(1).state is APPENDING
    peer.confirm(9)
    assert confirmed(peer) == []


def test_the_first_batch_may_have_any_number_and_no_other_may() -> None:
    peer = new_peer()
    peer.check_first(17)  # of a shard that started meanwhile
    peer.next_batch = 18
    for batch in (19, 17):
        with pytest.raises(BatchMissing):
            peer.check_first(batch)
