"""The publishes of a transaction are decided at once.

They leave with the commit in steps that return their effects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shardmq.broker.amqp import ChannelException
from shardmq.broker.front_door.publish import commit as commit_module
from shardmq.broker.front_door.publish import transactions
from shardmq.broker.front_door.publish.commit import Commit
from shardmq.broker.front_door.publish.transactions import Transaction
from shardmq.broker.model.changes import QueueDelete, QueuePut
from shardmq.shardd.wire import messages as wire
from tests.publishing.test_publish import HEADERS, NOWHERE, ONE, SHARD_0, SHARD_1, A, B, Door
from tests.support.fake_publishing import NOW_MS, catalog


class Transacting(Door):
    """A front door whose client has a transaction on channel 1."""

    def __init__(self, *messages: Any, **more: Any) -> None:
        super().__init__(**more)
        self.channel = self.client.channels[1]
        self.channel.transaction = Transaction()
        self.published = self.publish(*messages) if messages else None

    def commit(self) -> Commit:
        """Begin a commit of all that is held, without asking anybody."""
        held = self.channel.transaction.take().publishes
        publishing = self.publishing
        return Commit(
            publishing._messages,
            self.links,
            self.client,
            self.channel,
            held,
            None,
            None,
            publishing.opened,
        )


def never() -> bool:
    return False


def test_what_a_transaction_publishes_is_held() -> None:
    door = Transacting(A, (1, HEADERS, ONE, False), (3, B, {}, False))
    assert door.published is not None and door.published.fed == SHARD_1
    assert [body for _, body in door.stored()] == [b"2"]
    held = door.channel.transaction.publishes
    assert [(each.message.exchange, each.queues) for each in held] == [
        ("", ("a",)),
        ("headers", ("a",)),
    ]
    assert door.channel.published == 0


def test_an_error_ends_the_channel_at_once_and_not_at_the_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    door = Transacting(A, ("no such", ""), A)
    assert door.published is not None
    assert [error.code for error in door.published.failed.values()] == [404]
    assert len(door.channel.transaction.publishes) == 1
    monkeypatch.setattr(transactions, "HELD_BYTES_MAX", 2000)
    full = Transacting(A, A)
    assert full.published is not None
    assert [error.code for error in full.published.failed.values()] == [406]


async def test_a_step_returns_shards_and_returns_and_the_rest_comes_with_the_next() -> None:
    door = Transacting(A, (1, NOWHERE, {}, True), B)
    commit = door.commit()
    turns = iter([False, True])
    first = commit.step(NOW_MS, lambda: next(turns))
    assert (first.fed, len(first.frames)) == (SHARD_0, 1)
    second = commit.step(NOW_MS, never)
    assert (second.fed, len(second.frames)) == (SHARD_1, 0)
    assert [body for _, body in door.stored()] == [b"0", b"2"]
    assert len(door.links.waiting) == 2


async def test_a_step_ends_when_enough_leaves_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_module, "COMMIT_BYTES", 10)
    door = Transacting(A, A)
    commit = door.commit()
    for body in (b"0", b"1"):
        assert commit.step(NOW_MS, never).fed == SHARD_0
        assert [each for _, each in door.stored()] == [body]


@pytest.mark.parametrize("how", ["stored", "lost", "refused", "others refused"])
async def test_a_commit_is_done_when_all_shards_have_all_of_it(how: str) -> None:
    door = Transacting(A, B)
    stored = await door.commit().run(door.client)
    assert door.client.fed == SHARD_0 | SHARD_1
    first, second = door.links.waiting
    assert not first.in_sequence
    if how == "refused":
        first.refuse(9, 1, 0, 0)
    elif how == "others refused":
        first.refuse(9, 2, 0, 0)
        first.refuse(8, 1, 0, 0)
    first.lost() if how == "lost" else first.confirmed()
    assert not stored.done()
    second.confirmed()
    assert stored.result() == (how in ("stored", "others refused"))
    assert door.channel.published == 2


async def test_a_queue_that_went_before_the_commit_gets_nothing() -> None:
    door = Transacting(A, B)
    door.change(QueueDelete("/", "a"))
    published = door.commit().step(NOW_MS, never)
    assert published.fed == SHARD_1 and [body for _, body in door.stored()] == [b"1"]


BOUNDED = {"x-max-length": 1, "x-overflow": "reject-publish"}


async def test_room_is_set_aside_only_where_a_queue_may_refuse() -> None:
    door = Transacting(A)
    assert await door.publishing.reserve(door.client, door.channel.transaction.publishes) is None
    made = catalog([QueuePut("/", "full", 9, 1, arguments=BOUNDED)])
    door = Transacting(("", "full"), A, ("", "full"), made=made)
    asking = asyncio.ensure_future(
        door.publishing.reserve(door.client, door.channel.transaction.publishes)
    )
    await asyncio.sleep(0)
    ((shard, question, answer),) = door.links.asked
    assert shard == 1 and question.wanted == [(9, [1, 1])]
    answer.set_result(wire.Done(1))
    reservation = await asking
    assert reservation is not None
    publishing, client, held = (
        door.publishing,
        door.client,
        door.channel.transaction.take().publishes,
    )
    stored = await publishing.commit(client, door.channel, held, None, reservation, client)
    assert [type(what) for _, what in door.links.told] == [wire.Redeem, wire.Unreserve]
    door.confirm_all()
    assert await stored


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: transactions.select(None, confirming=True), "cannot switch from confirm"),
        (lambda: transactions.opened(None, 20), "not transactional"),
        (lambda: transactions.check_confirm_select(Transaction()), "cannot switch from tx"),
    ],
)
def test_what_a_channel_may_not_ask_for_is_raised(act: Callable[[], Any], text: str) -> None:
    with pytest.raises(ChannelException, match=text):
        act()


async def test_a_commit_that_breaks_off_accounts_for_what_it_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message that is in a batch must have a confirm that waits for it, whatever comes behind."""
    door = Transacting(A, B)
    commit = door.commit()
    pack, packed = door.publishing._messages.pack, []

    def fail_at_second(*arguments: Any) -> Any:
        if packed:
            raise RuntimeError("broken")
        packed.append(arguments)
        return pack(*arguments)

    monkeypatch.setattr(door.publishing._messages, "pack", fail_at_second)
    with pytest.raises(RuntimeError):
        commit.step(NOW_MS, never)
    assert len(door.links.waiting) == 1 and not door.links.packer.take_touched()
