"""On the wire, consume-ok comes before its deliveries, and nothing comes behind a close-ok."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pamqp import commands

from shardmq.broker.front_door.consume.consumers import Consumer
from shardmq.broker.front_door.consume.consuming import Consuming as FrontDoorConsuming
from shardmq.broker.front_door.events import ControllerEvents
from shardmq.broker.shared.control import AssignmentOrder
from shardmq.shardd.wire import messages as wire
from tests.amqp.bytes_of import method
from tests.connections.connection_play import FD
from tests.connections.test_connection import CLOSE, CLOSE_CHANNEL
from tests.consumer_groups.test_group_consumers import NAMES, Grouped
from tests.consuming.test_consume import Consuming, names

HISTORIES = 60
STEPS = 40


async def test_a_delivery_to_a_group_consumer_before_its_answer_brings_consume_ok() -> None:
    play = Grouped()
    begun = play.begin()
    await play.settled()
    play.line.answer()  # the controller has let it in, and whoever waits for that has not run yet
    group = play.channel.consumers["tag"]
    play.order(group, "give")  # type: ignore[arg-type]
    number = group.assignments[NAMES[0]].number  # type: ignore[union-attr]
    assert names(play.deliver(number, 1, b"early"))[:2] == ["Basic.ConsumeOk", "Basic.Deliver"]
    assert await play.settled() == [] and begun.done()


async def test_a_queue_that_goes_at_once_takes_its_consumer_behind_consume_ok() -> None:
    play = Consuming()
    play.says(1, commands.Basic.Consume(queue="a", consumer_tag="tag"))
    await play.settled()
    number = play.shards.asked[0][1].consumer  # type: ignore[attr-defined]
    play.shards.answer(wire.Done(1))
    play.queue_gone(number)
    assert names(await play.settled()) == ["Basic.ConsumeOk", "Basic.Cancel"]


async def test_a_virtual_queue_that_goes_at_once_takes_its_consumer_behind_consume_ok() -> None:
    play = Grouped()
    begun = play.begin()
    await play.settled()
    play.line.answer()
    play.order(play.channel.consumers["tag"], "close")  # type: ignore[arg-type]
    assert names(await play.settled()) == ["Basic.ConsumeOk", "Basic.Cancel"] and begun.done()


async def test_the_order_of_the_controller_that_ends_a_consumer_reaches_its_client() -> None:
    play = Grouped()
    group = await play.join()
    play.got()
    events = ControllerEvents()
    events.attend(play.services, *[None] * 4)  # type: ignore[arg-type]
    events.assignment_orders([AssignmentOrder("close", group.number, NAMES[0], None, None, False)])
    assert names(await play.settled()) == ["Basic.Cancel"] and play.channel.consumers == {}


async def test_what_shards_send_while_and_after_a_channel_closes_does_not_follow_close_ok() -> None:
    play = Consuming()
    number = await play.consume()
    assert play.says(1, CLOSE_CHANNEL) == []
    await play.settled()
    assert play.deliver(number, 1, b"too late") == []
    play.shards.answer(wire.Done(1))
    assert names(await play.settled()) == ["Channel.CloseOk"]
    assert play.deliver(number, 2, b"much too late") == []


async def test_nothing_follows_the_close_ok_of_a_connection() -> None:
    play = Consuming()
    number = await play.consume()
    play.sock.room = 0  # the client takes nothing for the moment
    play.read(method(0, CLOSE))
    await play.settled()
    play.shards.answer(wire.Done(1))
    await play.settled()
    play.deliver(number, 1, b"too late")
    play.queue_gone(number)
    play.connection.write(b"a confirm")
    play.sock.room = 1 << 20
    play.aio.writers[FD]()
    assert play.names() == ["Connection.CloseOk"]


# -- random histories ------------------------------------------------------------------------------


class History(Consuming):
    """Consumers that come and go on one channel.

    Shards answer and deliver whenever they like.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.wire: list[Any] = []
        self.attached: dict[int, int] = {}  # consumer number and its last delivery
        self.tags = 0

    async def step(self) -> None:
        match self.random.choice(
            ["consume", "answer", "answer", "deliver", "deliver", "cancel", "close", "run", "gone"]
        ):
            case "consume":
                self.tags += 1
                self.says_more(
                    commands.Basic.Consume(
                        queue=self.random.choice("ab"), consumer_tag=f"c{self.tags}"
                    )
                )
            case "answer" if self.shards.asked:
                self.answer_oldest()
            case "deliver" if self.attached:
                number = self.random.choice(list(self.attached))
                self.attached[number] += 1
                self.wire += self.deliver(number, self.attached[number], b"x")
            case "cancel" if self.tags:
                self.says_more(commands.Basic.Cancel(f"c{self.random.randint(1, self.tags)}"))
            case "close" if self.random.random() < 0.3:
                self.says_more(CLOSE_CHANNEL)
                await self.finish()
                self.says_more(commands.Channel.Open())
                self.connection.channels.meet_all(self.connection)
                self.channel = self.connection.channels.by_number[1].consuming
            case "gone" if self.attached and self.random.random() < 0.3:
                number = self.random.choice(list(self.attached))
                del self.attached[number]
                self.queue_gone(number)
            case "run":
                self.wire += await self.settled()

    def says_more(self, what: Any) -> None:
        self.wire += self.says(1, what)

    def answer_oldest(self) -> None:
        asked = self.shards.asked[0][1]
        match asked:
            case wire.Attach():
                self.attached[asked.consumer] = 0
            case wire.Detach():
                self.attached.pop(asked.consumer, None)
            case wire.Release():
                for number in asked.consumers:
                    self.attached.pop(number, None)
        self.shards.answer(wire.Done(1))

    async def finish(self) -> None:
        """Let the shards answer all, and deliver a little meanwhile."""
        self.wire += await self.settled()
        while self.shards.asked:
            for number in self.attached:
                self.attached[number] += 1
                self.wire += self.deliver(number, self.attached[number], b"x")
            self.answer_oldest()
            self.wire += await self.settled()


