"""The bytes between a front door and the controller: messages of msgpack behind their length.

What is said in one turn of the event loop leaves in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec

from shardmq.broker.shared.control import CONTROL_BYTES_MAX, AnyControl, ControlMessage

# A read of at most this much is handled in the turn of the loop that has it.
FEW_BYTES = 16 << 10
HEAD_BYTES = 4  # of a message: the length of what follows, little endian


class ControlStream(asyncio.Protocol):
    """A connection to the controller.

    `take` handles what is unread and is called where few bytes came. More is handled by the task
    that waits for `heard`. Until that task calls `go_on`, nobody else handles anything.
    """

    def __init__(self, take: Callable[[ControlStream], None]) -> None:
        self._take = take
        self._unread = bytearray()
        self._error: Exception | None = None
        self._much = asyncio.Event()
        self._out: list[bytes] = []
        self._flush_planned = False
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_rest)
        self._decoder = msgspec.msgpack.Decoder(AnyControl)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio's class, and another class.
        self._transport = cast(asyncio.Transport, transport)

    def close(self) -> None:
        self._out.clear()
        self._transport.close()

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    # -- in ---------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if self._much.is_set() or len(self._unread) > FEW_BYTES:
            self._transport.pause_reading()
            self._much.set()
            return
        try:
            self._take(self)
        except Exception as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ConnectionResetError("end of stream"))

    def _end(self, error: Exception) -> None:
        self._error = self._error or error
        self._much.set()

    async def heard(self) -> None:
        """Wait until much is to be handled. Raises what ended the stream."""
        await self._much.wait()
        if self._error is not None:
            raise self._error

    def go_on(self) -> None:
        """Read on: what was heard is handled."""
        if self._error is None:
            self._much.clear()
            self._transport.resume_reading()

    def messages(self) -> Iterator[AnyControl]:
        """Return the complete messages that came; they are taken off the stream at the end.

        Raises DecodeError for a message that is too long or cannot be read.
        """
        unread, at = self._unread, 0
        while len(unread) - at >= HEAD_BYTES:
            length = int.from_bytes(unread[at : at + HEAD_BYTES], "little")
            if length > CONTROL_BYTES_MAX:
                raise msgspec.DecodeError(
                    f"a message of {length} bytes, at most {CONTROL_BYTES_MAX} agreed"
                )
            end = at + HEAD_BYTES + length
            if end > len(unread):
                break
            yield self._decoder.decode(bytes(unread[at + HEAD_BYTES : end]))
            at = end
        del unread[:at]

    # -- out --------------------------------------------------------------------------------------

    def encode(self, message: ControlMessage) -> bytes:
        """Return the bytes of a message. Raises ValueError if it is too long."""
        payload = self._encoder.encode(message)
        if len(payload) > CONTROL_BYTES_MAX:
            raise ValueError(f"{type(message).__name__} of {len(payload)} bytes")
        return len(payload).to_bytes(HEAD_BYTES, "little") + payload

    def send(self, message: ControlMessage) -> None:
        """Send a message with everything else that is said in this turn of the loop."""
        self._out.append(self.encode(message))
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self.flush)

    def hold(self) -> None:
        """Keep what is sent until `flush`, which the caller calls in this turn of the loop."""
        self._flush_planned = True

    def flush(self) -> None:
        self._flush_planned = False
        if self._out:
            data = b"".join(self._out)
            self._out.clear()
            if self._error is None:  # a transport that has been closed raises
                self._transport.write(data)


def _encode_rest(value: Any) -> Any:
    """Encode values of AMQP tables that msgpack has no type for.

    Decimal is not among them: msgspec writes it as a string.
    """
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    return str(value)
