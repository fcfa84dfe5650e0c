"""What clients send, as bytes, written by pamqp."""

from __future__ import annotations

from pamqp import base, body, commands, frame, header

from shardmq.broker.amqp import (
    Connection,
    Event,
    Failed,
    Method,
    Open,
    Publishes,
    StartOk,
    contents,
)

HEADER = b"AMQP\x00\x00\x09\x01"


def method(channel: int, what: base.Frame) -> bytes:
    return frame.marshal(what, channel)


def publish(
    channel: int,
    exchange: str = "",
    key: str = "",
    content: bytes = b"",
    part: int = 4088,
    **props: object,
) -> list[bytes]:
    """Return the frames of a publish, with the content in bodies of `part` bytes."""
    properties = commands.Basic.Properties(**props)  # type: ignore[arg-type]
    parts = [content[at : at + part] for at in range(0, len(content), part)]
    return [
        method(channel, commands.Basic.Publish(exchange=exchange, routing_key=key)),
        frame.marshal(header.ContentHeader(0, len(content), properties), channel),
        *(frame.marshal(body.ContentBody(one), channel) for one in parts),
    ]


def shake_hands(
    connection: Connection, channels: int = 0, frame_max: int = 131072, channels_max: int = 2047
) -> None:
    """Open a connection as a client that is accepted, with the channels 1 to `channels`."""
    said = [
        HEADER,
        method(0, commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US")),
        method(0, commands.Connection.TuneOk(channels_max, frame_max, 60))
        + method(0, commands.Connection.Open("/")),
    ]
    for data in said + [method(n, commands.Channel.Open()) for n in range(1, channels + 1)]:
        for event in received(connection, data):
            assert not isinstance(event, Failed), event


def received(connection: Connection, data: bytes, again: bool = False) -> list[Event]:
    """Return all events of the bytes; every login is accepted.

    With `again`, events that were kept come once more before the others.
    """
    events = []
    unread = bytes(connection.unread) if again else b""
    connection.receive_data(unread + data, len(unread))
    while (event := connection.next_event()) is not None:
        if isinstance(event, StartOk):
            connection.tune()
        elif isinstance(event, Open):
            connection.send_method(0, commands.Connection.OpenOk())
        elif isinstance(event, Method) and isinstance(event.method, commands.Channel.Close):
            connection.send_method(event.channel, commands.Channel.CloseOk())
        elif isinstance(event, Publishes):
            event = Publishes(bytes(event.buffer), event.table, event.count)
        events.append(event)
    return events


def facts(events: list[Event]) -> list[object]:
    """Return the events in a form that does not depend on where the bytes were cut.

    Each message and each settle stands alone.
    """
    found: list[object] = []
    for event in events:
        if isinstance(event, Publishes):
            for at in range(event.count):
                row = event.table[at * 48 : at * 48 + 48]
                line = int.from_bytes(row[:4], "little") + int.from_bytes(row[4:6], "little") - 1
                message = contents.stored(event.buffer, event.table, at)
                found.append((row[6:8], event.buffer[line], row[24:], message))
        elif hasattr(event, "ranges"):
            for kind, first, last, multiple in event.ranges:
                found += [(event.channel, kind, tag, multiple) for tag in range(first, last + 1)]
        elif isinstance(event, Method):
            found.append((event.channel, event.method.name, dict(event.method)))
        elif isinstance(event, Failed):
            found.append((type(event.exception), event.exception.args, event.channel))
        else:
            found.append(event)
    return found
