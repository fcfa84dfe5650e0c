"""Nothing of a transaction leaves before its commit, and everything leaves then, in order.

A rollback forgets it.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands

from shardmq.broker.amqp.errors import ChannelException
from shardmq.broker.front_door.connection.channel import Channel
from shardmq.broker.front_door.connection.channel_methods import HANDLERS
from shardmq.broker.front_door.consume.consumers import Consumer
from shardmq.broker.front_door.consume.unacked import Run
from shardmq.broker.front_door.publish import transactions
from shardmq.broker.front_door.publish.transactions import Transaction

steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("ps"), st.integers()),
        st.tuples(st.sampled_from("cr"), st.just(0)),
    )
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


# -- a commit that waits ---------------------------------------------------------------------------

EPOCH = 7


class Commit:
    """A commit of one publish and one settle, at shards that answer when they are told to."""

    def __init__(self, lasts_at_once: bool = True, outstanding: bool = True) -> None:
        self.lasts_at_once, self.outstanding = lasts_at_once, outstanding
        self.waiting: Any = None  # told what becomes of the settles
        self.steps: dict[str, asyncio.Future[None]] = {}
        self.done: list[Any] = []
        self.channel = Channel(SimpleNamespace(), 1)  # type: ignore[arg-type]
        self.consumer = Consumer(self.channel.consuming, 3, "tag")
        self.channel.consuming.unacked.add(1, 5, self.consumer, EPOCH, 11)
        self.channel.select_transaction()
        assert self.channel.transaction is not None
        self.transaction: Transaction[Any, Any] = self.channel.transaction
        self.transaction.publish("publish", 1)
        self.transaction.settle((0, self.channel.consuming.unacked.take_through(2)))
        publishing = SimpleNamespace(
            reserve=self.reserve, ask_duplicates=self.ask_duplicates, commit=self.commit
        )
        acks = SimpleNamespace(
            settle_runs=lambda kind, runs, at_once: self.done.append(runs),
            are_outstanding=lambda kept: self.outstanding,
            make_last=self.make_last,
        )
        services = SimpleNamespace(
            publishing=publishing,
            consuming=SimpleNamespace(acks=acks),
            loop=SimpleNamespace(schedule_end_of_pass=lambda: None),
            catalog=SimpleNamespace(queue_by_id=lambda id: None),
        )
        self.client = SimpleNamespace(services=services, session=SimpleNamespace(id=9))

    async def _step(self, name: str, held: Any) -> None:
        assert list(held) == ["publish"]
        await self.steps.setdefault(name, asyncio.get_running_loop().create_future())

    async def reserve(self, session: Any, held: Any) -> Any:
        await self._step("reserve", held)
        return SimpleNamespace(end=lambda: self.done.append("freed"))

    async def ask_duplicates(self, session: Any, held: Any, task: Any) -> None:
        await self._step("ask duplicates", held)

    async def commit(
        self, session: Any, channel: Any, held: Any, answers: Any, reservation: Any, task: Any
    ) -> asyncio.Future[bool]:
        await self._step("commit", held)
        self.done.append(held)
        reservation.end()
        stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        stored.set_result(True)
        return stored

    def make_last(self, kept: Any, waiting: Any) -> None:
        assert kept == {(0, EPOCH): {0}}
        self.waiting = waiting
        if self.lasts_at_once:
            waiting.confirmed()

    def begin(self) -> asyncio.Task[Any]:
        done = HANDLERS[commands.Tx.Commit](self.client, self.channel, commands.Tx.Commit())  # type: ignore[arg-type]
        return asyncio.ensure_future(done)  # type: ignore[arg-type]

    async def until(self, name: str) -> None:
        for _ in range(10):
            if name in self.steps:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{name} is never asked for")

    @property
    def first_unsettled(self) -> int | None:
        """Where a stream reader that is attached again now begins."""
        return self.channel.consuming.first_unsettled(self.consumer, EPOCH)


def test_a_reader_attached_again_while_a_commit_waits_begins_at_what_is_unsettled() -> None:
    async def run() -> None:
        made = Commit()
        committing = made.begin()
        for step in ("reserve", "ask duplicates", "commit"):
            await made.until(step)
            assert made.first_unsettled == 11, f"while it waits: {step}"
            assert len(made.transaction.settles) == 1
            made.steps[step].set_result(None)
        made.done.append(await committing)
        settled = [Run(1, 2, made.consumer, EPOCH, 11, 0.0)]
        assert made.done[:3] == [["publish"], "freed", settled]
        assert isinstance(made.done[3], commands.Tx.CommitOk)
        assert made.first_unsettled == 13
        assert made.transaction.take() == ([], [])

    asyncio.run(run())


@pytest.mark.parametrize("step", ["reserve", "ask duplicates"])
def test_a_refused_commit_forgets_its_publishes_and_gives_its_deliveries_back(step: str) -> None:
    async def run() -> None:
        made = Commit()
        committing = made.begin()
        if step == "ask duplicates":
            await made.until("reserve")
            made.steps["reserve"].set_result(None)
        await made.until(step)
        made.steps[step].set_exception(ChannelException(406, "full", 90, 20))
        with pytest.raises(ChannelException, match="full"):
            await committing
        assert made.done == (["freed"] if step == "ask duplicates" else [])
        assert made.transaction.take() == ([], [])
        assert made.first_unsettled == 11 and made.channel.consuming.unacked.count == 5

    asyncio.run(run())


@pytest.mark.parametrize("how", ["confirmed", "lost", "closed"])
def test_a_commit_is_answered_when_its_settles_last_or_may_come_again(how: str) -> None:
    async def run() -> None:
        made = Commit(lasts_at_once=False)
        committing = made.begin()
        for step in ("reserve", "ask duplicates", "commit"):
            await made.until(step)
            made.steps[step].set_result(None)
        for _ in range(5):
            await asyncio.sleep(0)
        assert made.waiting is not None and not committing.done()
        if how == "closed":
            made.channel.is_open = False
        getattr(made.waiting, "lost" if how == "lost" else "confirmed")()
        if how == "lost":
            with pytest.raises(ChannelException, match="partial tx completion"):
                await committing
        else:
            said = await committing
            assert (said is None) if how == "closed" else isinstance(said, commands.Tx.CommitOk)

    asyncio.run(run())


def test_a_commit_of_what_was_requeued_meanwhile_does_nothing_at_all() -> None:
    async def run() -> None:
        made = Commit(outstanding=False)
        with pytest.raises(ChannelException, match="nothing of the transaction was done"):
            await made.begin()
        assert made.done == [] and not made.steps and made.waiting is None
        assert made.transaction.take() == ([], []) and made.channel.consuming.unacked.count == 5

    asyncio.run(run())


def test_a_rollback_asks_no_shard_for_anything() -> None:
    async def run() -> None:
        made = Commit()
        rollback = HANDLERS[commands.Tx.Rollback]
        assert isinstance(
            rollback(made.client, made.channel, commands.Tx.Rollback()),  # type: ignore[arg-type]
            commands.Tx.RollbackOk,
        )
        assert made.waiting is None and made.channel.consuming.unacked.count == 5

    asyncio.run(run())
