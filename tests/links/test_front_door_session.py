"""Play the controller's session with a front door against a small broker, without sockets."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, cast

import pytest
from pamqp import base, body, commands, frame, header

from shardmq.broker.amqp.methods import decode_method
from shardmq.broker.amqp.properties import encode_properties, read
from shardmq.broker.controller.peers.front_door import (
    GOT_BYTES_MAX,
    KEPT_BACK,
    NotMoved,
    Refused,
    Rejected,
    Session,
    Unavailable,
)
from shardmq.supervisor import amqp_client
from shardmq.supervisor.amqp_client import Client

BASIC = commands.Basic
HANDSHAKE = {
    "Connection.StartOk": commands.Connection.Tune(2047, 131072, 60),
    "Connection.Open": commands.Connection.OpenOk(),
    "Channel.Open": commands.Channel.OpenOk(),
    "Channel.Close": commands.Channel.CloseOk(),
    "Confirm.Select": commands.Confirm.SelectOk(),
    "Basic.Recover": BASIC.RecoverOk(),
    "Basic.Qos": BASIC.QosOk(),
}
Answer = Callable[[base.Frame], bytes | None]


def said(method: base.Frame) -> bytes:
    return bytes(frame.marshal(method, 0 if method.name.startswith("Connection") else 1))


def message(method: base.Frame, data: bytes, **properties: Any) -> bytes:
    head = header.ContentHeader(0, len(data), BASIC.Properties(**properties))
    content = frame.marshal(body.ContentBody(data), 1) if data else b""
    return said(method) + bytes(frame.marshal(head, 1)) + bytes(content)


class Broker:
    """The writer of a session; what it is given it answers by `answer`, else by HANDSHAKE."""

    def __init__(self, answer: Answer) -> None:
        self.reader = asyncio.StreamReader()
        self.heard: list[base.Frame] = []
        self._answer = answer

    def write(self, data: bytes) -> None:
        if data.startswith(b"AMQP"):
            self._tell(commands.Connection.Start(0, 9, {}, "EXTERNAL", "en_US"))
            return
        at = 0
        while at < len(data):
            kind, _, size = struct.unpack_from(">BHI", data, at)
            if kind == 1:
                self._hear(decode_method(data[at + 7 : at + 7 + size]))
            at += size + 8

    async def drain(self) -> None:
        return

    def _hear(self, method: base.Frame) -> None:
        self.heard.append(method)
        answer = self._answer(method)
        if answer is not None:
            self.reader.feed_data(answer)
        elif method.name in HANDSHAKE:
            self._tell(HANDSHAKE[method.name])

    def _tell(self, method: base.Frame) -> None:
        self.reader.feed_data(said(method))

    def names(self) -> list[str]:
        return [method.name for method in self.heard]


async def session(answer: Answer) -> tuple[Session, Broker]:
    broker = Broker(answer)
    writer = cast(asyncio.StreamWriter, broker)
    made = Session(broker.reader, writer, Client("/", "EXTERNAL", "somebody"))
    await made.expect(amqp_client.Opened())
    broker.heard.clear()
    return made, broker


def queue_of(*messages: bytes) -> Answer:
    """Answer each basic.get by the next of these messages, and then by get-empty."""
    left = list(messages)

    def answer(method: base.Frame) -> bytes | None:
        if not isinstance(method, BASIC.Get):
            return None
        return left.pop(0) if left else said(BASIC.GetEmpty())

    return answer


def got(tag: int, data: bytes, remaining: int = 0, **properties: Any) -> bytes:
    return message(BASIC.GetOk(tag, False, "x", "k", remaining), data, **properties)


@pytest.mark.parametrize(
    "answer, routed",
    [
        (said(BASIC.Ack(1)), True),
        (message(BASIC.Return(312, "NO_ROUTE", "x", "k"), b"hello") + said(BASIC.Ack(1)), False),
    ],
)
async def test_a_publish_is_done_when_it_is_confirmed(answer: bytes, routed: bool) -> None:
    made, broker = await session(lambda heard: answer if isinstance(heard, BASIC.Publish) else None)
    assert await made.publish("x", "k", {"priority": 3}, b"hello") is routed
    assert broker.names() == ["Confirm.Select", "Basic.Publish"]


async def test_a_publish_that_is_nacked_is_rejected() -> None:
    nack = said(BASIC.Nack(1, False, False))
    made, _ = await session(lambda heard: nack if isinstance(heard, BASIC.Publish) else None)
    with pytest.raises(Rejected):
        await made.publish("x", "k", {}, b"")


async def test_a_publish_that_is_confirmed_while_publishers_are_blocked_is_done() -> None:
    blocked = said(commands.Connection.Blocked("low on disk"))

    def answer(heard: base.Frame) -> bytes | None:
        if isinstance(heard, BASIC.Publish):
            return blocked + said(BASIC.Ack(1))
        return b"" if isinstance(heard, commands.Channel.Close) else None  # it is not read

    made, _ = await session(answer)
    async with asyncio.timeout(5):
        assert await made.publish("x", "k", {}, b"hello")
        assert made.blocked == "low on disk"
        await made.close()


async def test_an_alarm_that_comes_before_the_close_is_answered_does_not_hold_it_up() -> None:
    def answer(heard: base.Frame) -> bytes | None:
        if isinstance(heard, BASIC.Publish):
            return said(BASIC.Ack(1))
        is_close = isinstance(heard, commands.Channel.Close)
        return said(commands.Connection.Blocked("low on disk")) if is_close else None

    made, _ = await session(answer)
    async with asyncio.timeout(5):
        assert await made.publish("x", "k", {}, b"hello")
        await made.close()


@pytest.mark.parametrize(
    "requeue, reject, last",
    [
        (True, False, BASIC.Nack(2, True, True)),
        (False, True, BASIC.Nack(2, True, False)),
        (False, False, BASIC.Ack(2, True)),
    ],
)
async def test_got_messages_are_settled_at_once(requeue: bool, reject: bool, last: Any) -> None:
    made, broker = await session(queue_of(got(1, b"a", 1, priority=4), got(2, b"")))
    messages = await made.get("q", 10, requeue, reject)
    assert [(one.body, one.remaining) for one in messages] == [(b"a", 1), (b"", 0)]
    assert messages[0].properties.priority == 4
    await made.close()
    assert (broker.heard[-2].name, dict(broker.heard[-2])) == (last.name, dict(last))
    assert broker.names() == ["Basic.Get"] * 3 + [last.name, "Channel.Close"]


async def test_no_more_is_got_than_asked_for() -> None:
    made, broker = await session(queue_of(*(got(tag, b"x") for tag in range(1, 9))))
    assert len(await made.get("q", 3, False, False)) == 3
    assert broker.names() == ["Basic.Get"] * 3


async def test_got_bodies_have_a_bound_together() -> None:
    half = bytes(GOT_BYTES_MAX // 2)
    frames = [half[at : at + 100_000] for at in range(0, len(half), 100_000)]
    head = frame.marshal(header.ContentHeader(0, len(half), BASIC.Properties()), 1)
    content = b"".join(frame.marshal(body.ContentBody(one), 1) for one in frames)
    large = [said(BASIC.GetOk(tag, False, "", "q", 1)) + head + content for tag in (1, 2, 3)]
    made, _ = await session(queue_of(*large))
    assert [len(one.body) for one in await made.get("q", 9, False, False)] == [len(half)] * 2


async def test_a_blocked_connection_does_not_end_a_get() -> None:
    blocked = said(commands.Connection.Blocked("no room"))
    made, _ = await session(queue_of(blocked + got(1, b"a"), got(2, b"b")))
    assert [one.body for one in await made.get("q", 9, False, False)] == [b"a", b"b"]


async def test_a_read_asks_for_its_offset_and_ends_when_it_has_enough() -> None:
    def answer(heard: base.Frame) -> bytes | None:
        if not isinstance(heard, BASIC.Consume):
            return None
        messages = []
        for tag in (7, 8, 9):
            deliver = BASIC.Deliver("read", tag, False, "", "s")
            messages.append(message(deliver, b"m", headers={"x-stream-offset": tag}))
        return said(BASIC.ConsumeOk("read")) + b"".join(messages)

    made, broker = await session(answer)
    messages = await made.read("s", 2, 7, 0, 20)
    assert [(one.body, one.remaining) for one in messages] == [(b"m", 12), (b"m", 11)]
    qos, consume = broker.heard
    assert dict(qos)["prefetch_count"] == 2
    assert dict(consume)["arguments"] == {"x-stream-offset": 7}
    await made.close()


def confirming(queue: Answer, *answers: bytes) -> Answer:
    """Answer publishes one by one, and basic.get as `queue` does."""
    left = list(answers)
    return lambda heard: left.pop(0) if isinstance(heard, BASIC.Publish) else queue(heard)


async def test_moved_messages_are_acknowledged_once_the_other_queue_has_them() -> None:
    queue = queue_of(got(1, b"a", 1), got(2, b"b", 0))
    made, broker = await session(confirming(queue, b"", said(BASIC.Ack(2, True))))
    assert await made.move("q", "to", 10, lambda: 0.0) == (2, 0)
    await made.close()
    moved = ["Confirm.Select", *["Basic.Get"] * 3, *["Basic.Publish"] * 2, *["Basic.Ack"] * 2]
    assert broker.names() == [*moved, "Channel.Close"]


@pytest.mark.parametrize(
    "answers, why, acked",
    [
        ([said(BASIC.Ack(1)), said(BASIC.Nack(2))], "the other queue takes no more", [1]),
        ([b"", said(BASIC.Nack(2, True))], "the other queue takes no more", []),
        (
            [message(BASIC.Return(312, "NO_ROUTE", "", "to"), b"a"), said(BASIC.Ack(2, True))],
            "the other queue is not there any more",
            [],
        ),
    ],
)
async def test_refused_messages_stay(answers: list[bytes], why: str, acked: list[int]) -> None:
    queue = queue_of(got(1, b"a", 1), got(2, b"b", 0))
    made, broker = await session(confirming(queue, *answers))
    with pytest.raises(NotMoved) as raised:
        await made.move("q", "to", 10, lambda: 0.0)
    assert (raised.value.why, raised.value.moved) == (why, len(acked))
    acks = [heard.delivery_tag for heard in broker.heard if isinstance(heard, BASIC.Ack)]
    assert (acks, broker.names()[-1]) == (acked, "Basic.Recover")


async def test_a_message_of_a_producer_is_not_moved() -> None:
    queue = queue_of(got(1, b"a", 1), got(2, b"b", 0, headers={"x-producer-id": "p"}))
    made, broker = await session(confirming(queue, said(BASIC.Ack(1))))
    with pytest.raises(NotMoved) as raised:
        await made.move("q", "to", 10, lambda: 0.0)
    assert (raised.value.why, raised.value.moved) == (KEPT_BACK, 1)
    assert broker.names()[-2:] == ["Basic.Ack", "Basic.Recover"]


@pytest.mark.parametrize(
    "at, opened",
    [("Connection.StartOk", False), ("Connection.Open", False), ("Channel.Open", True)],
)
async def test_a_refusal_says_whether_the_connection_was_open(at: str, opened: bool) -> None:
    close = said(commands.Connection.Close(403, "ACCESS_REFUSED - why", 0, 0))
    with pytest.raises(Refused) as raised:
        await session(lambda heard: close if heard.name == at else None)
    refused = raised.value
    assert (refused.code, refused.text, refused.opened) == (403, "ACCESS_REFUSED - why", opened)


async def test_a_closed_channel_refuses_what_was_asked() -> None:
    close = said(commands.Channel.Close(404, "NOT_FOUND - no queue", 60, 70))
    made, _ = await session(lambda heard: close if isinstance(heard, BASIC.Get) else None)
    with pytest.raises(Refused) as raised:
        await made.get("q", 1, False, False)
    assert (raised.value.code, raised.value.opened) == (404, True)


async def test_what_is_not_amqp_is_an_unavailable_front_door() -> None:
    with pytest.raises(Unavailable):
        await session(lambda heard: b"HTTP/1.1 400 Bad Request\r\n")


async def test_a_lost_connection_is_told_to_the_driver() -> None:
    made, broker = await session(lambda heard: None)
    broker.reader.feed_eof()
    with pytest.raises(EOFError):
        await made.get("q", 1, False, False)


def test_properties_are_written_as_they_are_read() -> None:
    given = {"content_type": "text/plain", "headers": {"a": 1, "b": [True, "x"]}, "priority": 9}
    given |= {"delivery_mode": 2, "timestamp": 1 << 40, "message_id": "ü", "cluster_id": ""}
    found = read(encode_properties(given))
    assert {name: getattr(found, name) for name in given} == given
    assert found.type is None
    assert encode_properties({}) == b"\0\0"
