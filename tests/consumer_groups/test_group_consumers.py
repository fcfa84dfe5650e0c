"""Assignments begin and end as the controller says, and share one prefetch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pamqp import commands

from shardmq.broker.front_door.consume import group_consumer
from shardmq.broker.front_door.consume.consumers import Assignment, GroupConsumer
from shardmq.broker.front_door.links.shard_requests import ShardRefused
from shardmq.broker.model.changes import ExchangePut, PermissionPut, QueuePut, ShardOf
from shardmq.broker.shared.control import (
    AssignmentGivenUp,
    AssignmentName,
    AssignmentOrder,
    ConsumerJoin,
    ConsumerLeave,
    MarkPassed,
)
from shardmq.shardd.wire import messages as wire
from tests.consuming.test_consume import STREAM, Consuming, message, names

NAMES = AssignmentName(100, 0), AssignmentName(101, 0)


class Grouped(Consuming):
    """A channel with a consumer of a virtual queue of two shard queues."""

    def __init__(self, prefetch: int = 0, arguments: dict[str, Any] | None = None) -> None:
        super().__init__(prefetch=prefetch)
        self.queues = tuple(
            QueuePut("/", f"s.{at}", 100 + at, at, arguments=arguments or {}, part=ShardOf("s", at))
            for at in (0, 1)
        )
        self.line.catalog.apply(ExchangePut("/", "s", "x-modulus-hash"))
        for queue in self.queues:
            self.line.catalog.apply(queue)

    def begin(self, **terms: Any) -> asyncio.Future[None]:
        method = commands.Basic.Consume(queue="s", consumer_tag="tag", **terms)

        async def consume() -> None:
            reply = await self.consuming.consume_shards(self.channel, method, "s", self.queues)
            self.connection.answer(1, reply)

        return asyncio.ensure_future(consume())

    async def join(self, **terms: Any) -> GroupConsumer:
        """Begin the consumer, which the controller lets in."""
        begun = self.begin(**terms)
        await self.settled()
        self.line.answer()
        await begun
        group = self.channel.consumers["tag"]
        assert isinstance(group, GroupConsumer)
        self.aio.run()
        return group

    def order(
        self, group: GroupConsumer, kind: str, name: AssignmentName = NAMES[0], **how: Any
    ) -> None:
        said = AssignmentOrder(
            kind, group.number, name, how.get("stop"), how.get("mark"), how.get("fresh", False)
        )
        for ended in self.consuming.groups.obey([said], self.line.catalog):
            ended.client.consumer_ended(ended)

    async def give(
        self, group: GroupConsumer, *given: AssignmentName, answer: Any = None
    ) -> list[Assignment]:
        """Let the controller assign these shards, which attach the consumer."""
        for name in given:
            self.order(group, "give", name)
            await self.settled()
            self.shards.answer(answer or wire.Done(1))
            await self.settled()
        return [group.assignments[name] for name in given]

    def given_up(self) -> list[AssignmentName]:
        return [said.assignment for said in self.line.said if isinstance(said, AssignmentGivenUp)]


# -- joining, leaving ------------------------------------------------------------------------------


async def test_a_consumer_joins_at_the_controller_and_is_told_when_it_is_let_in() -> None:
    play = Grouped(prefetch=8)
    begun = play.begin(
        arguments={"x-group": "readers", "x-priority": 2, "x-handover-timeout": 1500}
    )
    await play.settled()
    assert play.got() == []
    join = play.line.answer()
    assert isinstance(join, ConsumerJoin) and (
        join.exchange,
        join.terms.group,
        join.terms.priority,
    ) == (
        "s",
        "readers",
        2,
    )
    await begun
    assert names(await play.settled()) == ["Basic.ConsumeOk"]
    group = play.channel.consumers["tag"]
    assert isinstance(group, GroupConsumer) and (group.limit.most, group.handover_s) == (8, 1.5)
    assert [here.number for here in play.consuming.groups.here()] == [group.number]


async def test_a_consumer_that_the_controller_refuses_ends_its_channel() -> None:
    play = Grouped()
    begun = play.begin()
    await play.settled()
    play.line.answer(403, "exclusive")
    with pytest.raises(Exception, match="exclusive"):
        await begun
    assert (
        play.channel.consumers == play.channel.groups == {} and play.consuming.groups.here() == []
    )


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("x-group", 5), ("x-shard-assignment", "best"), ("x-priority", True),
        ("x-priority", "high"), ("x-key-affinity", "yes"), ("x-handover-timeout", "long"),
        ("x-handover-timeout", -1),
    ],
)  # fmt: skip
async def test_an_argument_of_a_wrong_kind_is_refused_by_name(argument: str, value: Any) -> None:
    play = Grouped()
    with pytest.raises(Exception, match=f"invalid arg '{argument}' for queue 's' in vhost '/'"):
        await play.begin(arguments={argument: value})
    assert play.channel.consumers == {} and play.line.asked == []


async def test_a_cancelled_consumer_leaves_and_gives_up_what_it_does_not_hold() -> None:
    play = Grouped()
    group = await play.join()
    (assignment,) = await play.give(group, NAMES[0])
    play.says(1, commands.Basic.Cancel("tag"))
    await play.settled()
    assert isinstance(play.line.said[-1], ConsumerLeave)
    assert isinstance(play.shards.answer(wire.Done(1)), wire.Detach)
    assert names(await play.settled())[-1] == "Basic.CancelOk"
    while play.shards.asked:  # detached once more, released
        play.shards.answer(wire.Done(1))
        await play.settled()
    assert play.given_up() == [NAMES[0]] and group.assignments == {} and play.channel.groups == {}
    assert assignment.number not in play.consuming.consumers


async def test_the_end_of_a_channel_gives_up_all_seats_when_the_shards_have_requeued() -> None:
    play = Grouped()
    group = await play.join()
    await play.give(group, *NAMES)
    play.consuming.release(play.channel)
    assert isinstance(play.line.said[-1], ConsumerLeave) and play.given_up() == []
    play.shards.answer(wire.Done(1))
    await play.settled()
    assert play.given_up() == [NAMES[0]]
    play.shards.answer(wire.Done(1))
    await play.settled()
    assert play.given_up() == [*NAMES] and play.consuming.groups.here() == []


async def test_a_consumer_whose_virtual_queue_goes_is_cancelled_and_its_client_told() -> None:
    play = Grouped()
    group = await play.join()
    play.order(group, "close")
    play.order(group, "close")
    play.aio.run()
    assert play.names() == ["Basic.ConsumeOk", "Basic.Cancel"] and play.channel.consumers == {}
    await play.settled()
    assert play.channel.groups == {}


async def test_a_client_consumes_a_virtual_queue_by_its_name() -> None:
    play = Grouped(prefetch=3)
    play.says(1, commands.Basic.Consume(queue="s", consumer_tag="tag"))
    await play.settled()
    assert isinstance(play.line.answer(), ConsumerJoin)
    assert names(await play.settled()) == ["Basic.ConsumeOk"]


async def test_who_may_not_read_a_virtual_queue_neither_consumes_nor_gets() -> None:
    for what in (commands.Basic.Consume(queue="s"), commands.Basic.Get(queue="s")):
        play = Grouped()
        play.line.catalog.apply(PermissionPut("/", "guest", ".*", ".*", "none"))
        play.says(1, what)
        (close,) = await play.settled()
        assert (close.name, close.reply_code) == ("Channel.Close", 403)


async def test_a_client_gets_from_a_virtual_queue_by_its_name() -> None:
    play = Grouped()
    play.says(1, commands.Basic.Get(queue="s"))
    await play.settled()
    get = play.shards.answer(wire.Got(1, message(b"x"), 1, False, 0))
    assert isinstance(get, wire.Get) and get.queue == 100
    assert names(await play.settled())[0] == "Basic.GetOk"


# -- assignments -----------------------------------------------------------------------------------


async def test_an_assignment_is_attached_for_the_whole_consumer() -> None:
    play = Grouped()
    group = await play.join(arguments={"x-priority": 4, "x-key-affinity": True}, no_ack=True)
    play.order(group, "give")
    play.order(group, "give")  # said again
    await play.settled()
    ((shard, attach, _),) = play.shards.asked
    assert isinstance(attach, wire.AttachPart) and shard == 0
    assert (attach.group, attach.queue, attach.priority, attach.affinity, attach.no_ack) == (
        group.number, 100, 4, True, True,
    )  # fmt: skip


async def test_a_shard_that_does_not_know_the_queue_yet_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_consumer, "ATTACH_AGAIN_S", 0)
    play = Grouped()
    group = await play.join()
    (assignment,) = await play.give(group, NAMES[0], answer=ShardRefused(404, "gone"))
    assert not assignment.attached
    play.shards.answer(wire.Done(1))
    await play.settled()
    assert assignment.attached


async def test_orders_about_what_is_not_there_give_the_seat_back() -> None:
    play = Grouped()
    group = await play.join()
    play.order(group, "give", AssignmentName(999, 0))  # a queue that is gone
    play.order(group, "take", NAMES[1])  # not its own
    play.order(group, "bound", NAMES[1], stop=5)
    group.left = True
    play.order(group, "give", NAMES[0])
    assert (
        play.given_up() == [AssignmentName(999, 0), NAMES[1], NAMES[0]] and play.shards.asked == []
    )


async def test_a_shard_is_handed_over_when_what_it_gave_is_settled() -> None:
    play = Grouped()
    group = await play.join()
    (assignment,) = await play.give(group, NAMES[0])
    play.deliver(assignment.number, 1, b"x")
    assert (assignment.held, group.limit.unacked) == (1, 1)
    play.order(group, "take")
    await play.settled()
    assert isinstance(play.shards.answer(wire.Done(1)), wire.Detach)
    await play.settled()
    assert play.shards.asked == [] and play.given_up() == []  # a delivery is waited for
    play.says(1, commands.Basic.Ack(1))
    await play.settled()
    assert isinstance(play.shards.answer(wire.Done(1)), wire.Release)
    await play.settled()
    assert play.given_up() == [NAMES[0]] and group.limit.unacked == 0


async def test_a_shard_is_handed_over_after_a_while_with_what_is_not_settled() -> None:
    play = Grouped()
    group = await play.join(arguments={"x-handover-timeout": 0})
    (assignment,) = await play.give(group, NAMES[0])
    play.deliver(assignment.number, 1, b"x")
    play.order(group, "take")
    await play.settled()
    play.shards.answer(wire.Done(1))
    for _ in range(100):  # passes of the loop, until nothing is waited for any more
        if play.shards.asked:
            break
        await play.settled()
    assert isinstance(play.shards.answer(wire.Done(1)), wire.Release)
    await play.settled()
    assert play.given_up() == [NAMES[0]]
    play.says(1, commands.Basic.Ack(1))  # too late, and no error
    assert await play.settled() == [] and play.connection.channels.by_number[1].is_open


async def test_an_assignment_whose_queue_goes_is_given_up_at_once() -> None:
    play = Grouped()
    group = await play.join()
    (assignment,) = await play.give(group, NAMES[0])
    play.queue_gone(assignment.number)
    assert play.given_up() == [NAMES[0]] and group.assignments == {}
    assert play.channel.consumers == {"tag": group}  # the consumer itself goes on


# -- streams ---------------------------------------------------------------------------------------


async def test_members_of_a_group_share_the_position_that_is_kept_under_its_name() -> None:
    play = Grouped(prefetch=4, arguments=STREAM)
    group = await play.join(arguments={"x-group": "readers", "x-stream-offset": "last"})
    play.order(group, "give", stop=90, mark=10, fresh=True)
    await play.settled()
    attach = play.shards.answer(wire.AttachedAt(1, 0))
    assert isinstance(attach, wire.AttachStreamPart)
    assert (attach.read.name, attach.read.start, attach.stop, attach.mark) == (
        "readers",
        "first",
        90,
        10,
    )


async def test_who_names_no_group_is_alone_in_its_own() -> None:
    play = Grouped(prefetch=4, arguments=STREAM)
    group = await play.join(arguments={"x-stream-offset": "last"})
    assert group.terms.group == f"{play.connection.session.owner} {group.number}"
    (assignment,) = await play.give(group, NAMES[0], answer=wire.AttachedAt(1, 0))
    assert assignment.reading is not None and assignment.reading.asked.start == "last"


async def test_bounds_that_change_while_the_shard_attaches_are_said_again() -> None:
    play = Grouped(prefetch=4, arguments=STREAM)
    group = await play.join(arguments={"x-group": "readers"})
    play.order(group, "give", stop=90)
    await play.settled()
    play.order(group, "bound", stop=50, mark=5)
    number = group.assignments[NAMES[0]].number
    assert play.shards.said == [wire.SetBounds(number, 50, 5)]
    play.shards.answer(wire.AttachedAt(1, 0))
    await play.settled()
    assert play.shards.said == [wire.SetBounds(number, 50, 5)] * 2


async def test_a_mark_that_is_reached_is_told_to_the_controller() -> None:
    play = Grouped(prefetch=4, arguments=STREAM)
    group = await play.join(arguments={"x-group": "readers"})
    (assignment,) = await play.give(group, NAMES[0], answer=wire.AttachedAt(1, 0))
    play.consuming.groups.passed(assignment.number, 7)
    play.consuming.groups.passed(99, 7)
    assert play.line.said[-1] == MarkPassed(group.number, NAMES[0], 7)


async def test_an_error_of_ours_in_a_handover_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    play = Grouped()
    group = await play.join()
    play.order(group, "give")
    await play.settled()
    play.shards.answer(RuntimeError("a mistake"))
    await play.settled()
    assert "internal error" in caplog.text
