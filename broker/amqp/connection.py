"""The server's side of one AMQP 0-9-1 connection: bytes in, events out; methods in, bytes out.

There is no socket and no clock here. A connection keeps the order of the protocol (states.py) and
answers only the protocol header and access.request by itself, and, if the caller lets it
(`answers_channels`), channel.open and channel.close of channels that are not used meanwhile; every
decision is the caller's. Bytes
are parsed where they lie and only as far as the next event: what the caller does about an event,
say closing a channel, is in force for the bytes behind it.

A publish of up to 64 KiB that is not whole yet is kept, with the number of bytes it needs before it
is worth another look. So bytes are not parsed again for each small piece they come in. The body of
a larger publish goes to its place as it comes, whatever part of a frame that is.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, Final

from pamqp import base, commands

from shardmq.broker.amqp import frames, properties, spec
from shardmq.broker.amqp.errors import ChannelException, ConnectionException
from shardmq.broker.amqp.events import (
    Binds,
    Event,
    Failed,
    Method,
    Nothing,
    Open,
    Opened,
    Publishes,
    Settles,
    StartOk,
)
from shardmq.broker.amqp.methods import (
    AccessRequest,
    AccessRequestOk,
    ChannelOpenOk,
    decode_method,
    decode_start_ok,
    encode_method,
)
from shardmq.broker.amqp.states import (
    CHANNEL_DISCARDS,
    CHANNEL_HOLDS_OPEN,
    CHANNEL_SILENT,
    CONNECTION_DISCARDS,
    CONNECTION_SENT,
    ChannelState,
    ConnectionState,
    next_of_channel,
    next_of_connection,
)
from shardmq.broker.amqp.unfinished import (
    FRAME_END,
    FRAME_HEAD,
    SHOWN_BYTES,
    BodyPart,
    Room,
    UnfinishedPublish,
    UnfinishedPublishes,
)

_CONTENT_HEAD = struct.Struct(">HHQ")
_IDS = struct.Struct(">HH")  # class and method
_IDS_AT, _IDS_END = FRAME_HEAD.size, FRAME_HEAD.size + _IDS.size
_BIND: Final = struct.pack(">I", commands.Queue.Bind.index)
# Two methods are read by hand: some clients open a channel for each thing that they do.
_OPEN_IDS: Final = struct.pack(">I", commands.Channel.Open.index)
_CLOSE_IDS: Final = struct.pack(">I", commands.Channel.Close.index)
_OPEN_CHANNEL, _CLOSE_CHANNEL = commands.Channel.Open(), commands.Channel.Close()
_OPEN_CONNECTION_IDS: Final = struct.pack(">I", commands.Connection.Open.index)
# connection.close has the fields of channel.close.
_CLOSE_CONNECTION_IDS: Final = struct.pack(">I", commands.Connection.Close.index)
_CLOSE_CONNECTION: Final = commands.Connection.Close()
_LENGTH_AT: Final = 3  # of the payload of a frame, in its head
# Where the text of each of them has its length, from the beginning of the frame on, and how long a
# payload without text is.
_OPEN_TEXT_AT, _OPEN_BYTES_MIN = _IDS_END, 5
_CLOSE_TEXT_AT, _CLOSE_BYTES_MIN = _IDS_END + 2, 11
# The answers behind the number of the channel.
_OPEN_OK, _CLOSE_OK = (
    struct.pack(">I", len(payload)) + payload + FRAME_END
    for payload in (encode_method(ChannelOpenOk()), encode_method(commands.Channel.CloseOk()))
)
_START_OK_IDS: Final = struct.pack(">I", commands.Connection.StartOk.index)
_TUNE_OK: Final = struct.Struct(">IHIH")
_TUNE_OK_IDS: Final = struct.pack(">I", commands.Connection.TuneOk.index)
_FRAME_KINDS = frozenset(
    {spec.METHOD_FRAME, spec.HEADER_FRAME, spec.BODY_FRAME, spec.HEARTBEAT_FRAME}
)
_HEARTBEAT: Final = FRAME_HEAD.pack(spec.HEARTBEAT_FRAME, 0, 0) + FRAME_END
_IMMEDIATE = 2
# Frames without an event (heartbeats, parts of bodies, discarded frames) before next_event()
# returns Nothing.
EVENTLESS_FRAMES_MAX: Final = 64
# Body frames of at least this much are taken in parts, as their bytes come.
PART_BYTES_MIN: Final = 8 << 10
# A body of up to this much gets all its memory at its header, if no other message is unfinished.
ROOM_BYTES_MAX: Final = 4 << 20
# Methods that states.py knows by name; all others are "method" there.
_CHANNEL_NAMES: Final = {
    struct.pack(">I", method.index): method.name
    for method in (
        commands.Channel.Open,
        commands.Channel.Close,
        commands.Channel.CloseOk,
        commands.Basic.Publish,
    )
}
# Constants because each read looks at them, and members of an enum are looked up slowly.
_AWAITING_HEADER, _OPEN, _CLOSED = (
    ConnectionState.AWAITING_HEADER,
    ConnectionState.OPEN,
    ConnectionState.CLOSED,
)
_AWAITING_BODY: Final = int(ChannelState.AWAITING_BODY)
_NEVER_OPENED: Final = int(ChannelState.CLOSED)
# An open channel of which the caller has not been told yet. For frames.pyx it is not open.
_UNTOLD: Final = 128 | int(ChannelState.OPEN)
_CAN_CLOSE: Final = (int(ChannelState.OPEN), _UNTOLD)
_CLOSED_BY_CLIENT: Final = int(ChannelState.CLOSED_BY_CLIENT)
_UNREAD: Final = memoryview(b"")  # nothing
_NOT_OPEN: Final = (ChannelState.CLOSED, *CHANNEL_DISCARDS)
_CLOSES: Final = frozenset(
    struct.pack(">I", method.index)
    for method in (commands.Connection.Close, commands.Connection.CloseOk)
)


class Connection(frames.Incoming):
    """The state of one AMQP connection.

    Call `receive_data`, then `next_event` until it returns None, then `data_to_send`.
    """

    def __init__(
        self,
        *,
        frame_bytes_max: int = 131072,
        channels_max: int = 2047,
        heartbeat_s: int = 60,
        server_properties: dict[str, Any],
        mechanisms: bytes = b"PLAIN AMQPLAIN",
        message_bytes_max: int = 134217728,
        room: Room = frames.room,
    ) -> None:
        """Begin at the protocol header. `room` returns memory for a large message."""
        # First what we offer, from tune-ok on what was agreed.
        self.frame_bytes_max = frame_bytes_max
        # Frames are small until login and tune are done.
        self.received_frame_bytes_max = _with_margin(spec.FRAME_BYTES_MIN)
        self.channels_max = channels_max
        self.heartbeat_s = heartbeat_s
        self.client_properties: dict[str, Any] = {}
        # Whether channels are opened here; `opened` counts them until the caller sets it to 0.
        self.answers_channels = False
        self.opened = 0
        self._server_properties = server_properties
        self._mechanisms = mechanisms
        self.message_bytes_max = message_bytes_max
        self._room = room
        self.state = ConnectionState.AWAITING_HEADER
        self._close_sent = False
        # The state of each channel number up to the highest that was opened.
        self.channels = bytearray(1)
        self.unfinished = UnfinishedPublishes(message_bytes_max)
        self._out: list[bytes] = []
        # What is read: `buffer` from `at` on, then `next`. At least _needed bytes are needed to see
        # more.
        self.buffer: bytearray | memoryview = memoryview(b"")
        self.at = 0
        self.next: memoryview | None = None
        self._needed = 0
        self.part: BodyPart | None = None  # what is read begins within this frame
        # A channel.open is the next frame, and the last channel of its number waits for close-ok.
        self.reopening = False
        self._out_of_step = False  # after a broken frame nobody knows where the next one begins

    # -- in ----------------------------------------------------------------------------------------

    @property
    def unread(self) -> bytearray:
        """Return the bytes that next_event() kept when it returned None."""
        return bytearray() if isinstance(self.buffer, memoryview) else self.buffer[self.at :]

    def receive_data(self, data: bytes | bytearray | memoryview, again: int = 0) -> None:
        """Take bytes from the client.

        Call next_event() until it returns None before the bytes are changed or more are given.
        `again`: so many bytes at the beginning are `unread`, all of it, so that all bytes are
        parsed in one piece.
        """
        if again:
            self.drop_read()
        if self.state in CONNECTION_DISCARDS and (
            self.next is not None or isinstance(self.buffer, memoryview)
        ):
            self.drop_read()  # the caller closed and left it unread
        if self.at < len(self.buffer):
            self.next = memoryview(data)
        else:
            self.buffer, self.at = data if isinstance(data, memoryview) else memoryview(data), 0

    def next_event(self) -> Event | None:
        """Return the next event, or None when more bytes are needed.

        Nothing is returned behind many frames without an event. With None and `reopening`, what is
        unread is kept; it has events again when the caller has sent channel.close-ok.
        """
        self.reopening = False
        for _ in range(EVENTLESS_FRAMES_MAX):
            have = len(self.buffer) - self.at
            if not have and self.next is None:
                self.buffer, self.at, self._needed = _UNREAD, 0, 0
                return None
            if self._out_of_step or self.state is _CLOSED:
                self.drop_read()
                return None
            if (not have or have < self._needed) and not self._has(self._needed):
                return None
            self._needed = 0
            try:
                event = self._parse()
            except ConnectionException as error:
                if self.state in CONNECTION_DISCARDS:
                    continue
                self.state = ConnectionState.CLOSING
                return Failed(error.with_traceback(None))
            if event is not None:
                return event
            if self.reopening:
                self.keep_unread()
                return None
        return Nothing()

    def _has(self, needed: int) -> bool:
        """Return whether `needed` bytes, and at least one, are there from `at` on in one piece.

        If not, there is nothing to do until more was received.
        """
        have = len(self.buffer) - self.at
        if have >= needed and have:
            return True
        if not have:
            if self.next is None:
                self.drop_read()
                return False
            self.buffer, self.at, self.next = self.next, 0, None
            return self._has(needed)
        if isinstance(self.buffer, memoryview) or self.at:
            # A new buffer: the old one is the caller's, or belongs to an event.
            self.buffer, self.at = bytearray(self.buffer[self.at :]), 0
        if self.next is not None:
            missing = needed - have
            self.buffer += self.next[:missing]
            self.next = self.next[missing:] if len(self.next) > missing else None
        if len(self.buffer) >= needed:
            return True
        self._needed = needed
        return False

    def keep_unread(self) -> None:
        """Copy what is unread.

        The bytes given may then be changed before next_event() returns None.
        """
        if self.next is not None:
            self.buffer, self.at, self.next = (
                bytearray(self.buffer[self.at :]) + self.next,
                0,
                None,
            )
        elif isinstance(self.buffer, memoryview):
            self.buffer, self.at = bytearray(self.buffer[self.at :]), 0

    def drop_read(self) -> None:
        """Forget what was received and is not parsed."""
        self.buffer, self.at, self.next, self._needed = _UNREAD, 0, None, 0

    def _parse(self) -> Event | None:
        """Return the next event, or None.

        With None either some bytes were taken that give no event, or _needed says how many bytes
        are needed.
        """
        if self.part is not None:
            return self._go_on_with_part(self.part)
        if self.state is not _OPEN:
            if self.state is not _AWAITING_HEADER:
                return self._read_frame()
            self._read_protocol_header()
            return None
        buffer = self.buffer
        at, table, count, why, needed = frames.scan(
            buffer,
            self.at,
            len(buffer),
            self.channels,
            self.received_frame_bytes_max,
            self.message_bytes_max,
        )
        if count:
            self.at = at
            return Publishes(buffer, table, count)
        if why == frames.INCOMPLETE:
            self._needed = needed
            return None
        channel = buffer[self.at + 1] << 8 | buffer[self.at + 2]
        state = self.channels[channel] if channel < len(self.channels) else _NEVER_OPENED
        ids = bytes(buffer[self.at + _IDS_AT : self.at + _IDS_END])
        if ids in (_OPEN_IDS, _CLOSE_IDS):
            begun = self.at
            event = self._open_or_close(buffer, ids, channel, state)
            if event is not None or self.at != begun:
                return event
        if state == _UNTOLD:
            self.channels[channel] = frames.CHANNEL_OPEN
            return Opened(channel)
        if why == frames.SETTLE:
            at, channel, ranges = frames.settles(buffer, self.at, len(buffer))
            if ranges:
                self.at = at
                return Settles(channel, ranges)
        if why == frames.OTHER and ids == _BIND:
            at, channel, ends, nowait = frames.binds(buffer, self.at, len(buffer), self.channels)
            if ends:
                self.at = at
                return Binds(channel, ends, nowait)
        return self._read_frame()

    def _open_or_close(
        self, buffer: bytearray | memoryview, ids: bytes, channel: int, state: int
    ) -> Method | None:
        """Take a channel.open or channel.close that is whole and in order, and no other frame.

        There is no event if the frame is answered here. `state` is that of the channel.
        """
        at = self.at
        opens = ids == _OPEN_IDS
        text_at, bytes_min = (
            (at + _OPEN_TEXT_AT, _OPEN_BYTES_MIN)
            if opens
            else (at + _CLOSE_TEXT_AT, _CLOSE_BYTES_MIN)
        )
        size = int.from_bytes(buffer[at + _LENGTH_AT : at + _IDS_AT], "big")
        end = at + size + spec.FRAME_OVERHEAD_BYTES
        if (
            (state != _NEVER_OPENED if opens else state not in _CAN_CLOSE)
            or not channel
            or buffer[at] != spec.METHOD_FRAME
            or size < bytes_min
            or end > len(buffer)
            or buffer[end - 1] != spec.FRAME_END
            or buffer[text_at] != size - bytes_min
            or not bytes(buffer[text_at : text_at + 1 + size - bytes_min]).isascii()
        ):
            return None
        self.at = end
        if opens:
            _make_room(self.channels, channel, self.channels_max)
            if not self.answers_channels:
                self.channels[channel] = frames.CHANNEL_OPEN
                return Method(channel, _OPEN_CHANNEL)
            self.channels[channel] = _UNTOLD
            self.opened += 1
            self._out.append(b"\1" + buffer[at + 1 : at + _LENGTH_AT] + _OPEN_OK)
        elif state == _UNTOLD:
            self.channels[channel] = _NEVER_OPENED
            self._out.append(b"\1" + buffer[at + 1 : at + _LENGTH_AT] + _CLOSE_OK)
        else:
            self.channels[channel] = _CLOSED_BY_CLIENT
            return Method(channel, _CLOSE_CHANNEL)
        return None

    def _read_protocol_header(self) -> None:
        if not self._has(len(spec.PROTOCOL_HEADER)):
            return
        said = bytes(self.buffer[self.at : self.at + len(spec.PROTOCOL_HEADER)])
        self.at += len(said)
        if said not in (spec.PROTOCOL_HEADER, spec.PROTOCOL_HEADER_0_9):
            self._out.append(spec.PROTOCOL_HEADER)
            self.state = ConnectionState.CLOSED
            return
        self.state = next_of_connection(self.state, "protocol header")
        self._out.append(start_frame(self._server_properties, self._mechanisms))

    def _read_frame(self) -> Event | None:
        """Take one frame of any kind."""
        if not self._has(FRAME_HEAD.size):
            return None
        kind, channel, size = FRAME_HEAD.unpack_from(self.buffer, self.at)
        frame_bytes = size + spec.FRAME_OVERHEAD_BYTES
        if kind not in _FRAME_KINDS:
            raise self._broken_frame(kind, b"", "unknown_frame")
        if frame_bytes > self.received_frame_bytes_max:
            payload_bytes_max = self.received_frame_bytes_max - 2 * spec.FRAME_OVERHEAD_BYTES
            raise self._broken_frame(kind, b"", f"{{frame_too_large,{size},{payload_bytes_max}}}")
        if kind == spec.BODY_FRAME and size >= PART_BYTES_MIN:
            content = self.unfinished.get(channel)
            if (
                content is not None
                and size <= content.left
                and self.channels[channel] == _AWAITING_BODY
            ):
                return self._read_part(channel, content, size)
        if not self._has(frame_bytes):
            return None
        payload = bytes(self.buffer[self.at + FRAME_HEAD.size : self.at + frame_bytes - 1])
        end = self.buffer[self.at + frame_bytes - 1]
        if end != spec.FRAME_END:
            raise self._broken_frame(kind, payload, f"{{invalid_frame_end_marker,{end}}}")
        if (
            payload[:4] == _OPEN_IDS
            and kind == spec.METHOD_FRAME
            and self.state is _OPEN
            and _state_of(self.channels, channel) in CHANNEL_HOLDS_OPEN
        ):
            self.reopening = True
            return None
        self.at += frame_bytes
        try:
            return self._received(kind, channel, payload)
        except ChannelException as error:
            # Until the caller closes the channel, what else comes on it is discarded already.
            self._set_channel(channel, ChannelState.CLOSING)
            return Failed(error.with_traceback(None), channel)

    def _read_part(self, channel: int, content: UnfinishedPublish, size: int) -> Event | None:
        """Begin a body frame that is put in its place from its head on."""
        if not self._has(FRAME_HEAD.size + SHOWN_BYTES):
            return None
        self.at += FRAME_HEAD.size
        self.part = BodyPart(
            channel, content, size, bytes(self.buffer[self.at : self.at + SHOWN_BYTES])
        )
        return self._go_on_with_part(self.part)

    def _go_on_with_part(self, part: BodyPart) -> Event | None:
        """Put what has come of the frame in its place, if its message is still wanted."""
        if not self._has(1):
            return None
        count = min(len(self.buffer) - self.at, part.left)
        is_wanted = self.unfinished.get(part.channel) is part.content
        if count:
            if is_wanted:
                part.content.add(memoryview(self.buffer)[self.at : self.at + count])
            self.at += count
            part.left -= count
        if part.left or not self._has(1):
            return None
        self.part = None
        end = self.buffer[self.at]
        if end != spec.FRAME_END:
            raise self._broken_frame(
                spec.BODY_FRAME, part.shown, f"{{invalid_frame_end_marker,{end}}}", part.size
            )
        self.at += 1
        try:
            if is_wanted and self.state is _OPEN:
                return self._came_whole(part.channel, part.content, part.size)
            return self._received(spec.BODY_FRAME, part.channel, b"")
        except ChannelException as error:
            self._set_channel(part.channel, ChannelState.CLOSING)
            return Failed(error.with_traceback(None), part.channel)

    def _broken_frame(
        self, kind: int, payload: bytes, what: str, size: int = 0
    ) -> ConnectionException:
        """Return an error in RabbitMQ's words, which are Erlang's.

        `size` is that of the whole payload if `payload` is only its beginning.
        """
        self._out_of_step = True
        return ConnectionException(spec.FRAME_ERROR, f"{_shown(kind, payload, size)}: {what}")

    def _received(self, kind: int, channel: int, payload: bytes) -> Event | None:
        if self.state in CONNECTION_DISCARDS:
            if kind == spec.METHOD_FRAME and channel == 0 and payload[:4] in _CLOSES:
                method = decode_method(payload)
                if (
                    self.state is ConnectionState.CLOSING
                ):  # a second close of the same side is forgotten
                    self.state = next_of_connection(self.state, method.name)
                    return Method(0, method)
            return None
        if kind == spec.HEARTBEAT_FRAME:
            if payload:
                raise ConnectionException(
                    spec.FRAME_ERROR, f"{_shown(kind, payload)}: unknown_frame"
                )
            if channel:
                raise ConnectionException(
                    spec.UNEXPECTED_FRAME, "heartbeat frame must be on channel 0"
                )
            return None
        if kind == spec.METHOD_FRAME and len(payload) < _IDS.size:
            raise ConnectionException(spec.FRAME_ERROR, f"{_shown(kind, payload)}: unknown_frame")
        if channel == 0:
            if kind != spec.METHOD_FRAME:
                raise ConnectionException(spec.UNEXPECTED_FRAME, _shown(kind, payload))
            return self._received_on_connection(payload)
        if self.state is not ConnectionState.OPEN:
            text = f"frame on channel {channel} in state {self.state.name}"
            raise ConnectionException(spec.COMMAND_INVALID, text)
        if kind == spec.METHOD_FRAME:
            return self._received_method(channel, payload)
        if kind == spec.HEADER_FRAME:
            return self._received_header(channel, payload)
        return self._received_body(channel, payload)

    # -- channel 0 ---------------------------------------------------------------------------------

    def _received_on_connection(self, payload: bytes) -> Event | None:
        if self.state is ConnectionState.AWAITING_START_OK and payload[:4] == _START_OK_IDS:
            said = decode_start_ok(payload)
            self.state = next_of_connection(self.state, commands.Connection.StartOk.name)
            self.client_properties = said.client_properties
            return StartOk(said.mechanism, said.response, said.locale, said.client_properties)
        if len(payload) == _TUNE_OK.size and payload[:4] == _TUNE_OK_IDS:
            name = commands.Connection.TuneOk.name
            self.state = next_of_connection(self.state, name, _ids(payload))
            _, channels_max, frame_bytes_max, self.heartbeat_s = _TUNE_OK.unpack(payload)
            self.channels_max = _agreed("channel_max", channels_max, 1, self.channels_max)
            self.frame_bytes_max = _agreed(
                "frame_max", frame_bytes_max, spec.FRAME_BYTES_MIN, self.frame_bytes_max
            )
            self.received_frame_bytes_max = _with_margin(self.frame_bytes_max)
            return None
        if (
            self.state is _OPEN
            and payload[:4] == _CLOSE_CONNECTION_IDS
            and len(payload) > _CLOSE_TEXT_AT - _IDS_AT
            and len(payload) == _CLOSE_BYTES_MIN + payload[_CLOSE_TEXT_AT - _IDS_AT]
            and payload[_CLOSE_TEXT_AT - _IDS_AT :].isascii()
        ):
            self.state = ConnectionState.CLOSED_BY_CLIENT
            return Method(0, _CLOSE_CONNECTION)
        if self.state is ConnectionState.AWAITING_OPEN and (vhost := _vhost_of_open(payload)):
            self.state = ConnectionState.OPENING
            return Open(vhost)
        method = decode_method(payload)
        ids = _ids(payload)
        if ids[0] != spec.CONNECTION:
            raise ConnectionException(
                spec.COMMAND_INVALID, f"method {method.name} on channel 0", *ids
            )
        self.state = next_of_connection(self.state, method.name, ids)
        if isinstance(method, commands.Connection.Open):
            return Open(method.virtual_host)
        return Method(0, method)

    # -- channels ----------------------------------------------------------------------------------

    def _received_method(self, channel: int, payload: bytes) -> Event | None:
        state = _state_of(self.channels, channel)
        name = _CHANNEL_NAMES.get(payload[:4], "method")
        ids = _ids(payload)
        following = next_of_channel(state, name, ids)
        if following is None:
            return None
        method = decode_method(payload)
        if ids[0] == spec.CONNECTION:
            raise ConnectionException(spec.COMMAND_INVALID, "unimplemented method", *ids)
        if isinstance(method, commands.Basic.Publish):
            line = payload[6:]
            if line[-1] & _IMMEDIATE:
                raise ConnectionException(spec.NOT_IMPLEMENTED, "immediate=true", *ids)
            self.channels[channel] = following
            self.unfinished.begin(channel, line)
            return None
        if isinstance(method, commands.Channel.Open):
            _make_room(self.channels, channel, self.channels_max)
        if following is state and name == commands.Channel.CloseOk.name:
            return None  # a close-ok that answers nothing
        self.channels[channel] = following
        if isinstance(method, AccessRequest):
            self.send_method(channel, AccessRequestOk())
            return None
        return Method(channel, method)

    def _received_header(self, channel: int, payload: bytes) -> Event | None:
        state = _state_of(self.channels, channel)
        if state in CHANNEL_DISCARDS:
            return None
        if state is ChannelState.AWAITING_CONTENT_HEADER and len(payload) < _CONTENT_HEAD.size:
            raise ConnectionException(
                spec.SYNTAX_ERROR, "a content header of fewer than 12 bytes", *spec.PUBLISH
            )
        class_id, _, body_len = _CONTENT_HEAD.unpack_from(payload.ljust(_CONTENT_HEAD.size))
        self.channels[channel] = (
            next_of_channel(state, "header" if body_len else "header of no body") or state
        )
        if class_id != spec.BASIC:
            text = f"expected content header for class 60, got one for class {class_id} instead"
            raise ConnectionException(spec.UNEXPECTED_FRAME, text, *spec.PUBLISH)
        if body_len > self.message_bytes_max:
            text = (
                f"message size {body_len} is larger than "
                f"configured max size {self.message_bytes_max}"
            )
            raise ChannelException(spec.PRECONDITION_FAILED, text, *spec.PUBLISH)
        props = payload[_CONTENT_HEAD.size :]
        properties.check(props)
        has_room = len(self.unfinished) == 1 and PART_BYTES_MIN <= body_len <= ROOM_BYTES_MAX
        content = self.unfinished.get(channel)
        assert content is not None  # content headers pass only in the state that has one
        content.begin_body(props, body_len, self._room if has_room else None)
        self.unfinished.count(len(props))
        return None if body_len else self.unfinished.finish(channel)

    def _received_body(self, channel: int, payload: bytes) -> Event | None:
        state = _state_of(self.channels, channel)
        content = self.unfinished.get(channel)
        if content is None or len(payload) > content.left:
            if next_of_channel(state, "body") is None:
                return None
            assert content is not None  # body frames pass only in the state that has one
            text = f"{len(payload) - content.left} bytes behind a body of {content.body_len}"
            raise ConnectionException(spec.FRAME_ERROR, text, *spec.PUBLISH)
        content.add(payload)
        return self._came_whole(channel, content, len(payload))

    def _came_whole(self, channel: int, content: UnfinishedPublish, size: int) -> Publishes | None:
        """Count a body frame whose bytes are in their place; return the publish it ends."""
        is_last = content.left == size
        following = next_of_channel(
            _state_of(self.channels, channel), "last body" if is_last else "body"
        )
        if following is None:
            return None
        self.channels[channel] = following
        self.unfinished.count(size)
        content.left -= size
        return self.unfinished.finish(channel) if is_last else None

    # -- out ---------------------------------------------------------------------------------------

    def tune(self) -> None:
        """Offer our limits: the client has proved who it is."""
        if self.state not in CONNECTION_DISCARDS:
            name = commands.Connection.Tune.name
            self.state = CONNECTION_SENT.get((self.state, name), self.state)
            self._out.append(tune_frame(self.channels_max, self.frame_bytes_max, self.heartbeat_s))

    def send_method(self, channel: int, method: base.Frame, count: int = 1) -> None:
        """Send a method `count` times.

        On a channel or connection that we have closed, only close-ok is sent.
        """
        if channel == 0:
            if self.state in CONNECTION_DISCARDS and not isinstance(
                method, commands.Connection.CloseOk
            ):
                return
            self.state = CONNECTION_SENT.get((self.state, method.name), self.state)
        elif isinstance(method, commands.Channel.CloseOk):
            if _state_of(self.channels, channel) is not ChannelState.CLOSED:
                self._set_channel(channel, ChannelState.CLOSED)
        elif self._close_sent or _state_of(self.channels, channel) in CHANNEL_SILENT:
            return
        frame = _frame(channel, encode_method(method))
        self._out.append(frame if count == 1 else frame * count)

    def send_heartbeat(self) -> None:
        self._out.append(_HEARTBEAT)

    def data_to_send(self) -> list[bytes]:
        """Return the bytes to write, in order, and forget them."""
        if not self._out:
            return []
        out, self._out = self._out, []
        return out

    def close_channel(self, channel: int, exc: ChannelException) -> None:
        """Send channel.close.

        What else comes on the channel is discarded until the client's close-ok. If the client has
        closed the channel too, that is until our close-ok.
        """
        state = _state_of(self.channels, channel)
        if self._close_sent or state is ChannelState.CLOSED:
            return
        by_client = state is ChannelState.CLOSED_BY_CLIENT
        self._set_channel(
            channel, ChannelState.CLOSED_BY_BOTH if by_client else ChannelState.CLOSING
        )
        close = commands.Channel.Close(exc.code, exc.reply_text, exc.class_id, exc.method_id)
        self._out.append(_frame(channel, encode_method(close)))

    def close(self, exc: ConnectionException) -> None:
        """Send connection.close.

        What else comes is discarded until the client's close-ok.
        """
        if self._close_sent or self.state in (
            ConnectionState.CLOSED,
            ConnectionState.CLOSED_BY_CLIENT,
        ):
            return
        if self.state is ConnectionState.AWAITING_HEADER:  # the client does not speak AMQP yet
            self.state = ConnectionState.CLOSED
            return
        self.state = ConnectionState.CLOSING
        self._close_sent = True
        self.unfinished.clear()
        close = commands.Connection.Close(exc.code, exc.reply_text, exc.class_id, exc.method_id)
        self._out.append(_frame(0, encode_method(close)))

    def _set_channel(self, channel: int, state: ChannelState) -> None:
        self.unfinished.drop(channel)
        self.channels[channel] = state

    # -- state ---------------------------------------------------------------------------

    def untold(self, tell: bool = False) -> list[int]:
        """Return the open channels of which the caller has not been told by Opened.

        With `tell` the caller takes note of these channels now.
        """
        found = [number for number, state in enumerate(self.channels) if state == _UNTOLD]
        if tell:
            for number in found:
                self.channels[number] = frames.CHANNEL_OPEN
        return found

    def channel_is_open(self, channel: int) -> bool:
        state = _state_of(self.channels, channel)
        return state is not ChannelState.CLOSED and state not in CHANNEL_DISCARDS

    @property
    def closed(self) -> bool:
        """Return whether nothing more is read or said.

        data_to_send() may still return bytes.
        """
        return self.state is _CLOSED


def hand_on(
    connection: Connection,
    client_properties: dict[str, Any],
    channels_max: int,
    frame_bytes_max: int,
    heartbeat_s: int,
    channels: int,
) -> None:
    """Let a connection go on from where another has done the handshake: open-ok is to be sent.

    `channels` has a bit for the number of each open channel, of which the caller is told when the
    channel is first used.
    """
    connection.state = ConnectionState.OPENING
    connection.client_properties = client_properties
    connection.channels_max, connection.heartbeat_s = channels_max, heartbeat_s
    connection.frame_bytes_max = frame_bytes_max
    connection.received_frame_bytes_max = _with_margin(frame_bytes_max)
    connection.channels = bytearray(
        _UNTOLD if channels >> number & 1 else 0 for number in range(max(1, channels.bit_length()))
    )


def _vhost_of_open(payload: bytes) -> str:
    """Return the vhost of a connection.open in plain letters, "" for any other method."""
    if len(payload) < 7 or payload[:4] != _OPEN_CONNECTION_IDS:
        return ""
    end = 5 + payload[4]
    if end >= len(payload) or len(payload) != end + 1 + payload[end] + 1:
        return ""
    names = payload[5:-1]
    return names[: end - 5].decode() if names.isascii() else ""


# The last connection.start for each list of mechanisms, of which there are two.
_start_frames: dict[bytes, tuple[dict[str, Any], bytes]] = {}


def start_frame(server_properties: dict[str, Any], mechanisms: bytes) -> bytes:
    """Return connection.start. All connections are given the same object, so it is encoded once."""
    known = _start_frames.get(mechanisms)
    if known is None or known[0] is not server_properties:
        names = mechanisms.decode()
        payload = encode_method(commands.Connection.Start(0, 9, server_properties, names, "en_US"))
        known = _start_frames[mechanisms] = server_properties, _frame(0, payload)
    return known[1]


@lru_cache(8)
def tune_frame(channels_max: int, frame_bytes_max: int, heartbeat_s: int) -> bytes:
    """Return connection.tune."""
    method = commands.Connection.Tune(channels_max, frame_bytes_max, heartbeat_s)
    return _frame(0, encode_method(method))


def answers() -> dict[str, bytes]:
    """Return the frames that answer the opening and closing of connections and channels.

    Those of channels lack the kind of the frame and the number of the channel.
    """
    return {
        "open_ok": _frame(0, encode_method(commands.Connection.OpenOk())),
        "close_ok": _frame(0, encode_method(commands.Connection.CloseOk())),
        "channel_open_ok": _OPEN_OK,
        "channel_close_ok": _CLOSE_OK,
    }


def _frame(channel: int, payload: bytes) -> bytes:
    return FRAME_HEAD.pack(spec.METHOD_FRAME, channel, len(payload)) + payload + FRAME_END


def _state_of(channels: bytearray, channel: int) -> ChannelState:
    return ChannelState(channels[channel] & 127) if channel < len(channels) else ChannelState.CLOSED


def _make_room(channels: bytearray, channel: int, channels_max: int) -> None:
    """Make room for the state of one more channel number.

    RabbitMQ counts channels, whatever their numbers are. Raises ConnectionException.
    """
    # Number 0 is no channel, and this one is not open.
    may_be_full = len(channels) > channels_max
    open_count = len(channels) - sum(map(channels.count, _NOT_OPEN)) if may_be_full else 0
    if open_count >= channels_max:
        text = (
            f"number of channels opened ({open_count}) has reached "
            f"the negotiated channel_max ({channels_max})"
        )
        raise ConnectionException(spec.NOT_ALLOWED, text, spec.CHANNEL, 10)
    if channel >= len(channels):
        channels += bytes(channel + 1 - len(channels))


def _ids(payload: bytes) -> tuple[int, int]:
    """Return class and method of a method frame's payload."""
    found: tuple[int, int] = _IDS.unpack_from(payload)
    return found


