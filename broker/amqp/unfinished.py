"""Publishes of which parts are still to come: put together frame by frame."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from shardmq.broker.amqp import frames, spec
from shardmq.broker.amqp.errors import ConnectionException
from shardmq.broker.amqp.events import Publishes

FRAME_HEAD: Final = struct.Struct(">BHI")
FRAME_END: Final = bytes([spec.FRAME_END])
# Bytes that unfinished messages of one connection may have together, beyond the largest message.
CONTENT_BYTES_MORE: Final = 32 << 20

# Returns memory of that size, which nobody else changes as long as it is used.
Room = Callable[[int], bytearray | memoryview]


class UnfinishedPublish:
    """A publish that is put together frame by frame.

    `data` is laid out as a publish that came whole: line | properties | head of a body frame, then
    the body, in one frame. `left` counts the bytes of the body that are missing.
    """

    __slots__ = ("_place", "_used", "body_len", "data", "facts", "left", "line_len", "props_len")

    def __init__(self, line: bytes) -> None:
        self.data: bytearray | memoryview = bytearray(line)
        self.line_len = len(line)
        self.props_len = self.body_len = self.left = 0
        self.facts = (0, 0, 0, 0)
        self._place: memoryview | None = None  # all of `data`, if it has room for the whole message
        self._used = 0  # bytes of it

    def begin_body(self, props: bytes, body_len: int, room: Room | None) -> None:
        """Take the properties and the size of the body.

        `room` returns memory for all of the message; None: it grows as its bytes come.
        """
        self.facts = frames.facts(props)
        self.props_len = len(props)
        self.body_len = self.left = body_len
        assert isinstance(self.data, bytearray)
        self.data += props
        if body_len:
            self.data += FRAME_HEAD.pack(spec.BODY_FRAME, 0, body_len)
        if room is not None:
            begun, self._used = self.data, len(self.data)
            self.data = room(self._used + body_len + len(FRAME_END))
            self._place = memoryview(self.data)
            self._place[: self._used] = begun

    def add(self, part: bytes | bytearray | memoryview) -> None:
        """Add bytes of the body. `left` counts whole frames and is the caller's."""
        if self._place is None:
            assert isinstance(self.data, bytearray)
            self.data += part
        else:
            stop = self._used + len(part)
            self._place[self._used : stop] = part
            self._used = stop

    def place(self, size: int) -> memoryview | None:
        """Return where the next `size` bytes of the body go, None if they have no place yet."""
        return None if self._place is None else self._place[self._used : self._used + size]

    def filled(self, size: int) -> None:
        """Note that so many bytes were written to the place of the next ones."""
        self._used += size

    @property
    def kept(self) -> int:
        """Return how many bytes of the client's are here."""
        return self.line_len + self.props_len + self.body_len - self.left

    def whole(self, channel: int) -> Publishes:
        body_off = self.line_len + self.props_len
        if self.body_len:
            self.add(FRAME_END)
        row = frames.row(
            0,
            self.line_len,
            channel,
            self.line_len,
            self.props_len,
            body_off,
            self.body_len,
            self.facts,
        )
        return Publishes(self.data, row, 1, lasting=True)


class BodyPart:
    """A body frame that comes in parts.

    `left` bytes of its `size` are missing, then its end. `shown` are its first bytes, for the text
    about a broken frame.
    """

    __slots__ = ("channel", "content", "left", "shown", "size")

    def __init__(self, channel: int, content: UnfinishedPublish, size: int, shown: bytes) -> None:
        self.channel = channel
        self.content = content
        self.size = self.left = size
        self.shown = shown


class UnfinishedPublishes:
    """The unfinished publishes of one connection by channel. Their bytes have a bound together."""

    def __init__(self, message_bytes_max: int) -> None:
        self._by_channel: dict[int, UnfinishedPublish] = {}
        self._bytes = 0
        self._bytes_max = message_bytes_max + CONTENT_BYTES_MORE

    def __len__(self) -> int:
        return len(self._by_channel)

    def get(self, channel: int) -> UnfinishedPublish | None:
        return self._by_channel.get(channel)

    def begin(self, channel: int, line: bytes) -> None:
        """Begin a publish with its exchange, routing key and bits."""
        self._by_channel[channel] = UnfinishedPublish(line)
        self.count(len(line))

    def count(self, more: int) -> None:
        """Count bytes that were added.

        Many channels that each begin a large message must not fill the memory. Raises
        ConnectionException.
        """
        self._bytes += more
        if self._bytes > self._bytes_max:
            text = f"more than {self._bytes_max} bytes in unfinished messages of one connection"
            raise ConnectionException(spec.RESOURCE_ERROR, text, *spec.PUBLISH)

    def finish(self, channel: int) -> Publishes:
        """Return the publish of a channel, which is whole now."""
        publish = self._by_channel.pop(channel)
        self._bytes -= publish.kept
        return publish.whole(channel)

    def drop(self, channel: int) -> None:
        """Forget the publish of a channel, if it has one."""
        publish = self._by_channel.pop(channel, None)
        if publish is not None:
            self._bytes -= publish.kept

    def clear(self) -> None:
        self._by_channel.clear()
        self._bytes = 0
