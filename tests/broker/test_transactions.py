"""A transactional channel: nothing leaves before commit, everything leaves at commit, in order; rollback forgets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.amqp.errors import ChannelException
from shardmq.broker.front_door.publish import transactions
from shardmq.broker.front_door.publish.transactions import Transaction

steps = st.lists(
    st.one_of(st.tuples(st.sampled_from("ps"), st.integers()), st.tuples(st.sampled_from("cr"), st.just(0)))
)


@given(steps)
def test_what_leaves_is_what_was_committed_in_its_order(history: list[tuple[str, int]]) -> None:
    transaction: Transaction[int, int] = Transaction()
    held: tuple[list[int], list[int]] = ([], [])
    for step, value in history:
        match step:
            case "p":
                transaction.publish(value, 10)
                held[0].append(value)
            case "s":
                transaction.settle(value)
                held[1].append(value)
            case "c":
                assert transaction.take() == held
                held = ([], [])
            case "r":
                assert transaction.drop() == held[1]
                held = ([], [])
        assert transaction.held_bytes == 10 * len(held[0])


def test_a_transaction_cannot_hold_more_than_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "HELD_BYTES_MAX", 100)
    monkeypatch.setattr(transactions, "HELD_SETTLES_MAX", 1)
    transaction: Transaction[str, int] = Transaction()
    transaction.publish("fits", 100)
    transaction.settle(1)
    with pytest.raises(ChannelException):
        transaction.publish("one byte too many", 1)
    with pytest.raises(ChannelException):
        transaction.settle(2)
    assert transaction.take() == (["fits"], [1])


def test_select_may_be_said_again_and_keeps_what_is_held() -> None:
    transaction: Transaction[str, int] = transactions.select(None, confirming=False)
    transaction.publish("a", 1)
    assert transactions.select(transaction, confirming=False) is transaction


def test_a_channel_is_either_transactional_or_confirming() -> None:
    with pytest.raises(ChannelException, match="cannot switch from confirm to tx mode") as refused:
        transactions.select(None, confirming=True)
    assert (refused.value.code, refused.value.class_id, refused.value.method_id) == (406, 90, 10)
    with pytest.raises(ChannelException, match="cannot switch from tx to confirm mode") as refused:
        transactions.check_confirm_select(Transaction())
    assert (refused.value.code, refused.value.class_id, refused.value.method_id) == (406, 85, 10)
    transactions.check_confirm_select(None)


@pytest.mark.parametrize("method_id", [transactions.COMMIT, transactions.ROLLBACK])
def test_commit_and_rollback_need_a_transactional_channel(method_id: int) -> None:
    with pytest.raises(ChannelException, match="channel is not transactional") as refused:
        transactions.opened(None, method_id)
    assert (refused.value.code, refused.value.method_id) == (406, method_id)