def check(said: list[Any], seed: int) -> None:
    """Check the order of all that a client got on its channel."""
    is_open, tags = True, set()
    for what in said:
        if what.name == "Channel.OpenOk":
            is_open = True
            continue
        assert is_open, f"seed {seed}: {what.name} behind close-ok"
        match what.name:
            case "Channel.CloseOk":
                is_open = False
                tags.clear()
            case "Basic.ConsumeOk":
                assert what.consumer_tag not in tags, f"seed {seed}: consume-ok twice"
                tags.add(what.consumer_tag)
            case "Basic.Deliver":
                assert what.consumer_tag in tags, f"seed {seed}: a delivery without consume-ok"
            case "Basic.CancelOk":
                tags.discard(what.consumer_tag)
            case "Basic.Cancel":
                assert what.consumer_tag in tags, f"seed {seed}: cancelled before consume-ok"
                tags.remove(what.consumer_tag)


async def play_all() -> list[Any]:
    said: list[Any] = []
    for seed in range(HISTORIES):
        history = History(seed)
        for _ in range(STEPS):
            await history.step()
        await history.finish()
        check(history.wire, seed)
        said += history.wire
    return said


async def test_random_histories_keep_the_order() -> None:
    seen = {what.name for what in await play_all()}
    assert seen >= {
        "Basic.ConsumeOk",
        "Basic.Deliver",
        "Basic.CancelOk",
        "Basic.Cancel",
        "Channel.CloseOk",
    }


def announced_late(self: Consumer) -> Any:
    return (
        None if self.attaching is None or not self.attached else commands.Basic.ConsumeOk(self.tag)
    )


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (Consumer, "announce", announced_late),
        (FrontDoorConsuming, "release", lambda self, channel: []),
    ],
    ids=["lets deliveries overtake", "forgets consumers that a close leaves"],
)
async def test_the_random_histories_catch_who(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, broken: Any
) -> None:
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(AssertionError):
        await play_all()
