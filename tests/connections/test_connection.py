"""A connection: events reach their handlers in order, and what comes of them reaches the client."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest
from pamqp import commands

from shardmq.broker.amqp import ChannelException, ConnectionException, properties
from shardmq.broker.front_door.alarms import WHOLE_BROKER
from shardmq.broker.front_door.connection.connection import ClientConnection
from shardmq.broker.front_door.connection.socket import (
    CLOSE_TIMEOUT_S,
    PAUSE_ALARM,
    PAUSE_LOGIN,
    PAUSE_WORK,
)
from shardmq.broker.front_door.connection.work_queue import WORK_BYTES_MAX, WORK_MAX
from shardmq.broker.front_door.consume.consumers import EndedConsumer
from shardmq.broker.front_door.links.shard_requests import ShardRefused
from shardmq.broker.front_door.publish.confirms import ack_frame
from shardmq.broker.front_door.publish.effects import Published
from shardmq.broker.front_door.publish.replies import Reply
from shardmq.broker.front_door.session import TlsPeer
from shardmq.broker.model.changes import ParameterPut, QueueDelete, QueuePut
from shardmq.broker.model.permissions import DIRECT, INTERNAL_USER
from shardmq.broker.shared.control import ChannelClose, ChannelOpen, ConnectionOpen, VirtualLook
from shardmq.shardd.wire import messages as wire
from tests.amqp.bytes_of import HEADER, method, publish
from tests.connections.connection_play import FD, WANTS_ALL, Play
from tests.support.fake_binds_ahead import FakeBindsAhead
from tests.support.fake_publishing import events_of

OPEN = method(0, commands.Connection.TuneOk(2047, 131072, 60)) + method(
    0, commands.Connection.Open("/")
)
CLOSE = commands.Connection.Close(reply_code=200, reply_text="bye", class_id=0, method_id=0)
CLOSE_CHANNEL = commands.Channel.Close(reply_code=200, reply_text="bye", class_id=0, method_id=0)


def names(said: list[Any]) -> list[str]:
    return [what.name for what in said]


# -- the handshake ---------------------------------------------------------------------------------


async def test_a_client_that_may_enter_is_let_in() -> None:
    play = Play()
    play.log_in(product="test")
    assert play.names() == ["Connection.Start", "Connection.Tune"]
    play.read(OPEN)
    assert play.names() == ["Connection.OpenOk"]
    (info,) = play.line.up
    assert (info.user, info.vhost, info.channels, info.frame_max) == ("guest", "/", 0, 131072)
    assert info.client_properties == {"product": "test"}
    assert play.services.counts.logins_succeeded == 1
    play.aio.pass_time(60)
    assert not play.sock.is_closed  # the clock of the handshake has stopped


async def test_a_wrong_password_ends_the_connection_and_says_why_to_who_can_hear_it() -> None:
    quiet, told = Play(), Play()
    quiet.log_in("wrong")
    assert quiet.names() == ["Connection.Start"] and quiet.sock.is_closed
    assert quiet.services.counts.logins_failed == 1
    told.log_in("wrong", capabilities={"authentication_failure_close": True})
    start, close = told.got()
    assert (start.name, close.reply_code) == ("Connection.Start", 403)


async def test_a_password_that_takes_long_is_waited_for_and_what_is_sent_meanwhile_is_kept() -> (
    None
):
    play = Play()
    play.log_in("slow")
    assert play.connection.socket.paused & PAUSE_LOGIN and play.names() == ["Connection.Start"]
    await play.settled()
    assert play.logins.slow is not None
    play.logins.slow.set_result("")
    assert names(await play.settled()) == ["Connection.Tune"]
    play.read(OPEN)
    assert play.names() == ["Connection.OpenOk"]


async def test_the_handshake_has_a_limited_time() -> None:
    play = Play(handshake_timeout_s=3)
    play.read(HEADER)
    play.aio.pass_time(3)
    assert play.sock.is_closed and play.ended == [play.connection]


async def test_a_vhost_that_the_user_may_not_open_ends_the_connection() -> None:
    play = Play()
    play.log_in()
    play.read(
        method(0, commands.Connection.TuneOk(2047, 131072, 60))
        + method(0, commands.Connection.Open("/other"))
    )
    *_, close = play.got()
    assert (close.name, close.reply_code) == ("Connection.Close", 530)


async def test_a_front_door_takes_as_many_connections_as_it_may() -> None:
    play = Play(connections_max=2)
    play.count_of_connected = 2
    play.log_in()
    play.read(OPEN)
    *_, close = play.got()
    assert close.reply_code == 530 and "node connection limit (2) is reached" in close.reply_text


@pytest.mark.parametrize("refused", [False, True])
async def test_limits_over_all_front_doors_are_the_controllers_to_keep(refused: bool) -> None:
    play = Play()
    play.line.catalog.apply(
        ParameterPut(
            vhost="/", component="vhost-limits", name="limits", value={"max-connections": 3}
        )
    )
    play.log_in()
    play.read(OPEN)
    play.got()
    await play.settled()
    assert play.connection.socket.paused & PAUSE_LOGIN and not play.connection.session.is_open
    assert isinstance(play.line.answer(530 if refused else 0, "too many"), ConnectionOpen)
    said = await play.settled()
    if refused:
        assert names(said) == ["Connection.Close"] and play.line.down == [
            play.connection.session.owner
        ]
    else:
        assert names(said) == ["Connection.OpenOk"] and play.connection.session.is_open


async def test_the_controller_needs_no_password_and_is_in_no_listing() -> None:
    play = Play(trusted=True)
    play.read(HEADER + method(0, commands.Connection.StartOk({}, "PLAIN", "guest", "en_US")))
    play.read(OPEN)
    assert play.names()[-1] == "Connection.OpenOk"
    assert play.line.up == [] and play.connection.session.trusted


async def test_a_bridge_of_this_broker_needs_no_password_and_is_listed_as_direct() -> None:
    play = Play(trusted=True, connections_max=1)
    play.count_of_connected = 1
    play.read(HEADER + method(0, commands.Connection.StartOk({}, DIRECT, INTERNAL_USER, "en_US")))
    play.read(OPEN)
    assert play.names()[-1] == "Connection.OpenOk"
    (info,) = play.line.up
    assert (info.name, info.protocol) == (f"<{info.owner}>", "Direct 0-9-1")
    assert (info.user, info.auth_mechanism) == (INTERNAL_USER, "")


async def test_nobody_else_is_a_bridge_of_this_broker() -> None:
    for mechanism in (DIRECT, "EXTERNAL", "PLAIN"):
        play = Play()
        said = commands.Connection.StartOk({}, mechanism, INTERNAL_USER, "en_US")
        play.read(HEADER + method(0, said))
        assert not play.connection.session.user


async def test_what_came_with_the_end_of_a_tls_handshake_is_read() -> None:
    play = Play(tls=TlsPeer("TLSv1.3", "some cipher"))
    play.sock.unread.append(HEADER)
    play.aio.run()
    assert play.names() == ["Connection.Start"]


# -- channels --------------------------------------------------------------------------------------


async def test_a_channel_is_opened_used_and_closed() -> None:
    play = Play()
    play.open(channels=0)
    assert names(play.says(1, commands.Channel.Open())) == ["Channel.OpenOk"]
    assert names(play.says(1, commands.Basic.Qos(prefetch_count=3))) == ["Basic.QosOk"]
    assert play.connection.channels.by_number[1].consuming.prefetch == 3
    assert names(play.says(1, CLOSE_CHANNEL)) == ["Channel.CloseOk"]
    assert play.connection.channels.by_number == {}


async def test_channels_that_nobody_uses_are_opened_listed_and_closed() -> None:
    play = Play()
    play.open(channels=0)
    play.read(b"".join(method(number, commands.Channel.Open()) for number in (2, 1, 3)))
    play.read(method(3, commands.Channel.Close(200, "", 0, 0)))
    assert play.names() == 3 * ["Channel.OpenOk"] + ["Channel.CloseOk"]
    assert names(play.says(2, commands.Basic.Qos(prefetch_count=3))) == ["Basic.QosOk"]
    connection = play.connection
    assert list(connection.channels.by_number) == [2] and play.services.counts.channels_opened == 3
    rows = [each.report("me", 0) for each in connection.channels.all(connection)]
    assert [(row["number"], row["prefetch_count"]) for row in rows] == [(1, 0), (2, 3)]
    assert connection.report()["channels"] == 2


async def test_a_channel_is_open_before_anything_else_is_said_on_it() -> None:
    play = Play()
    play.open(channels=0)
    asked = Published()
    asked.write(method(1, commands.Basic.Return(312, "NO_ROUTE", "ex", "key")))
    play.publishing.effects.append(asked)
    play.read(method(1, commands.Channel.Open()) + b"".join(publish(1, "ex", "key")))
    assert play.names() == ["Channel.OpenOk", "Basic.Return"]


async def test_channels_that_nobody_uses_count_for_a_limit_that_comes_later() -> None:
    play = Play()
    play.open(channels=0)
    play.read(b"".join(method(number, commands.Channel.Open()) for number in (1, 2)))
    assert play.connection.channels.by_number == {}
    limits = ParameterPut(
        vhost="", component="user-limits", name="guest", value={"max-channels": 3}
    )
    play.line.catalog.apply(limits)
    play.connection.channels.limits_changed(play.connection)
    assert list(play.connection.channels.by_number) == [1, 2]
    assert [info.channels for info in play.line.up] == [0, 2]
    play.got()
    assert play.says(3, commands.Channel.Open()) == []
    await play.settled()
    assert play.line.answer() == ChannelOpen("/", "guest", 3)


async def test_channels_are_counted_by_the_controller_where_there_is_a_limit() -> None:
    play = Play(channel_max_per_node=2)
    play.open(channels=0)
    assert play.says(1, commands.Channel.Open()) == []
    await play.settled()
    assert play.line.answer() == ChannelOpen("/", "guest", 1)
    assert names(await play.settled()) == ["Channel.OpenOk"]
    play.says(1, CLOSE_CHANNEL)
    await play.settled()
    assert play.line.answer() == ChannelClose("/", 0)
    assert names(await play.settled()) == ["Channel.CloseOk"]
    assert [info.channels for info in play.line.up] == [0, 0]  # and the controller hears of it


async def test_a_channel_over_the_limit_ends_the_connection() -> None:
    play = Play(channel_max_per_node=2)
    play.open(channels=0)
    play.says(1, commands.Channel.Open())
    await play.settled()
    play.line.answer(530, "too many channels")
    (close,) = await play.settled()
    assert (close.name, close.reply_code) == ("Connection.Close", 530)


async def test_messages_are_requeued_before_channel_close_is_answered() -> None:
    play = Play()
    play.open()
    channel = play.connection.channels.by_number[1].consuming
    getter = play.services.consuming.gets._getter(channel, 0)
    assert play.says(1, CLOSE_CHANNEL) == []
    await play.settled()
    release = play.shards.answer(wire.Done(1, closed=[33]))
    assert isinstance(release, wire.Release) and release.consumers == [getter.number]
    assert names(await play.settled()) == ["Channel.CloseOk"]
    assert play.line.gone == [33]  # queues that went with it are gone for who asks next


async def test_both_sides_may_close_a_channel_at_once() -> None:
    play = Play()
    play.open()
    play.connection.fail(ChannelException(404, "no queue", 60, 20), 1)
    play.aio.run()
    assert play.names() == ["Channel.Close"]
    assert names(play.says(1, CLOSE_CHANNEL)) == ["Channel.CloseOk"]
    assert play.connection.channels.by_number == {}


async def test_what_is_said_on_a_closed_channel_is_dropped_until_it_is_opened_anew() -> None:
    play = Play()
    play.open()
    play.connection.fail(ChannelException(404, "no queue", 60, 20), 1)
    play.aio.run()
    play.got()
    assert play.says(1, commands.Basic.Qos(prefetch_count=1)) == []
    assert play.says(1, commands.Channel.CloseOk()) == []
    assert names(play.says(1, commands.Channel.Open())) == ["Channel.OpenOk"]


# -- exclusive queues ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what", [commands.Basic.Get(queue="far"), commands.Basic.Consume(queue="far")]
)
@pytest.mark.parametrize(("goes", "code"), [(True, 404), (False, 405)])
async def test_a_queue_that_another_front_door_owns_is_looked_for_behind_its_end(
    what: commands.Basic.Get | commands.Basic.Consume, goes: bool, code: int
) -> None:
    play = Play()
    play.open()
    play.line.catalog.apply(QueuePut("/", "far", 9, 0, owner="1.1.1"))
    play.read(method(1, what))
    assert await play.settled() == []
    if goes:  # the change is on its way, and comes before the answer
        play.line.catalog.apply(QueueDelete("/", "far"))
    assert play.line.answer() == VirtualLook("/", "far")
    (close,) = await play.settled()
    assert isinstance(close, commands.Channel.Close) and close.reply_code == code
    assert not play.shards.asked


async def test_a_channel_that_is_closed_while_a_queue_is_looked_for_consumes_nothing() -> None:
    play = Play()
    play.open()
    play.line.catalog.apply(QueuePut("/", "far", 9, 0, owner="1.1.1"))
    play.read(method(1, commands.Basic.Consume(queue="far")))
    await play.settled()
    play.connection.fail(ChannelException(500, "closed", 0, 0), 1)
    play.line.catalog.apply(QueuePut("/", "far", 10, 0))  # it is another one's now
    play.line.answer()
    assert names(await play.settled()) == ["Channel.Close"]
    assert not play.shards.asked


# -- order -----------------------------------------------------------------------------------------


async def test_what_follows_a_method_that_waits_comes_behind_it_and_other_channels_go_on() -> None:
    play = Play()
    play.open(channels=2)
    get, qos = commands.Basic.Get(queue="a", no_ack=True), commands.Basic.Qos(prefetch_count=1)
    play.read(method(1, get) + method(1, qos) + method(2, qos))
    assert names(await play.settled()) == ["Basic.QosOk"]
    assert play.connection.channels.by_number[2].consuming.prefetch == 1
    play.shards.answer(wire.Got(1, b"", 0, False, 0))
    assert names(await play.settled()) == ["Basic.GetEmpty", "Basic.QosOk"]


async def test_declares_may_overlap_and_what_follows_waits_for_all_of_them() -> None:
    play = Play()
    play.open()
    declare = commands.Exchange.Declare(exchange="new", exchange_type="direct")
    play.read(method(1, declare) + method(1, commands.Basic.Qos(prefetch_count=1)))
    assert play.got() == [] and len(play.line.asked) == 1
    play.line.answer()
    assert names(await play.settled()) == ["Exchange.DeclareOk", "Basic.QosOk"]


async def test_a_declare_behind_a_method_that_waits_is_asked_in_its_turn() -> None:
    play = Play()
    play.open()
    get = commands.Basic.Get(queue="a", no_ack=True)
    play.read(
        method(1, get)
        + method(1, commands.Exchange.Declare(exchange="new", exchange_type="direct"))
    )
    await play.settled()
    assert play.line.asked == []
    play.shards.answer(wire.Got(1, b"", 0, False, 0))
    await play.settled()
    play.line.answer()
    assert names(await play.settled()) == ["Exchange.DeclareOk"]


async def test_a_refused_declare_ends_its_channel_and_what_followed_is_not_done() -> None:
    play = Play()
    play.open()
    play.read(
        method(1, commands.Exchange.Declare(exchange="new", exchange_type="direct"))
        + method(1, commands.Basic.Qos(prefetch_count=5))
    )
    play.line.answer(406, "no")
    (close,) = await play.settled()
    assert (close.name, close.reply_code) == ("Channel.Close", 406)
    assert play.connection.channels.by_number[1].consuming.prefetch == 0


@pytest.mark.parametrize("by", ["count", "bytes"])
async def test_a_client_with_too_much_queued_work_is_not_read(by: str) -> None:
    play = Play()
    play.open()
    channel = play.connection.channels.by_number[1]
    channel.running = True  # some answer is waited for
    done: list[int] = []
    many, size = (WORK_MAX + 1, 0) if by == "count" else (2, WORK_BYTES_MAX)
    for at in range(many):
        assert not play.connection.socket.paused
        play.connection.work.do(channel, lambda at=at: done.append(at), size)  # type: ignore[misc]
    assert play.connection.socket.paused == PAUSE_WORK and done == []
    channel.running = False
    play.connection.work.go_on(channel)
    assert done == list(range(many)) and not play.connection.socket.paused


# -- publishes -------------------------------------------------------------------------------------


def messages(count: int, channel: int = 1) -> bytes:
    return b"".join(b"".join(publish(channel, "", "a", b"x")) for _ in range(count))


async def test_publishes_of_one_read_are_one_event() -> None:
    play = Play()
    play.open()
    play.read(messages(5))
    assert play.publishing.published == [(0, 5)] and play.connection.published


async def test_publishes_that_take_more_than_a_slice_go_on_in_the_next() -> None:
    play = Play()
    play.open()
    play.publishing.at_once = 2
    play.read(messages(5))
    assert play.publishing.published == [(0, 2), (2, 4), (4, 5)]
    assert FD in play.aio.readers


async def test_publishes_behind_a_method_that_waits_are_published_behind_it() -> None:
    play = Play()
    play.open()
    play.read(method(1, commands.Basic.Get(queue="a", no_ack=True)))
    await play.settled()
    play.publishing.at_once = 2
    play.read(messages(3))
    # the event, of whose messages none are published
    assert play.publishing.published == [(0, 2), (2, 3)]
    play.publishing.published.clear()
    play.shards.answer(wire.Got(1, b"", 0, False, 0))
    assert names(await play.settled()) == ["Basic.GetEmpty"]
    assert play.publishing.published == [(0, 2), (2, 3)]


async def test_what_publishing_asks_for_is_carried_out_frames_first_and_failures_last() -> None:
    play = Play()
    play.open(channels=2)
    play.got()
    asked = Published()
    asked.fed = 2
    asked.write(ack_frame(2, 1, False))
    asked.fail(1, ChannelException(404, "no exchange", 60, 40))
    requester = SimpleNamespace(consumer=SimpleNamespace(client=play.connection), unwritten_bytes=5)
    asked.reply(Reply(requester, ack_frame(2, 2, False), fed=1))  # type: ignore[arg-type]
    play.connection.carry_out(asked)
    assert {each: each.fed_shards for each in play.loop.feeders} == {play.connection.socket: 3}
    play.aio.run()
    assert names(play.got()) == ["Basic.Ack", "Basic.Ack", "Channel.Close"]
    assert requester.unwritten_bytes == 0
    assert not play.connection.channels.by_number[1].is_open


async def test_publishes_that_wait_for_a_shard_come_before_what_their_channel_sends_later() -> None:
    play = Play()
    play.open()
    (event,) = events_of([(1, ("", "a"), {}, False)] * 2)
    asked = Published()
    asked.defer(1, event)
    play.publishing.effects.append(asked)
    play.read(messages(3))
    play.read(messages(1))
    assert play.publishing.published == [(0, 3), (0, 1)] and not play.publishing.deferred
    await play.settled()
    assert play.publishing.deferred == [(1, 2)]
    assert play.publishing.published[2:] == [(0, 1)]  # the copy of what came behind


async def test_publishes_that_waited_for_their_channel_may_wait_for_a_shard_too() -> None:
    play = Play()
    play.open()
    play.read(method(1, commands.Basic.Get(queue="a", no_ack=True)))
    await play.settled()
    play.read(messages(1))
    (event,) = events_of([(1, ("", "a"), {}, False)])
    asked = Published()
    asked.defer(1, event)
    play.publishing.effects.append(asked)
    play.shards.answer(wire.Got(1, b"", 0, False, 0))
    await play.settled()
    assert play.publishing.deferred == [(1, 1)]


async def test_a_mistake_of_ours_ends_the_connection_alone() -> None:
    play = Play()
    play.open()
    play.publishing.error = RuntimeError("a mistake")
    play.read(messages(1))
    (close,) = play.got()
    assert (close.name, close.reply_code) == ("Connection.Close", 541)


async def test_confirms_and_transactions_exclude_each_other() -> None:
    play = Play()
    play.open()
    assert names(play.says(1, commands.Confirm.Select())) == ["Confirm.SelectOk"]
    assert play.says(1, commands.Confirm.Select(nowait=True)) == []
    (close,) = play.says(1, commands.Tx.Select())
    assert (close.name, close.reply_code) == ("Channel.Close", 406)


async def test_flow_and_recover_are_answered() -> None:
    play = Play()
    play.open()
    assert names(play.says(1, commands.Channel.Flow(active=True))) == ["Channel.FlowOk"]
    assert names(play.says(1, commands.Basic.Recover(requeue=True))) == ["Basic.RecoverOk"]
    assert names(play.says(1, commands.Tx.Select())) == ["Tx.SelectOk"]
    assert names(play.says(1, commands.Tx.Rollback())) == ["Tx.RollbackOk"]


@pytest.mark.parametrize(
    "what",
    [
        commands.Channel.Flow(active=False),
        commands.Basic.Recover(requeue=False),
        commands.Basic.Qos(prefetch_size=1),
    ],
    ids=lambda what: what.name,
)
async def test_what_is_not_implemented_ends_the_connection(what: Any) -> None:
    play = Play()
    play.open()
    (close,) = play.says(1, what)
    assert (close.name, close.reply_code) == ("Connection.Close", 540)


# -- failures, the end -----------------------------------------------------------------------------


async def test_an_error_of_a_channel_that_is_not_there_ends_the_connection() -> None:
    play = Play()
    play.open()
    play.connection.fail(ChannelException(406, "text", 60, 40), 5)
    play.aio.run()
    (close,) = play.got()
    assert (close.name, close.reply_code) == ("Connection.Close", 504)


async def test_behind_a_close_nothing_fails_again() -> None:
    play = Play()
    play.open()
    play.connection.close(ConnectionException(320, "shutdown", 0, 0))
    play.connection.close(ConnectionException(320, "again", 0, 0))
    play.connection.fail(ChannelException(406, "text", 60, 40), 1)
    play.aio.run()
    assert play.names() == ["Connection.Close"]
    play.read(method(0, commands.Connection.CloseOk()))
    assert play.ended == [play.connection]


async def test_a_client_that_does_not_answer_a_close_is_dropped() -> None:
    play = Play()
    play.open()
    play.connection.close(ConnectionException(320, "shutdown", 0, 0))
    play.aio.pass_time(CLOSE_TIMEOUT_S)
    assert play.sock.is_closed and play.ended == [play.connection]


async def test_a_close_of_the_client_is_answered_behind_all_that_it_has_said() -> None:
    play = Play()
    play.open()
    play.read(method(1, commands.Basic.Get(queue="a", no_ack=True)) + method(0, CLOSE))
    assert play.got() == []
    await play.settled()
    play.shards.answer(wire.Got(1, b"", 0, False, 0))
    # What the channel answers now nobody reads: RabbitMQ says nothing either.
    said = await play.settled()
    assert names(said)[-1] == "Connection.CloseOk"
    assert play.line.down == [play.connection.session.owner] * len(play.line.down) != []
    assert play.ended == [play.connection]


async def test_the_end_of_the_socket_ends_all_that_the_connection_has_begun() -> None:
    play = Play()
    play.open()
    play.read(method(1, commands.Basic.Get(queue="a", no_ack=False)))
    await play.settled()
    play.read(b"")
    assert play.ended == [play.connection] and play.sock.is_closed
    _, release, _ = play.shards.asked[-1]
    assert isinstance(release, wire.Release)
    await play.settled()
    play.connection.disconnect()
    assert play.ended == [play.connection]


def connections_in_memory() -> int:
    return sum(isinstance(each, ClientConnection) for each in gc.get_objects())


async def test_a_connection_that_has_ended_leaves_nothing_to_the_garbage_collector() -> None:
    """The garbage collector runs seldom: ended connections must not fill the memory until then."""
    gc.collect()
    gc.disable()
    try:
        before = connections_in_memory()
        play = Play()
        play.open(channels=4, **WANTS_ALL)
        play.says(1, commands.Exchange.Declare(exchange="new", exchange_type="direct"))
        play.says(1, commands.Basic.Get(queue="a"))
        play.says(2, commands.Basic.Get(queue="a"))
        play.says(3, commands.Queue.Declare(queue="missing", passive=True))
        play.says(4, commands.Basic.Consume(queue="a"))
        await play.settled()
        refused = play.shards.asked.pop()
        assert isinstance(refused[1], wire.Attach)
        refused[2].set_exception(ShardRefused(403, "exclusive"))
        del refused
        await play.settled()
        play.read(b"")
        await play.settled()
        play.ended.clear()
        play.aio.later.clear()
        play.shards.asked.clear()
        del play.connection
        await asyncio.sleep(0)
        assert connections_in_memory() == before
    finally:
        gc.enable()


async def test_a_connection_that_has_ended_is_not_kept_by_binds_that_it_waited_for() -> None:
    gc.collect()
    gc.disable()
    try:
        before = connections_in_memory()
        play = Play()
        ahead = FakeBindsAhead(play.line)
        play.open(channels=3)
        for channel in (1, 2, 3):
            bind = commands.Queue.Bind(queue="a", exchange="logs", routing_key=f"{channel}")
            play.read(method(channel, bind))
            if channel == 1:  # the others are answered when the connection has ended, or refused
                ahead.record(0, 0)
        await play.settled()
        play.read(b"")
        await play.settled()
        ahead.record(0, 404)
        play.ended.clear()
        play.aio.later.clear()
        ahead.all.clear()
        del play.connection
        await asyncio.sleep(0)
        assert connections_in_memory() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("transactional", [False, True])
async def test_what_a_connection_held_unacknowledged_does_not_keep_it(transactional: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        before = connections_in_memory()
        play = Play()
        play.open()
        if transactional:
            play.says(1, commands.Tx.Select())
        play.says(1, commands.Basic.Get(queue="a"))
        await play.settled()
        stored = properties.stored_with(b"", b"a", {}, b"body")
        play.shards.answer(wire.Got(1, stored, 1, False, 0))
        await play.settled()
        if transactional:
            play.says(1, commands.Basic.Ack(1))
        play.read(b"")
        await play.settled()
        play.ended.clear()
        play.aio.later.clear()
        del play.connection
        await asyncio.sleep(0)
        assert connections_in_memory() == before
    finally:
        gc.enable()


# -- alarms, operators -----------------------------------------------------------------------------


async def test_a_publisher_is_told_of_an_alarm_and_not_read_until_it_is_over() -> None:
    play = Play()
    play.open(**WANTS_ALL)
    play.services.alarms.set(WHOLE_BROKER, "memory")
    play.connection.alarm_changed()
    assert play.got() == []  # it has not published yet
    play.read(messages(1))
    (blocked,) = play.got()
    assert (blocked.name, blocked.reason) == ("Connection.Blocked", "memory")
    assert (
        play.connection.socket.paused == PAUSE_ALARM
        and play.connection.report()["state"] == "blocked"
    )
    play.connection.alarm_changed()
    play.services.alarms.set(WHOLE_BROKER, "")
    play.connection.alarm_changed()
    play.aio.run()
    assert play.names() == ["Connection.Unblocked"] and not play.connection.socket.paused


async def test_a_client_that_knows_no_alarms_is_held_back_all_the_same() -> None:
    play = Play()
    play.open()
    play.read(messages(1))
    play.services.alarms.set(0, "disk")
    play.connection.alarm_changed()
    assert play.got() == [] and play.connection.socket.paused == PAUSE_ALARM
    play.services.alarms.set(0, "")
    play.connection.alarm_changed()
    assert not play.connection.socket.paused


async def test_who_wants_to_know_is_told_that_a_consumer_was_cancelled() -> None:
    told, quiet = Play(), Play()
    for play in (told, quiet):
        play.open(**WANTS_ALL if play is told else {})
        play.connection.consumer_ended(EndedConsumer(play.connection, 1, "tag", None))
        play.aio.run()
    (cancel,) = told.got()
    assert (cancel.name, cancel.consumer_tag) == ("Basic.Cancel", "tag") and quiet.got() == []


async def test_a_cancel_is_told_behind_the_answer_to_the_delete_that_is_its_reason() -> None:
    play = Play()
    play.open(**WANTS_ALL)
    play.says(1, commands.Queue.Delete(queue="a"))
    play.connection.consumer_ended(EndedConsumer(play.connection, 1, "tag", None))
    play.aio.run()
    assert play.got() == []
    play.line.answer()
    assert names(await play.settled()) == ["Queue.DeleteOk", "Basic.Cancel"]


async def test_an_operator_cancels_a_consumer() -> None:
    play = Play()
    play.open(**WANTS_ALL)
    play.says(1, commands.Basic.Consume(queue="a", consumer_tag="tag"))
    await play.settled()
    play.shards.answer(wire.Done(1))
    assert names(await play.settled()) == ["Basic.ConsumeOk"]
    play.connection.cancel_consumer(1, "tag")
    play.connection.cancel_consumer(1, "no such tag")
    play.connection.cancel_consumer(7, "tag")
    await play.settled()
    assert isinstance(play.shards.answer(wire.Done(1, closed=[1])), wire.Detach)
    assert names(await play.settled()) == ["Basic.Cancel"]
    assert play.line.gone == [1]


async def test_a_secret_may_be_renewed() -> None:
    play = Play()
    play.open()
    renewed = commands.Connection.UpdateSecret(new_secret="new", reason="it expires")
    assert names(play.says(0, renewed)) == ["Connection.UpdateSecretOk"]


async def test_counters_of_a_connection() -> None:
    play = Play()
    play.open(channels=2)
    report = play.connection.report()
    assert (report["channels"], report["state"], report["send_pend"]) == (2, "running", 0)
    assert report["recv_oct"] and report["send_oct"] == len(play.sock.taken)


# -- more of the order of work ---------------------------------------------------------------------


async def test_many_binds_are_one_request_and_wait_for_their_turn() -> None:
    play = Play()
    play.open()
    bind = method(1, commands.Queue.Bind(queue="a", exchange="direct", routing_key="k"))
    play.read(bind * 3)
    ((request, _),) = play.line.asked
    assert len(request.binds) == 3
    play.line.answer()
    assert names(await play.settled()) == ["Queue.BindOk"] * 3


async def test_a_mistake_of_ours_in_queued_work_ends_the_connection() -> None:
    for is_late in (False, True):
        play = Play()
        play.open()

        async def wait() -> None:
            raise RuntimeError("a mistake")

        def work(wait: Any = wait, is_late: bool = is_late) -> Any:
            if is_late:
                return wait()
            raise RuntimeError("a mistake")

        play.connection.work.do(play.connection.channels.by_number[1], work)
        (close,) = await play.settled()
        assert (close.name, close.reply_code) == ("Connection.Close", 541)


async def test_a_method_that_does_not_exist_here_ends_the_connection() -> None:
    play = Play()
    play.open()
    play.connection._on_channel_method(1, commands.Basic.Return())
    (close,) = await play.settled()
    assert (close.name, close.reply_code) == ("Connection.Close", 503)


async def test_what_a_channel_that_was_closed_meanwhile_still_had_to_do_is_not_done() -> None:
    play = Play()
    play.open()
    channel = play.connection.channels.by_number[1]
    channel.running = True
    play.read(
        method(1, commands.Basic.Qos(prefetch_count=5))
        + method(1, commands.Basic.Ack(1))
        + method(1, commands.Exchange.Declare(exchange="new", exchange_type="direct"))
    )
    play.connection.channels.end(channel)
    channel.running = False
    play.connection.work.go_on(channel)
    play.aio.run()
    assert play.got() == [] and channel.consuming.prefetch == 0 and play.line.asked == []


async def test_a_close_that_waits_is_forgotten_when_the_socket_ends_first() -> None:
    play = Play()
    play.open()
    play.read(method(1, commands.Basic.Get(queue="a", no_ack=True)) + method(0, CLOSE))
    await play.settled()
    play.connection.disconnect()
    play.shards.asked.clear()
    await play.settled()
    assert play.got() == [] and play.ended == [play.connection]


async def test_what_is_said_on_a_channel_that_was_never_opened_is_an_error() -> None:
    play = Play()
    play.open()
    (close,) = play.says(9, commands.Basic.Qos(prefetch_count=1))
    assert (close.name, close.reply_code) == ("Connection.Close", 504)
