"""Test consumers of single queues: deliveries, cancel, limits, and restarts of a shard."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from pamqp import commands

from shardmq.broker.amqp import properties
from shardmq.broker.front_door.links.shard_requests import ShardDown, ShardRefused
from shardmq.broker.model.changes import QueuePut
from shardmq.shardd.wire import messages as wire
from tests.connections.connection_play import WANTS_ALL, Play

STREAM = {"x-queue-type": "stream"}


def names(said: list[Any]) -> list[str]:
    return [what.name for what in said]


def message(body: bytes = b"body") -> bytes:
    return properties.stored_with(b"", b"a", {}, body)


def section(
    play: Play, number: int, first: int, *bodies: bytes, redelivered: bool = False, times: int = 0
) -> Any:
    blob = b"".join(message(body) for body in bodies)
    return (
        play.connection.id,
        1,
        number,
        first,
        redelivered,
        len(bodies),
        memoryview(blob),
        times,
        False,
    )


class Consuming(Play):
    """An open connection with one channel."""

    def __init__(self, prefetch: int = 0, **config: Any) -> None:
        super().__init__(**config)
        self.open(**WANTS_ALL)
        self.channel = self.connection.channels.by_number[1].consuming
        self.channel.prefetch = prefetch
        self.consuming = self.services.consuming

    async def consume(self, tag: str = "tag", queue: str = "a", **terms: Any) -> int:
        """Begin a consumer; return its number."""
        self.says(1, commands.Basic.Consume(queue=queue, consumer_tag=tag, **terms))
        await self.settled()
        attach = self.shards.answer(wire.Done(1))
        await self.settled()
        assert isinstance(attach, wire.Attach)
        return attach.consumer

    def queue_gone(self, number: int) -> None:
        """Hear from the shard that the queue of a consumer is deleted."""
        for ended in self.consuming.cancelled(number):
            ended.client.consumer_ended(ended)

    def deliver(
        self, number: int, first: int, *bodies: bytes, shard: int = 0, **how: Any
    ) -> list[Any]:
        self.consuming.deliveries.deliver(shard, section(self, number, first, *bodies, **how))
        self.aio.run()
        return self.got()


# -- consume ---------------------------------------------------------------------------------------


async def test_a_consumer_is_attached_at_the_shard_of_its_queue_and_told_so() -> None:
    play = Consuming(prefetch=7)
    play.says(1, commands.Basic.Consume(queue="b", consumer_tag="tag", arguments={"x-priority": 3}))
    await play.settled()
    shard, attach, _ = play.shards.asked[0]
    assert isinstance(attach, wire.Attach)
    assert (shard, attach.queue, attach.tag, attach.prefetch, attach.priority) == (
        1,
        2,
        "tag",
        7,
        3,
    )
    assert (attach.connection, attach.channel, attach.limited, attach.resumed) == (
        9,
        1,
        False,
        False,
    )
    play.shards.answer(wire.Done(1))
    (ok,) = await play.settled()
    assert (ok.name, ok.consumer_tag) == ("Basic.ConsumeOk", "tag")


async def test_a_consumer_without_a_tag_gets_one_and_who_waits_for_no_answer_gets_none() -> None:
    play = Consuming()
    play.says(1, commands.Basic.Consume(queue="a", nowait=True))
    await play.settled()
    play.shards.answer(wire.Done(1))
    assert await play.settled() == []
    (tag,) = play.channel.consumers
    assert tag.startswith("amq.ctag-")


async def test_a_delivery_that_overtakes_the_answer_comes_behind_consume_ok() -> None:
    play = Consuming()
    play.says(1, commands.Basic.Consume(queue="a", consumer_tag="tag"))
    await play.settled()
    number = play.shards.asked[0][1].consumer  # type: ignore[attr-defined]
    said = play.deliver(number, 1, b"early")
    assert names(said)[:2] == ["Basic.ConsumeOk", "Basic.Deliver"]
    play.shards.answer(wire.Done(1))
    assert await play.settled() == []


@pytest.mark.parametrize(
    ("terms", "code", "text"),
    [
        ({"queue": "none"}, 404, "no queue 'none' in vhost '/'"),
        ({"queue": ""}, 404, "no previously declared queue"),
        ({"queue": "a", "arguments": {"x-priority": "high"}}, 406, "x-priority"),
        ({"queue": "a", "arguments": {"x-key-affinity": 3}}, 406, "x-key-affinity"),
        ({"queue": "amq.rabbitmq.reply-to"}, 406, "reply consumer cannot acknowledge"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_consume_that_cannot_be_ends_its_channel(
    terms: dict[str, Any], code: int, text: str
) -> None:
    play = Consuming()
    play.says(1, commands.Basic.Consume(consumer_tag="tag", **terms))
    (close,) = await play.settled()
    assert (close.name, close.reply_code) == ("Channel.Close", code) and text in close.reply_text
    assert play.consuming.consumers == {}


async def test_a_tag_that_is_taken_and_a_consumer_too_many_end_the_connection() -> None:
    taken, many = Consuming(), Consuming(channel_consumers_max=1)
    for play, tag, text in (
        (taken, "tag", "attempt to reuse consumer tag 'tag'"),
        (many, "other", "maximum (1)"),
    ):
        await play.consume("tag")
        play.says(1, commands.Basic.Consume(queue="a", consumer_tag=tag))
        (close,) = await play.settled()
        assert (close.name, close.reply_code) == (
            "Connection.Close",
            530,
        ) and text in close.reply_text


DOWN = "home node 'shardmq@b' of durable queue 'a' in vhost '/' is down or inaccessible"


@pytest.mark.parametrize(
    ("refused", "code", "text"),
    [
        (ShardRefused(404, "as it said"), 404, "no queue 'a'"),
        (ShardRefused(403, "as it said"), 403, "in exclusive use"),
        (ShardRefused(406, "as it said"), 406, "as it said"),
        (ShardDown(), 404, DOWN),
    ],
)
async def test_what_the_shard_refuses_is_told_in_the_words_of_rabbitmq(
    refused: Exception, code: int, text: str
) -> None:
    play = Consuming()
    play.says(1, commands.Basic.Consume(queue="a", consumer_tag="tag"))
    await play.settled()
    play.shards.links[0].node = "shardmq@b"
    play.shards.answer(refused)
    (close,) = await play.settled()
    assert close.reply_code == code and text in close.reply_text
    assert play.consuming.consumers == {}


@pytest.mark.parametrize(
    ("terms", "hard"),
    [({"no_ack": True}, True), ({"exclusive": True}, False), ({}, False)],
    ids=str,
)
async def test_a_stream_is_not_consumed_without_acks_exclusively_or_without_a_prefetch(
    terms: dict[str, Any], hard: bool
) -> None:
    play = Consuming(prefetch=0 if not terms else 5)
    play.line.catalog.apply(QueuePut("/", "stream", 3, 1, durable=True, arguments=STREAM))
    play.says(1, commands.Basic.Consume(queue="stream", consumer_tag="tag", **terms))
    (close,) = await play.settled()
    assert close.name == ("Connection.Close" if hard else "Channel.Close")


async def test_a_stream_is_read_from_where_the_consumer_says_and_messages_have_their_offset() -> (
    None
):
    play = Consuming(prefetch=5)
    play.line.catalog.apply(QueuePut("/", "stream", 3, 1, durable=True, arguments=STREAM))
    play.says(
        1,
        commands.Basic.Consume(
            queue="stream", consumer_tag="tag", arguments={"x-stream-offset": 7}
        ),
    )
    await play.settled()
    attach = play.shards.answer(wire.AttachedAt(1, 7))
    await play.settled()
    assert isinstance(attach, wire.AttachReader) and (attach.read.start, attach.read.value) == (
        "offset",
        7,
    )
    blob = struct.pack("<Q", 7) + message()
    at = (9, 1, attach.consumer, 1, False, 1, memoryview(blob), 0, False)
    play.consuming.deliveries.deliver(1, at)
    play.aio.run()
    _, header, _ = play.got()
    assert header.properties.headers == {"x-stream-offset": 7}
    # Its shard starts anew: it goes on at what is not acknowledged.
    play.consuming.restarted(1, play.queue_gone)
    _, again, _ = play.shards.asked[0]
    assert isinstance(again, wire.AttachReader) and again.resumed and again.read.value == 7


# -- deliveries ------------------------------------------------------------------------------------


async def test_deliveries_have_consecutive_tags_and_wait_for_their_acks() -> None:
    play = Consuming()
    number = await play.consume()
    said = play.deliver(number, 1, b"one", b"two")
    assert [what.delivery_tag for what in said if what.name == "Basic.Deliver"] == [1, 2]
    assert [what.value for what in said if what.name == "ContentBody"] == [b"one", b"two"]
    assert (play.channel.unacked.count, play.channel.limit.unacked, play.channel.next_tag) == (
        2,
        2,
        3,
    )
    assert play.services.counts.delivered_manual == 2
    assert play.channel.counted()[3] == 2
    (again, *_) = play.deliver(number, 3, b"three", redelivered=True, times=2)
    assert again.redelivered and again.delivery_tag == 3


async def test_deliveries_that_need_no_ack_wait_for_none() -> None:
    play = Consuming()
    number = await play.consume(no_ack=True)
    play.deliver(number, 1, b"one")
    assert (play.channel.unacked.count, play.channel.limit.unacked) == (0, 0)
    assert play.services.counts.delivered_auto == play.channel.delivered_auto == 1


async def test_a_delivery_for_a_consumer_that_was_released_gives_its_credit_back() -> None:
    play = Consuming()
    assert play.deliver(77, 1, b"one") == []
    assert play.shards.credits == [(0, 1, 9, len(message(b"one")))]


async def test_large_messages_are_written_from_where_they_lie() -> None:
    play = Consuming()
    number = await play.consume()
    assert play.loop.borrowers == []
    play.consuming.deliveries.deliver(0, section(play, number, 1, b"x" * (20 << 10)))
    assert play.loop.borrowers == [play.connection.output]


async def test_the_firehose_sees_what_is_delivered() -> None:
    seen: list[Any] = []
    tracing: Any = type(
        "Tracing", (), {"delivered": lambda self, client, *what: seen.append(what[:4]) or 2}
    )()
    play = Consuming()
    number = await play.consume()
    play.consuming.trace(tracing)
    play.deliver(number, 1, b"one", redelivered=True)
    assert seen == [(1, "a", True, 1)]
    play.shards.crowd = [1]
    play.deliver(number, 2, b"another")
    # a client waits for the shards that get its copies
    assert play.connection.socket.paused == 0b10
    play.loop.publish_room(1)
    play.consuming.trace(None)
    play.deliver(number, 3, b"two")
    assert len(seen) == 2


# -- cancel, the end -------------------------------------------------------------------------------


async def test_a_cancelled_consumer_keeps_what_it_holds_until_that_is_settled() -> None:
    play = Consuming()
    number = await play.consume()
    play.deliver(number, 1, b"one")
    play.says(1, commands.Basic.Cancel("tag"))
    await play.settled()
    detach = play.shards.answer(wire.Done(1))
    assert isinstance(detach, wire.Detach) and detach.consumer == number
    assert names(await play.settled()) == ["Basic.CancelOk"]
    assert number in play.consuming.consumers and play.shards.asked == []
    play.says(1, commands.Basic.Ack(1))
    await play.consume("another")
    play.says(1, commands.Basic.Cancel("another"))
    await play.settled()
    play.shards.answer(wire.Done(1))
    await play.settled()
    released = [
        what.consumers for _, what, _ in play.shards.asked if isinstance(what, wire.Release)
    ]
    assert sorted(released) == [[number], [number + 1]] and play.consuming.consumers == {}


async def test_a_queue_that_goes_with_its_last_consumer_is_gone_behind_cancel_ok() -> None:
    play = Consuming()
    await play.consume()
    play.says(1, commands.Basic.Cancel("tag"))
    await play.settled()
    play.shards.answer(wire.Done(1, closed=[1]))
    assert names(await play.settled()) == ["Basic.CancelOk"] and play.line.gone == [1]


async def test_a_cancel_of_no_consumer_is_answered_and_one_that_wants_no_answer_is_not() -> None:
    play = Consuming()
    play.says(1, commands.Basic.Cancel("none"))
    assert names(await play.settled()) == ["Basic.CancelOk"]
    play.says(1, commands.Basic.Cancel("none", nowait=True))
    assert await play.settled() == []


async def test_the_client_is_told_when_the_queue_of_its_consumer_goes() -> None:
    play = Consuming()
    number = await play.consume()
    play.deliver(number, 1, b"one")
    play.queue_gone(number)
    play.queue_gone(number)
    play.queue_gone(99)
    play.aio.run()
    assert play.names() == ["Basic.Cancel"] and play.channel.consumers == {}
    assert play.channel.unacked.count == 1 and number in play.consuming.consumers


async def test_the_end_of_a_channel_releases_all_its_consumers_at_each_shard_at_once() -> None:
    play = Consuming()
    numbers = [
        await play.consume("one", "a"),
        await play.consume("two", "a"),
        await play.consume("three", "b"),
    ]
    play.consuming.release(play.channel)
    releases = {shard: what.consumers for shard, what, _ in play.shards.asked}  # type: ignore[attr-defined]
    assert releases == {0: numbers[:2], 1: numbers[2:]}
    assert (
        play.consuming.consumers == {} and play.channel.consumers == {} and not play.channel.is_open
    )


async def test_a_consumer_that_a_closed_channel_asked_for_is_not_announced() -> None:
    play = Consuming()
    play.says(1, commands.Basic.Consume(queue="a", consumer_tag="tag"))
    await play.settled()
    play.consuming.release(play.channel)
    play.shards.answer(wire.Done(1))
    assert await play.settled() == []


# -- direct reply-to -------------------------------------------------------------------------------


REPLY_TO = commands.Basic.Consume(queue="amq.rabbitmq.reply-to", consumer_tag="tag", no_ack=True)


async def reply_consumer() -> Consuming:
    play = Consuming()
    play.says(1, REPLY_TO)
    await play.settled()
    request = play.line.asked[0][0]
    play.line.catalog.apply(
        QueuePut("/", request.name, 50, 1, auto_delete=True, owner=play.connection.session.owner)
    )
    play.line.answer(name=request.name)
    await play.settled()
    return play


async def test_a_reply_consumer_gets_a_queue_of_its_own() -> None:
    play = await reply_consumer()
    play.shards.answer(wire.Done(1))
    assert names(await play.settled()) == ["Basic.ConsumeOk"]
    channel = play.connection.channels.by_number[1]
    assert channel.reply_to.startswith("amq.rabbitmq.reply-to.") and list(
        play.consuming._replies.here
    ) == [50]
    play.says(
        1, commands.Basic.Consume(queue="amq.rabbitmq.reply-to", consumer_tag="two", no_ack=True)
    )
    (close,) = await play.settled()
    assert close.reply_text.endswith("reply consumer already set")
    assert channel.reply_to == "" and play.consuming._replies.here == {}


async def test_replies_do_not_wait_for_the_limit_of_the_channel() -> None:
    play = await reply_consumer()
    play.shards.answer(wire.Done(1))
    await play.settled()
    play.says(1, commands.Basic.Qos(prefetch_count=1, global_=True))
    assert play.shards.allotted == []


async def test_a_cancelled_reply_consumer_takes_no_replies() -> None:
    play = await reply_consumer()
    play.shards.answer(wire.Done(1))
    await play.settled()
    play.says(1, commands.Basic.Cancel("tag"))
    await play.settled()
    assert (
        play.connection.channels.by_number[1].reply_to == "" and play.consuming._replies.here == {}
    )


async def test_a_reply_queue_that_comes_for_a_closed_channel_is_deleted() -> None:
    play = Consuming()
    play.says(1, REPLY_TO)
    await play.settled()
    request = play.line.asked[0][0]
    play.connection.channels.end(play.connection.channels.by_number[1])
    play.line.catalog.apply(QueuePut("/", request.name, 50, 1, owner=play.connection.session.owner))
    play.line.answer(name=request.name)
    await play.settled()
    assert type(play.line.asked[0][0]).__name__ == "QueueRemove"
    play.line.answer()
    assert await play.settled() == [] and play.shards.asked == []


# -- limits of a channel, shards that go and come --------------------------------------------------


async def test_a_limit_of_the_channel_holds_for_all_its_consumers() -> None:
    play = Consuming()
    one, two = await play.consume("one", "a"), await play.consume("two", "b")
    assert names(play.says(1, commands.Basic.Qos(prefetch_count=3, global_=True))) == [
        "Basic.QosOk"
    ]
    assert play.shards.allotted == [(one, 0, wire.STOP), (two, 0, wire.STOP)]
    play.shards.allotted.clear()
    report = play.consuming.crediting.report
    report(0, wire.CreditReport(one, 0, waits=True))
    assert play.shards.allotted == [(one, 1, wire.KEEP)]  # its share
    play.deliver(one, 1, b"x")
    assert play.shards.allotted[1:] == [(one, 3, wire.KEEP)]  # it used that: now all there is
    assert (play.channel.limit.allotted, play.channel.limit.unacked) == (2, 1)
    report(1, wire.CreditReport(two, 0, waits=True))
    assert play.shards.allotted[2:] == [(one, 3, wire.DRAIN)]
    report(0, wire.CreditReport(one, 3, waits=False))  # it had no more
    assert play.shards.allotted[3:] == [(two, 1, wire.KEEP)]
    report(0, wire.CreditReport(99, 1, waits=True))
    assert (play.channel.limit.allotted, play.channel.limit.unacked) == (1, 1)


async def test_a_consumer_of_a_stream_leaves_the_limit_of_the_channel_to_the_others() -> None:
    play = Consuming(prefetch=5)
    play.line.catalog.apply(QueuePut("/", "stream", 3, 1, durable=True, arguments=STREAM))
    play.says(1, commands.Basic.Consume(queue="stream", consumer_tag="tag"))
    await play.settled()
    attach = play.shards.answer(wire.AttachedAt(1, 7))
    await play.settled()
    assert isinstance(attach, wire.AttachReader)
    play.says(1, commands.Basic.Qos(prefetch_count=1, global_=True))
    blob = struct.pack("<Q", 7) + message()
    at = (9, 1, attach.consumer, 1, False, 1, memoryview(blob), 0, False)
    play.consuming.deliveries.deliver(1, at)
    assert (play.channel.unacked.count, play.channel.limit.free) == (1, 1)
    play.says(1, commands.Basic.Ack(delivery_tag=1))
    assert (play.channel.unacked.count, play.channel.limit.free) == (0, 1)
    assert play.shards.allotted == []


async def test_what_a_shard_that_is_gone_might_have_taken_is_for_the_others() -> None:
    play = Consuming()
    one, two = await play.consume("one", "a"), await play.consume("two", "b")
    play.says(1, commands.Basic.Qos(prefetch_count=3, global_=True))
    play.consuming.crediting.report(0, wire.CreditReport(one, 0, waits=True))
    play.deliver(one, 1, b"x")
    play.consuming.crediting.report(0, wire.CreditReport(one, 1, waits=True))
    assert play.channel.limit.free == 0
    play.consuming.crediting.report(1, wire.CreditReport(two, 0, waits=True))
    play.shards.allotted.clear()
    play.consuming.away(0)
    assert play.shards.allotted == [(two, 2, wire.KEEP)]


async def test_consumers_are_attached_again_when_their_shard_has_started_anew() -> None:
    play = Consuming()
    one = await play.consume("one", "a")
    await play.consume("two", "b")
    # asked again by the link itself
    play.says(1, commands.Basic.Consume(queue="a", consumer_tag="asked"))
    await play.settled()
    play.shards.asked.clear()
    play.consuming.restarted(0, play.queue_gone)
    (again,) = play.shards.asked
    assert isinstance(again[1], wire.Attach) and again[1].consumer == one and again[1].resumed
    play.shards.answer(ShardRefused(404, "no such queue"))
    assert names(await play.settled()) == ["Basic.Cancel"]  # its queue went meanwhile


async def test_a_new_process_of_a_shard_hears_of_consumers_leaving_auto_delete_queues() -> None:
    play = Consuming()
    play.line.catalog.apply(QueuePut("/", "auto", 6, 0, auto_delete=True))
    number = await play.consume("tag", "auto")
    play.says(1, commands.Basic.Cancel("tag"))
    await play.settled()
    play.shards.asked.clear()
    play.consuming.restarted(0, play.queue_gone)
    kinds = [type(what) for _, what, _ in play.shards.asked]
    assert kinds == [wire.Attach, wire.Release]
    attach = play.shards.asked[0][1]
    assert isinstance(attach, wire.Attach) and attach.consumer == number and attach.limited


@pytest.mark.parametrize("was_sent", [True, False])
async def test_a_refused_consumer_leaves_an_auto_delete_queue_if_its_shard_may_have_it(
    was_sent: bool,
) -> None:
    play = Consuming()
    play.line.catalog.apply(QueuePut("/", "auto", 6, 0, auto_delete=True))
    play.says(1, commands.Basic.Consume(queue="auto", consumer_tag="tag"))
    await play.settled()
    attach = play.shards.answer(ShardDown(was_sent))
    assert names(await play.settled()) == ["Channel.Close"] and play.consuming.consumers == {}
    play.shards.asked.clear()
    for kinds in ([wire.Attach, wire.Release] if was_sent else [], []):
        play.consuming.restarted(0, play.queue_gone)
        assert [type(what) for _, what, _ in play.shards.asked] == kinds
        for _, what, _ in play.shards.asked:
            assert isinstance(attach, wire.Attach) and isinstance(what, wire.Attach | wire.Release)
            of = [what.consumer] if isinstance(what, wire.Attach) else what.consumers
            assert of == [attach.consumer]
        while play.shards.asked:
            play.shards.answer(wire.Done(1))
        await play.settled()


async def test_an_answer_of_an_earlier_process_says_not_that_a_consumer_has_left() -> None:
    play = Consuming()
    play.line.catalog.apply(QueuePut("/", "auto", 6, 0, auto_delete=True))
    await play.consume("tag", "auto")
    play.shards.asked.clear()
    play.says(1, commands.Channel.Close(200, "", 0, 0))
    await play.settled()
    (early,) = play.shards.asked
    play.consuming.restarted(0, play.queue_gone)
    early[2].set_result(wire.Done(1))
    await play.settled()
    for kinds in ([wire.Attach, wire.Release], []):
        play.shards.asked.clear()
        play.consuming.restarted(0, play.queue_gone)
        assert [type(what) for _, what, _ in play.shards.asked] == kinds
        for _, _, asked in play.shards.asked:
            asked.set_result(wire.Done(1))
        await play.settled()
