"""Acks, rejects and requeues reach their shards; basic.get takes from the shards in turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pamqp import commands

from shardmq.broker.front_door.consume.acks import UNACKED_LISTED_MAX, holders, listed
from shardmq.broker.front_door.links.shard_requests import ShardDown, ShardRefused
from shardmq.broker.model.changes import QueuePut
from shardmq.shardd.wire import messages as wire
from tests.amqp.bytes_of import method
from tests.consuming.test_consume import STREAM, Consuming, message, names

EMPTY = wire.Got(1, b"", 0, False, 0)

# -- acks ------------------------------------------------------------------------------------------


async def holding(*bodies: bytes, prefetch: int = 0) -> tuple[Consuming, int]:
    """Return a consumer that has got these messages."""
    play = Consuming(prefetch=prefetch)
    number = await play.consume()
    play.deliver(number, 1, *bodies)
    return play, number


async def test_acks_are_told_to_the_shard_by_its_own_numbers() -> None:
    play, number = await holding(b"1", b"2", b"3", b"4", prefetch=10)
    play.says(1, commands.Basic.Ack(2, multiple=True))
    play.says(1, commands.Basic.Ack(4))
    assert play.shards.acks == [(0, number, wire.ACK, 1, 2, 5), (0, number, wire.ACK, 4, 4, 5)]
    assert (play.channel.unacked.count, play.channel.limit.unacked) == (1, 1)


async def test_rejects_and_requeues_do_not_wait() -> None:
    play, number = await holding(b"1", b"2", b"3")
    play.says(1, commands.Basic.Reject(1, requeue=False))
    play.says(1, commands.Basic.Nack(3, multiple=True, requeue=True))
    assert play.shards.acks == [(0, number, wire.REJECT, 1, 1), (0, number, wire.REQUEUE, 2, 3)]


async def test_recover_requeues_all_that_the_channel_holds() -> None:
    play, number = await holding(b"1", b"2")
    assert names(play.says(1, commands.Basic.Recover(requeue=True))) == ["Basic.RecoverOk"]
    assert play.shards.acks == [(0, number, wire.REQUEUE, 1, 2)]


@pytest.mark.parametrize(
    "what", [commands.Basic.Ack(5), commands.Basic.Reject(5)], ids=lambda what: what.name
)
async def test_a_tag_that_is_not_outstanding_ends_the_channel_and_what_came_before_it_counts(
    what: Any,
) -> None:
    play, number = await holding(b"1")
    play.read(method(1, commands.Basic.Ack(1)) + method(1, what))
    *_, close = play.got()
    assert (close.reply_code, close.reply_text) == (
        406,
        "PRECONDITION_FAILED - unknown delivery tag 5",
    )
    assert play.shards.acks[0][:5] == (0, number, wire.ACK, 1, 1)


async def test_acks_of_a_transaction_wait_for_its_commit_and_come_back_with_a_rollback() -> None:
    play, number = await holding(b"1", b"2")
    play.says(1, commands.Tx.Select())
    play.says(1, commands.Basic.Ack(1))
    assert play.shards.acks == [] and play.channel.unacked.count == 1
    consumer = play.consuming.consumers[number]
    assert play.channel.first_unsettled(consumer, 1) == 1
    play.says(1, commands.Tx.Rollback())
    assert play.channel.unacked.count == 2
    play.says(1, commands.Basic.Ack(2, multiple=True))
    assert play.connection.channels.by_number[1].report("owner", 0)["acks_uncommitted"] == 2


async def test_a_channel_with_a_limit_gets_more_when_it_settles() -> None:
    play = Consuming()
    number = await play.consume()
    play.says(1, commands.Basic.Qos(prefetch_count=1, global_=True))
    play.consuming.crediting.report(0, wire.CreditReport(number, 0, waits=True))
    play.deliver(number, 1, b"1")
    play.shards.allotted.clear()
    play.says(1, commands.Basic.Ack(1))
    assert play.shards.allotted == [(number, 2, wire.KEEP)]


async def test_what_waits_for_acks_is_listed_by_queue_and_with_its_age() -> None:
    play, _ = await holding(b"1", b"2")
    rows = listed(play.consuming.consumers.values(), 1, play.loop.now + 3)
    assert [(row["delivery_tag"], row["consumer_tag"], row["unacked_for"]) for row in rows] == [
        (1, "tag", 3000),
        (2, "tag", 3000),
    ]
    assert listed(play.consuming.consumers.values(), 2, 0.0) == []
    play.channel.unacked.add(3, 2 * UNACKED_LISTED_MAX, play.consuming.consumers[1], 1, 3)
    assert len(listed(play.consuming.consumers.values(), 1, 0.0)) == UNACKED_LISTED_MAX


# -- get -------------------------------------------------------------------------------------------


async def got(play: Consuming, *answers: Any, no_ack: bool = False, queue: str = "a") -> list[Any]:
    """Ask for a message; the shards answer in this order."""
    play.says(1, commands.Basic.Get(queue=queue, no_ack=no_ack))
    for answer in answers:
        await play.settled()
        play.shards.answer(answer)
    return await play.settled()


async def test_a_message_is_got_and_waits_for_its_ack() -> None:
    play = Consuming()
    ok, _, body = await got(play, wire.Got(1, message(b"hello"), 1, False, 5))
    assert (ok.name, ok.delivery_tag, ok.message_count, ok.redelivered) == (
        "Basic.GetOk",
        1,
        5,
        False,
    )
    assert body.value == b"hello" and play.channel.unacked.count == 1
    play.says(1, commands.Basic.Ack(1))
    (ack,) = play.shards.acks
    # a get does not count for limits
    assert ack[2:5] == (wire.ACK, 1, 1) and play.channel.limit.unacked == 0
    assert play.services.counts.got_manual == play.channel.got_manual == 1


async def test_cancelled_consumers_and_gets_are_listed_while_they_hold_messages() -> None:
    play, _ = await holding(b"1", b"2")
    play.says(1, commands.Basic.Cancel("tag"))
    await got(play, wire.Done(2), wire.Got(3, message(), 1, False, 0))
    assert play.channel.unacked.count == 3

    def held() -> list[tuple[str, int]]:
        rows = holders(play.consuming.consumers.values(), 1, play.loop.now)
        return [(row["consumer_tag"], row["messages_unacknowledged"]) for row in rows]

    assert held() == [("tag", 2), ("", 1)]
    play.says(1, commands.Basic.Ack(2, multiple=True))
    assert held() == [("", 1)]
    play.says(1, commands.Basic.Ack(3))
    assert held() == []


async def test_gets_of_several_queues_of_a_shard_are_listed_with_their_queue() -> None:
    play = Consuming()
    play.line.catalog.apply(QueuePut("/", "c", 3, 0))
    for number, queue in enumerate("acca", 1):
        await got(play, wire.Got(number, message(), number, False, 0), queue=queue)

    def tags(id: int) -> list[int]:
        rows = listed(play.consuming.consumers.values(), id, play.loop.now)
        assert {row["consumer_tag"] for row in rows} <= {""}
        of_all = holders(play.consuming.consumers.values(), id, play.loop.now)
        assert sum(row["messages_unacknowledged"] for row in of_all) == len(rows)
        return [row["delivery_tag"] for row in rows]

    assert (tags(1), tags(3), tags(0)) == ([1, 4], [2, 3], [])
    (getter,) = play.channel.getters.values()
    for number in range(5, 200):
        await got(play, wire.Got(number, message(), number, False, 0), queue="c")
        play.says(1, commands.Basic.Ack(number))
    assert (tags(1), tags(3)) == ([1, 4], [2, 3])
    assert len(getter._queues) < 100
    play.says(1, commands.Tx.Select())
    play.says(1, commands.Basic.Ack(2, multiple=True))
    for number in range(200, 300):
        await got(play, wire.Got(number, message(), number, False, 0), queue="c")
    assert (tags(1), tags(3)) == ([4], [3, *range(200, 300)])
    play.says(1, commands.Tx.Rollback())
    assert (tags(1), tags(3)) == ([1, 4], [2, 3, *range(200, 300)])


async def test_a_message_that_needs_no_ack_waits_for_none() -> None:
    play = Consuming()
    ok, *_ = await got(play, wire.Got(1, message(), 0, False, 0), no_ack=True)
    assert ok.name == "Basic.GetOk" and play.channel.unacked.count == 0
    assert play.services.counts.got_auto == play.channel.got_auto == 1


async def test_a_message_that_was_delivered_before_says_how_often() -> None:
    play = Consuming()
    ok, header, _ = await got(play, wire.Got(1, message(), 1, True, 0, 3))
    assert ok.redelivered and header.properties.headers == {"x-delivery-count": 3}


async def test_an_empty_queue_says_so() -> None:
    play = Consuming()
    assert names(await got(play, EMPTY)) == ["Basic.GetEmpty"]
    assert play.services.counts.got_empty == play.channel.got_empty == 1


async def test_a_message_for_a_channel_that_was_closed_meanwhile_is_not_sent() -> None:
    play = Consuming()
    play.says(1, commands.Basic.Get(queue="a"))
    await play.settled()
    play.consuming.release(play.channel)
    play.shards.answer(wire.Got(1, message(), 1, False, 0))
    assert await play.settled() == [] and play.channel.unacked.count == 0


@pytest.mark.parametrize(
    ("queue", "refused", "name", "code"),
    [
        ("a", ShardRefused(403, ""), "Channel.Close", 403),
        ("a", ShardRefused(404, ""), "Channel.Close", 404),
        ("none", None, "Channel.Close", 404),
        ("stream", None, "Connection.Close", 540),
    ],
)
async def test_a_get_that_cannot_be_is_refused(
    queue: str, refused: Any, name: str, code: int
) -> None:
    play = Consuming()
    play.line.catalog.apply(QueuePut("/", "stream", 3, 1, durable=True, arguments=STREAM))
    (close,) = await got(play, *([refused] if refused else []), queue=queue)
    assert (close.name, close.reply_code) == (name, code)


async def of_shards(play: Consuming, *answers: Any) -> list[Any]:
    """Get one message as got() does, from a virtual queue of two shard queues."""
    shards = (QueuePut("/", "s.0", 100, 0), QueuePut("/", "s.1", 101, 1))
    found: list[Any] = []
    task = asyncio.ensure_future(
        play.consuming.gets.get_of_shards(play.channel, "s", shards, no_ack=False)
    )
    for answer in answers:
        await play.settled()
        found.append(play.shards.asked[0][1].queue)  # type: ignore[attr-defined]
        play.shards.answer(answer)
    reply = await task
    return [*found, reply]


async def test_a_get_of_a_queue_whose_node_is_down_is_refused_and_virtual_queues_go_round_it() -> (
    None
):
    play = Consuming()
    (close,) = await got(play, ShardDown())
    assert (close.name, close.reply_code) == ("Channel.Close", 404)
    assert close.reply_text.endswith("is down or inaccessible")
    play = Consuming()
    link = play.shards.links[0]
    link.is_elsewhere, link.away_since, link.down_s = True, -60.0, 14.0
    for _ in range(2):
        queue, _ = await of_shards(play, wire.Got(1, message(), 1, False, 2))
        assert queue == 101


async def test_the_shards_of_a_virtual_queue_take_turns_and_all_that_is_ready_is_counted() -> None:
    play = Consuming()
    play.shards.ready = {101: 4}
    full = wire.Got(1, message(), 1, False, 2)
    queue, first = await of_shards(play, full)
    assert queue == 100 and isinstance(first, bytes)
    play.connection.answer(1, first)
    play.aio.run()
    assert play.got()[0].message_count == 2 + 4
    queue, _ = await of_shards(play, full)
    assert queue == 101
    queue, _ = await of_shards(play, full)
    assert queue == 100


async def test_when_the_shard_whose_turn_it_is_has_none_another_is_asked_that_has_some() -> None:
    play = Consuming()
    play.shards.ready = {101: 1}
    *asked, reply = await of_shards(play, EMPTY, wire.Got(1, message(), 1, False, 0))
    assert asked == [100, 101] and isinstance(reply, bytes)
    play.shards.ready = {}
    *asked, reply = await of_shards(play, EMPTY)
    assert asked == [101] and isinstance(reply, commands.Basic.GetEmpty)


async def test_many_shards_are_asked_what_they_have_only_when_the_first_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardmq.broker.front_door.consume.get.COUNTED_SHARDS_MAX", 1)
    play = Consuming()
    play.shards.ready = {101: 4}
    _, reply = await of_shards(play, wire.Got(1, message(), 1, False, 2))
    play.connection.answer(1, reply)
    play.aio.run()
    assert play.got()[0].message_count == 2


async def test_cursors_of_virtual_queues_do_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardmq.broker.front_door.consume.get.CURSORS_MAX", 2)
    gets = Consuming().consuming.gets
    assert [gets._next_cursor(("/", name), 3) for name in "aabca"] == [0, 1, 0, 0, 0]
    assert len(gets._cursors) == 2
