"""Messages with an id are deferred until shards have said which are the first of their ids."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from pamqp import commands

from shardmq.broker.amqp import ChannelException, Publishes
from shardmq.broker.front_door.publish.effects import Published
from shardmq.broker.model.changes import BindingPut, ExchangePut, QueuePut
from shardmq.shardd.dedup_ids import DedupIds
from shardmq.shardd.wire import messages as wire
from tests.publishing.test_publish import A, Door
from tests.support.fake_publishing import catalog

ONCE = {"x-message-deduplication": True}
ID = "x-deduplication-header"
EXCHANGE, QUEUE = ("once", ""), ("", "q")


def with_id(
    id: Any, end: tuple[str, str] = EXCHANGE, channel: int = 1
) -> tuple[int, tuple[str, str], Any, bool]:
    return channel, end, {"headers": {ID: id}}, False


class Deduplicating(Door):
    """A front door whose shards remember ids and answer at once."""

    def __init__(self) -> None:
        super().__init__(
            catalog(
                [
                    ExchangePut("/", "once", "fanout", arguments=ONCE),
                    BindingPut("/", "once", "queue", "a", ""),
                    QueuePut("/", "q", 8, 1, arguments=ONCE),
                ]
            )
        )
        self.shard = DedupIds()
        self.links.ask = self._answer  # type: ignore[method-assign]

    def _answer(self, shard: int, make: Any) -> asyncio.Future[Any]:
        question = make(1)
        self.links.asked.append((shard, question, asyncio.get_running_loop().create_future()))
        self.links.asked[-1][2].set_result(wire.DedupVerdicts(1, self.shard.ask(0, question, 0)))
        return self.links.asked[-1][2]

    async def publish_all(self, *messages: Any) -> Published:
        published = self.publish(*messages)
        for number, event in published.deferred:
            await self.publish_deferred(number, event)
        return published

    async def publish_deferred(self, number: int, event: Publishes) -> None:
        client = self.client
        await self.publishing.publish_deferred(
            client, client.channels, client.channels[number], event, client
        )

    def bodies(self) -> list[bytes]:
        return [body for _, body in self.stored()]


def test_a_message_with_an_id_and_all_behind_it_on_its_channel_are_deferred() -> None:
    door = Deduplicating()
    published = door.publish(
        (1, A, {}, False),
        with_id("x"),
        (3, A, {}, False),
        (1, A, {}, False),
        with_id("y", QUEUE, 3),
    )
    assert [(number, event.count) for number, event in published.deferred] == [(1, 2), (3, 1)]
    assert door.bodies() == [b"0", b"2"]
    assert door.links.asked == []


def test_a_message_without_an_id_passes_at_once() -> None:
    door = Deduplicating()
    assert door.publish(
        (1, EXCHANGE, {}, False), (1, QUEUE, {"headers": {"other": 1}}, False)
    ).is_plain
    assert door.bodies() == [b"0", b"1"]


@pytest.mark.parametrize("end", [EXCHANGE, QUEUE])
async def test_only_the_first_of_an_id_is_stored_and_others_are_counted(
    end: tuple[str, str],
) -> None:
    door = Deduplicating()
    await door.publish_all(with_id("x", end), with_id("y", end), with_id("x", end))
    assert door.bodies() == [b"0", b"1"]
    await door.publish_all(with_id("y", end), with_id("z", end))
    assert door.bodies() == [b"1"]
    assert door.publishing.dedup.duplicates == 2
    assert len(door.links.asked) == 2  # one question for each read


@pytest.mark.parametrize("stored", [True, False])
async def test_a_duplicate_is_confirmed_as_its_first_copy_is(stored: bool) -> None:
    door = Deduplicating()
    await door.publish_all(with_id("x", channel=2), with_id("x", channel=2))
    waiting, door.links.waiting = door.links.waiting, []
    door.links.told.clear()
    for each in waiting:
        each.confirmed() if stored else each.lost()
    await asyncio.sleep(0)
    shard, became = door.links.told[0]
    assert isinstance(became, wire.DedupOutcome)
    peers: Any = {
        0: type("Peer", (), {"tell": lambda self, said: door.publishing.dedup.told(shard, said)})()
    }
    door.shard.became(0, became, peers)
    door.client.answer_confirms()
    kind = commands.Basic.Ack if stored else commands.Basic.Nack
    assert {type(each) for each in door.said()} == {kind}


async def test_while_the_shard_is_away_every_message_passes() -> None:
    door = Deduplicating()
    for link in door.links.links:
        link.up = False
    await door.publish_all(with_id("x"), with_id("x"))
    assert door.bodies() == [b"0", b"1"] and door.links.asked == []


async def test_an_error_is_raised_when_what_was_before_it_is_published() -> None:
    door = Deduplicating()
    with pytest.raises(ChannelException, match="no such"):
        await door.publish_all(
            with_id("x"), (1, A, {}, False), (1, ("no such", ""), {}, False), (1, A, {}, False)
        )
    assert door.bodies() == [b"0", b"1"]


async def test_a_channel_that_closes_meanwhile_has_published_nothing_and_its_ids_are_free() -> None:
    door = Deduplicating()
    published = door.publish(with_id("x"))
    ((number, event),) = published.deferred
    waiting = door.publish_deferred(number, event)
    door.client.channels[1].is_open = False
    await waiting
    await asyncio.sleep(0)
    assert door.bodies() == []
    assert [
        (what.stored, what.lost)
        for _, what in door.links.told
        if isinstance(what, wire.DedupOutcome)
    ] == [([], [1])]


async def test_a_transaction_asks_before_it_is_committed_and_says_nothing_without_ids() -> None:
    door = Deduplicating()
    (event,) = [event for _, event in door.publish(with_id("x")).deferred]
    held = [door.publishing._messages.decide(door.client, door.client.channels[1], event, 0, 0)]
    answers = await door.publishing.ask_duplicates(door.client, held, door.client)
    assert answers is not None and len(door.links.asked) == 1
    assert await door.publishing.ask_duplicates(door.client, [], door.client) is None
    assert len(door.links.asked) == 1


async def test_an_error_behind_deferred_messages_holds_nothing_when_it_is_answered() -> None:
    door = Deduplicating()
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ChannelException, match="no such") as raised:
            await door.publish_all(with_id("x"), (1, ("no such", ""), {}, False))
        error = weakref.ref(raised.value)
        del raised
        assert error() is None, "the error and a frame hold each other until the collector comes"
    finally:
        gc.enable()