def _shown(kind: int, payload: bytes, size: int = 0) -> str:
    """Return a frame in RabbitMQ's words: text in quotes, other octets as numbers.

    `size` is that of the whole payload if `payload` is only its beginning.
    """
    some = "all" if max(len(payload), size) <= SHOWN_BYTES else f"first {SHOWN_BYTES}"
    begin = payload[:SHOWN_BYTES]
    if begin and all(32 <= octet < 127 for octet in begin):
        octets = '"' + begin.decode().replace("\\", "\\\\").replace('"', '\\"') + '"'
    else:
        octets = ",".join(map(str, begin))
    return f"type {kind}, {some} octets = <<{octets}>>"


def _with_margin(frame_bytes_max: int) -> int:
    """Return the size up to which frames are taken.

    Some clients count the payload alone, and RabbitMQ lets them. No frame of ours is that large.
    """
    return frame_bytes_max + spec.FRAME_OVERHEAD_BYTES


def _agreed(name: str, said: int, at_least: int, offered: int) -> int:
    """Return the client's value, if it is within what was offered.

    0 stands for no limit, which is too high.
    """
    text = f"negotiated {name} = {said} is "
    if said and said < at_least:
        text += f"lower than the minimum allowed value ({at_least})"
        raise ConnectionException(spec.NOT_ALLOWED, text, spec.CONNECTION, 31)
    if not said or said > offered:
        text += f"higher than the maximum allowed value ({offered})"
        raise ConnectionException(spec.NOT_ALLOWED, text, spec.CONNECTION, 31)
    return said
