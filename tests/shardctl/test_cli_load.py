"""Count what the connections of shardctl perf are told, without sockets."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from pamqp import base, body, commands, frame, header

from shardmq.supervisor import amqp_client
from shardmq.supervisor.amqp_client import Received
from shardmq.supervisor.cli import perf
from shardmq.supervisor.cli.amqp import FRAME_BYTES_MAX, Connection, Counts, Lost

BASIC = commands.Basic
HANDSHAKE = [
    (commands.Connection.Start(0, 9, {}, "PLAIN", "en_US"), 0),
    (commands.Connection.Tune(2047, 1 << 20, 60), 0),
    (commands.Connection.OpenOk(), 0),
    (commands.Channel.OpenOk(), 1),
]


def frames(*methods: base.Frame) -> bytes:
    return b"".join(frame.marshal(method, 1) for method in methods)


def delivered(tag: int) -> bytes:
    head = header.ContentHeader(0, 1, BASIC.Properties())
    content = frame.marshal(head, 1) + frame.marshal(body.ContentBody(b"x"), 1)
    return frames(BASIC.Deliver("c", tag, False, "", "q")) + bytes(content)


class Written:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


async def opened() -> tuple[Connection, asyncio.StreamReader, Written]:
    reader, writer = asyncio.StreamReader(), Written()
    reader.feed_data(b"".join(frame.marshal(method, channel) for method, channel in HANDSHAKE))
    made = Connection(reader, cast(asyncio.StreamWriter, writer), Counts())
    await made.open("guest", "secret", "/")
    return made, reader, writer


async def test_a_connection_says_who_it_is_and_can_hear_of_a_wrong_password() -> None:
    made, _, writer = await opened()
    assert made.client.frame_bytes_max == FRAME_BYTES_MAX
    made.flush()
    start_ok: Any = frame.unmarshal(writer.data[8:])[2]
    assert start_ok.response == "\0guest\0secret"
    assert start_ok.client_properties["product"] == "shardctl"
    assert start_ok.client_properties["capabilities"] == {
        "authentication_failure_close": True,
        "connection.blocked": True,
    }


async def test_messages_behind_an_answer_are_counted_too() -> None:
    made, reader, _ = await opened()
    made.client.consume("q", "", True)
    reader.feed_data(frames(BASIC.ConsumeOk("c")) + delivered(1) + delivered(2))
    await made.expect(Received(amqp_client.CONSUME_OK))
    assert await made.take() == 2
    reader.feed_data(delivered(3))
    assert await made.take() == 1
    assert (made.last_delivery, made._counts.consumed) == (3, 3)


async def test_confirms_are_counted_up_to_the_highest_tag() -> None:
    made, reader, _ = await opened()
    acks = [BASIC.Ack(3, True), BASIC.Nack(4), BASIC.Ack(9, True)]
    reader.feed_data(frames(commands.Confirm.SelectOk(), *acks))
    assert await made.take() == 0
    assert (made.confirmed, made._counts.confirmed, made._counts.refused) == (9, 8, 1)


class Stuck(Written):
    """A writer to a broker that reads nothing."""

    async def drain(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("confirm", [0, 1])
async def test_a_load_ends_in_time_and_knows_the_alarm_that_blocks_its_publisher(
    confirm: int,
) -> None:
    made, reader, _ = await opened()
    made.writer = cast(asyncio.StreamWriter, Stuck())
    load = perf.Load(1, 0, 16, ["q"], False, confirm, 0, False, 0, seconds=0.05)
    reader.feed_data(frame.marshal(commands.Connection.Blocked("low on disk"), 0))
    async with asyncio.timeout(5):
        assert await perf._play([made], [], load, made._counts) < 5
    assert made._counts.blocked == "low on disk"
    assert made._counts.published


@pytest.mark.parametrize(
    "data, why",
    [
        (frames(commands.Channel.Close(404, "NOT_FOUND - no queue", 0, 0)), "404 NOT_FOUND"),
        (b"HTTP/1.1 400 Bad Request\r\n", "the answer is not AMQP"),
        (b"", "the connection was closed"),
    ],
)
async def test_an_end_says_why(data: bytes, why: str) -> None:
    made, reader, _ = await opened()
    reader.feed_data(data)
    reader.feed_eof()
    with pytest.raises(Lost, match=why):
        await made.take()
