"""A client need not wait for answers when it closes a channel and opens its number again."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from pamqp import base, commands, frame

from shardmq.broker.amqp import ConnectionException
from shardmq.broker.front_door.connection.socket import PAUSE_CLOSE
from shardmq.broker.model.changes import ParameterPut
from shardmq.broker.shared.control import Answer, ChannelClose
from tests.amqp.bytes_of import method, publish
from tests.connections.door_play import Door
from tests.support.raw_client import RawClient
from tests.support.real_broker import RealBroker

CLOSE = commands.Channel.Close(200, "bye", 0, 0)
CLOSE_CONNECTION = commands.Connection.Close(200, "bye", 0, 0)
OPEN = commands.Channel.Open()
QOS = commands.Basic.Qos(prefetch_count=1)
DECLARE = commands.Exchange.Declare(exchange="good", exchange_type="direct")
REFUSED = commands.Exchange.Declare(exchange="bad", exchange_type="direct")

HISTORIES = 150

both_ways = pytest.mark.parametrize("short", [True, False], ids=["short", "python"])
in_parts = pytest.mark.parametrize("at_once", [True, False], ids=["at_once", "apart"])


class Play(Door):
    """One client, and a controller that answers when it is told to."""

    def __init__(self, *, short: bool, channels: int = 1) -> None:
        super().__init__(short=short)
        self.at = self.enter()
        self.connection = self.entered[self.at]
        self._heard = 0
        for number in range(1, channels + 1):
            self.say(self.at, number, OPEN)
            self.say(self.at, number, QOS)  # it is used
        self.run()
        self.heard()

    def send(self, *said: tuple[int, base.Frame], at_once: bool = True) -> None:
        frames = [method(number, what) for number, what in said]
        for data in [b"".join(frames)] if at_once else frames:
            self.read(self.at, data)
        self.run()

    async def settled(self) -> list[str]:
        """Let all happen that can; return what the client has heard meanwhile."""
        client = self.clients[self.at]
        for _ in range(30):
            await asyncio.sleep(0)
            self.run()
            while client.unread and (reader := self.aio.readers.get(client.fd)) is not None:
                reader()
        return [f"{number} {what.name}" for number, what in self.heard()]

    def heard(self) -> list[tuple[int, Any]]:
        data, found = bytes(self.clients[self.at].taken[self._heard :]), []
        self._heard += len(data)
        while data:
            size, number, what = frame.unmarshal(data)
            data = data[size:]
            found.append((number, what))
        return found

    def answer_all(self) -> None:
        """Answer what the controller is asked; what is called `bad` is refused."""
        while self.line.asked:
            self.answer_one()

    def answer_one(self) -> None:
        request, answer = self.line.asked.pop(0)
        if not answer.done():
            code, text = (404, "no such thing") if "bad" in repr(request) else (0, "")
            answer.set_result(Answer(1, code, text, {}))


@both_ways
@in_parts
async def test_a_number_is_opened_again_behind_its_close(short: bool, at_once: bool) -> None:
    play = Play(short=short)
    again = [
        (1, DECLARE), (1, CLOSE), (1, OPEN), (1, commands.Confirm.Select()),
        (1, CLOSE), (1, OPEN), (1, QOS),
    ]  # fmt: skip
    play.send(*again, at_once=at_once)
    assert await play.settled() == [] and play.connection.socket.paused & PAUSE_CLOSE
    play.answer_all()
    assert await play.settled() == [
        "1 Exchange.DeclareOk", "1 Channel.CloseOk", "1 Channel.OpenOk", "1 Confirm.SelectOk",
        "1 Channel.CloseOk", "1 Channel.OpenOk", "1 Basic.QosOk",
    ]  # fmt: skip
    assert not play.connection.socket.paused


@both_ways
async def test_what_is_published_behind_the_close_is_dropped_and_behind_the_open_is_not(
    short: bool,
) -> None:
    play = Play(short=short)
    play.send((1, DECLARE), (1, CLOSE))
    play.read(play.at, b"".join(publish(1, "", "c", b"between")))
    play.send((1, CLOSE), (1, commands.Basic.Ack(1)), (1, commands.Confirm.Select()), (1, OPEN))
    play.read(play.at, b"".join(publish(1, "", "c", b"behind")))
    play.answer_all()
    assert await play.settled() == ["1 Exchange.DeclareOk", "1 Channel.CloseOk", "1 Channel.OpenOk"]
    sent = b"".join(message for wire in play.wires for message in wire.sent)
    assert b"behind" in sent and b"between" not in sent


@both_ways
async def test_other_channels_go_on_until_the_number_is_opened(short: bool) -> None:
    play = Play(short=short, channels=2)
    play.send((1, DECLARE), (1, CLOSE), (2, QOS), (1, OPEN), (2, QOS), (0, CLOSE_CONNECTION))
    assert await play.settled() == ["2 Basic.QosOk"]
    play.answer_all()
    assert await play.settled() == [
        "1 Exchange.DeclareOk", "1 Channel.CloseOk", "1 Channel.OpenOk", "2 Basic.QosOk",
        "0 Connection.CloseOk",
    ]  # fmt: skip


@both_ways
@in_parts
async def test_a_refusal_is_told_though_the_client_has_closed_the_channel(
    short: bool, at_once: bool
) -> None:
    play = Play(short=short)
    play.send((1, REFUSED), (1, QOS), (1, CLOSE), at_once=at_once)
    play.answer_all()
    await asyncio.sleep(0)
    play.run()
    (_, closed), (_, close_ok) = play.heard()
    assert (closed.reply_code, closed.class_id, closed.method_id) == (404, 40, 10)
    assert close_ok.name == "Channel.CloseOk" and play.connection.channels.by_number == {}
    # The client answers our close, or has opened the number before.
    play.send((1, commands.Channel.CloseOk()), (1, OPEN), (1, commands.Channel.CloseOk()), (1, QOS))
    assert await play.settled() == ["1 Channel.OpenOk", "1 Basic.QosOk"]


@both_ways
async def test_nothing_but_close_ok_follows_the_refusal(short: bool) -> None:
    play = Play(short=short)
    play.send((1, REFUSED), (1, CLOSE))
    channel = play.connection.channels.by_number[1]
    play.connection.work.do_next(channel, lambda: play.connection.send(1, commands.Basic.Cancel()))
    play.answer_all()
    assert await play.settled() == ["1 Channel.Close", "1 Channel.CloseOk"]


@both_ways
async def test_a_refusal_is_told_though_the_client_has_closed_the_connection(short: bool) -> None:
    play = Play(short=short)
    play.send((1, REFUSED), (0, CLOSE_CONNECTION))
    play.answer_all()
    assert await play.settled() == ["1 Channel.Close", "0 Connection.CloseOk"]


@both_ways
async def test_a_number_is_opened_again_where_the_controller_counts_channels(short: bool) -> None:
    play = Play(short=short, channels=0)
    limits = {"max-channels": 1}
    play.line.catalog.apply(ParameterPut("", "user-limits", "guest", limits))
    play.connection.channels.limits_changed(play.connection)
    play.send((1, OPEN), (1, CLOSE), (1, OPEN))
    asked, heard = [], await play.settled()
    while play.line.asked:
        asked.append(type(play.line.asked[0][0]))
        play.answer_one()
        heard += await play.settled()
    assert heard == ["1 Channel.OpenOk", "1 Channel.CloseOk", "1 Channel.OpenOk"]
    assert asked[1] is ChannelClose and len(asked) == 3


@both_ways
async def test_a_refused_channel_is_not_closed_before_the_controller_has_counted_it(
    short: bool,
) -> None:
    play = Play(short=short)
    play.line.catalog.apply(ParameterPut("", "user-limits", "guest", {"max-channels": 1}))
    play.connection.channels.limits_changed(play.connection)
    play.send((1, REFUSED), (1, CLOSE))
    play.answer_one()
    assert await play.settled() == ["1 Channel.Close"]
    play.send((1, commands.Channel.CloseOk()), (1, OPEN), (1, QOS))
    assert await play.settled() == []
    play.answer_one()
    assert await play.settled() == ["1 Channel.CloseOk"]
    play.answer_one()
    assert await play.settled() == ["1 Channel.OpenOk", "1 Basic.QosOk"]


@both_ways
async def test_what_waits_outlives_the_reads_of_other_clients(short: bool) -> None:
    play = Play(short=short)
    other = play.enter()
    play.send((1, DECLARE), (1, CLOSE), (1, OPEN), (1, QOS))
    play.read(other, method(1, OPEN) + method(1, QOS) * 20)
    play.answer_all()
    assert await play.settled() == [
        "1 Exchange.DeclareOk", "1 Channel.CloseOk", "1 Channel.OpenOk", "1 Basic.QosOk",
    ]  # fmt: skip


@both_ways
async def test_a_connection_that_fails_meanwhile_hears_the_answer_of_its_client(
    short: bool,
) -> None:
    play = Play(short=short)
    play.send((1, DECLARE), (1, CLOSE), (1, OPEN))
    play.connection.close(ConnectionException(320, "an operator"))
    assert await play.settled() == ["0 Connection.Close"]
    play.send((0, commands.Connection.CloseOk()))
    await play.settled()
    assert play.clients[play.at].is_closed


@both_ways
async def test_answers_are_those_of_a_client_that_waits(short: bool) -> None:
    """Random conversations get what a client gets that waits for each answer."""
    for seed in range(HISTORIES):
        dice = random.Random(seed)
        play = Play(short=short, channels=2)
        is_open, has_failed = {1: True, 2: True}, {1: False, 2: False}
        said: list[tuple[int, base.Frame]] = []
        expected: dict[int, list[str]] = {1: [], 2: []}
        for _ in range(30):
            number = dice.choice((1, 1, 2))
            what = dice.choice((DECLARE, DECLARE, REFUSED, QOS, CLOSE)) if is_open[number] else OPEN
            said.append((number, what))
            if what is OPEN or what is CLOSE:
                is_open[number], has_failed[number] = what is OPEN, False
                expected[number].append(f"{what.name}Ok")
            elif not has_failed[number]:
                has_failed[number] = what is REFUSED
                expected[number].append("Channel.Close" if what is REFUSED else f"{what.name}Ok")
        data = b"".join(method(number, what) for number, what in said)
        heard: list[str] = []
        while data:
            cut = dice.randrange(1, 200)
            play.read(play.at, data[:cut])
            data = data[cut:]
            play.run()
            if play.line.asked and dice.random() < 0.3:
                play.answer_one()
                heard += await play.settled()
        heard += await play.settled()
        while play.line.asked:
            play.answer_one()
            heard += await play.settled()
        got = {number: [name[2:] for name in heard if name[0] == str(number)] for number in (1, 2)}
        for number in (1, 2):
            assert " ".join(got[number]) == " ".join(expected[number]), f"seed {seed}"
        assert not play.connection.socket.paused


def test_a_client_of_a_broker_need_not_wait(broker: RealBroker, name: str) -> None:
    declare = commands.Queue.Declare(queue=name, durable=True)
    bind = commands.Queue.Bind(queue=name, exchange="amq.topic", routing_key="k")
    missing = commands.Queue.Bind(queue=f"{name}.missing", exchange="amq.topic", routing_key="k")
    with RawClient(broker.port) as client:
        client.shake_hands()
        for _ in range(20):
            before = (declare, bind, CLOSE, OPEN, declare, missing, CLOSE, OPEN, QOS)
            client.send(b"".join(method(1, what) for what in before))
            client.expect(commands.Queue.DeclareOk)
            client.expect(commands.Queue.BindOk)
            client.expect(commands.Channel.CloseOk)
            client.expect(commands.Channel.OpenOk)
            client.expect(commands.Queue.DeclareOk)
            refused = client.expect(commands.Channel.Close)
            assert (refused.reply_code, refused.class_id, refused.method_id) == (404, 50, 20)
            client.expect(commands.Channel.CloseOk)
            client.expect(commands.Channel.OpenOk)
            client.expect(commands.Basic.QosOk)
        client.ask(1, commands.Queue.Delete(queue=name), commands.Queue.DeleteOk)
