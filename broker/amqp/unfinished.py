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
# Bytes of a broken frame that the text about it shows.
SHOWN_BYTES: Final = 16
# The end of a body frame and the head of the next one.
BETWEEN_BYTES: Final = 1 + FRAME_HEAD.size
# A rest of a frame that is smaller is read with what comes behind it.
PLACE_BYTES_MIN: Final = 8 << 10
# Frames that places() expects behind the present one.
FRAMES_AT_ONCE: Final = 64

# Returns memory of that size, which nobody else changes as long as it is used.
Room = Callable[[int], bytearray | memoryview]


class UnfinishedPublish:
    """A publish that is put together frame by frame.

    `data` is laid out as a publish that came whole: line | properties | head of a body frame, then
    the body, in one frame. `left` counts the bytes of the body that are missing.
    """

    __slots__ = (
        "body_len", "data", "facts", "is_dropped", "left", "line_len", "props_len", "used",
        "whole_place",
    )  # fmt: skip

    def __init__(self, line: bytes) -> None:
        self.data: bytearray | memoryview = bytearray(line)
        self.line_len = len(line)
        self.props_len = self.body_len = self.left = 0
        self.facts = (0, 0, 0, 0)
        # All of `data`, if it has room for the whole message, and how many bytes of it are used.
        self.whole_place: memoryview | None = None
        self.used = 0
        self.is_dropped = False

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
            begun, self.used = self.data, len(self.data)
            self.data = room(self.used + body_len + len(FRAME_END))
            self.whole_place = memoryview(self.data)
            self.whole_place[: self.used] = begun

    def add(self, part: bytes | bytearray | memoryview) -> None:
        """Add bytes of the body. `left` counts whole frames and is the caller's."""
        if self.whole_place is None:
            assert isinstance(self.data, bytearray)
            self.data += part
        else:
            stop = self.used + len(part)
            self.whole_place[self.used : stop] = part
            self.used = stop

    def filled(self, size: int) -> None:
        """Note that so many bytes were written to the place of the next ones."""
        self.used += size

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
    about a broken frame. `is_wanted` is false when the message was dropped meanwhile.
    """

    __slots__ = ("channel", "content", "left", "shown", "size")

    def __init__(self, channel: int, content: UnfinishedPublish, size: int, shown: bytes) -> None:
        self.channel = channel
        self.content = content
        self.size = self.left = size
        self.shown = shown

    def places(self, expected: int) -> list[memoryview] | None:
        """Return where the next bytes of the client go; None if they do not lie in one place.

        There is room for the rest of this frame, and for twice the `expected` bytes: places take
        time to make, which a client that sends a little at a time would cost with each read.

        The first place is that of the rest of this frame. Behind it are, for each of the next
        frames, a place for the end of the frame before with the head of the frame, and one for the
        bytes of the frame. Frames are expected to be as large as this one, and the last is smaller.
        """
        content = self.content
        place, at = content.whole_place, content.used
        if place is None or content.is_dropped or self.left < PLACE_BYTES_MIN:
            return None
        places = [place[at : at + self.left]]
        at += self.left
        left, frames_left = content.left - self.size, FRAMES_AT_ONCE
        ahead = 2 * expected - self.left
        while left and frames_left and ahead > 0:
            size = min(left, self.size)
            places += (memoryview(bytearray(BETWEEN_BYTES)), place[at : at + size])
            at += size
            left -= size
            ahead -= size
            frames_left -= 1
        return places


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

    def body_came(
        self, part: BodyPart, places: list[memoryview], count: int
    ) -> memoryview | bytearray:
        """Take `count` bytes that the client's socket has put into `places`.

        `places` are those of `part`, which the connection reads now, and one more for what comes
        behind them. Returns the bytes that are not of the body, for Connection.receive_data().
        """
        content, left, at = part.content, count, 1
        while True:
            got = min(left, part.left)
            content.filled(got)
            part.left -= got
            left -= got
            if part.left or left < BETWEEN_BYTES + SHOWN_BYTES or at + 1 >= len(places):
                break
            between, place = places[at], places[at + 1]
            if between != FRAME_END + FRAME_HEAD.pack(spec.BODY_FRAME, part.channel, len(place)):
                break
            left -= BETWEEN_BYTES
            at += 2
            content.left -= part.size
            self._bytes += part.size
            part.size = part.left = len(place)
            part.shown = bytes(place[:SHOWN_BYTES])
        if left <= len(places[at]):
            return places[at][:left]
        rest = bytearray()
        while left:
            rest += places[at][:left]
            left -= min(left, len(places[at]))
            at += 1
        return rest

    def drop(self, channel: int) -> None:
        """Forget the publish of a channel, if it has one."""
        publish = self._by_channel.pop(channel, None)
        if publish is not None:
            publish.is_dropped = True
            self._bytes -= publish.kept

    def clear(self) -> None:
        for publish in self._by_channel.values():
            publish.is_dropped = True
        self._by_channel.clear()
        self._bytes = 0
