"""A client that sends whatever bytes it is told to, over a real socket, and reads frames."""

from __future__ import annotations

import socket
import struct
import time
from types import TracebackType
from typing import Any, TypeVar

from pamqp import base, body, commands, frame, header

HEADER = b"AMQP\x00\x00\x09\x01"
PATIENCE_S = 60.0  # with a crowded machine

Expected = TypeVar("Expected")


def raw_frame(kind: int, channel: int, payload: bytes, end: bytes = b"\xce") -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + end


def method(channel: int, what: base.Frame) -> bytes:
    data: bytes = frame.marshal(what, channel)
    return data


def content_header(channel: int, size: int, class_id: int = 60, props: bytes = b"\0\0") -> bytes:
    return raw_frame(2, channel, struct.pack(">HHQ", class_id, 0, size) + props)


def publish(
    channel: int, exchange: str, key: str, content: bytes, *, mandatory: bool = False
) -> bytes:
    said = commands.Basic.Publish(exchange=exchange, routing_key=key, mandatory=mandatory)
    parts = [content[at : at + 100_000] for at in range(0, len(content), 100_000)]
    bodies = b"".join(raw_frame(3, channel, part) for part in parts)
    return method(channel, said) + content_header(channel, len(content)) + bodies


def with_properties(
    channel: int, exchange: str, key: str, content: bytes, **properties: object
) -> bytes:
    """Return a publish whose content header has these properties."""
    said = commands.Basic.Publish(exchange=exchange, routing_key=key)
    head: bytes = frame.marshal(
        header.ContentHeader(0, len(content), commands.Basic.Properties(**properties)), channel
    )
    return method(channel, said) + head + raw_frame(3, channel, content)


class RawClient:
    """Connected; `shake_hands` makes it a client like others, as far as wanted."""

    def __init__(self, port: int, *, receive_bytes: int = 0) -> None:
        self.sock = socket.socket()
        if receive_bytes:  # what the kernel takes for a client that does not read
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(("127.0.0.1", port))
        self._buffer = b""

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def send_what_is_taken(self, data: bytes, seconds: float = 1.0) -> int:
        """Send until the broker takes no more for a while, the time is over, or it hangs up.

        Return the number of bytes sent.
        """
        self.sock.settimeout(0.2)
        sent, end = 0, time.monotonic() + seconds
        view = memoryview(data)
        try:
            while sent < len(data) and time.monotonic() < end:
                sent += self.sock.send(view[sent : sent + (1 << 18)])
        except OSError:
            pass
        finally:
            self.sock.settimeout(PATIENCE_S)
        return sent

    def shake_hands(
        self,
        *,
        channels: int = 1,
        heartbeat: int = 0,
        hears_cancels: bool = True,
        vhost: str = "/",
        user: str = "guest",
        password: str = "guest",
    ) -> RawClient:
        self.send(HEADER)
        self.expect(commands.Connection.Start)
        capabilities = {
            "authentication_failure_close": True,
            "consumer_cancel_notify": hears_cancels,
        }
        properties = {"capabilities": capabilities}
        self.send(
            method(
                0,
                commands.Connection.StartOk(properties, "PLAIN", f"\0{user}\0{password}", "en_US"),
            )
        )
        offered = self.expect(commands.Connection.Tune)
        self.send(
            method(0, commands.Connection.TuneOk(offered.channel_max, offered.frame_max, heartbeat))
        )
        self.send(method(0, commands.Connection.Open(vhost)))
        self.expect(commands.Connection.OpenOk)
        self.send(
            b"".join(method(number, commands.Channel.Open()) for number in range(1, channels + 1))
        )
        for _ in range(channels):
            self.expect(commands.Channel.OpenOk)
        return self

    def ask(self, channel: int, what: base.Frame, answer: type[Expected]) -> Expected:
        self.send(method(channel, what))
        return self.expect(answer)

    def read(self) -> tuple[int, object] | None:
        """Return the channel and the content of the next frame that is no heartbeat.

        Return None at the end of the stream.
        """
        data = self.read_frame()
        if data is None:
            return None
        _, channel, what = frame.unmarshal(data)
        return channel, what

    def read_frame(self) -> bytes | None:
        """Return the bytes of the next frame that is no heartbeat.

        Return None at the end of the stream.
        """
        while True:
            if len(self._buffer) >= 7:
                size = 8 + struct.unpack_from(">I", self._buffer, 3)[0]
                if len(self._buffer) >= size:
                    data, self._buffer = self._buffer[:size], self._buffer[size:]
                    if data[0] == 8:
                        continue
                    return data
            try:
                more = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not more:
                return None
            self._buffer += more

    def message(self) -> tuple[commands.Basic.Properties, bytes]:
        """Return the content that follows a deliver, get-ok or return."""
        read = self.read()
        assert read is not None and isinstance(read[1], header.ContentHeader), read
        properties, size, content = read[1].properties, read[1].body_size, b""
        while len(content) < size:
            read = self.read()
            assert read is not None and isinstance(read[1], body.ContentBody), read
            content += read[1].value
        return properties, content

    def content(self) -> bytes:
        return self.message()[1]

    def expect(self, kind: type[Expected]) -> Expected:
        """Return the next method, which must be of that kind; contents before it are skipped."""
        while (got := self.read()) is not None:
            if isinstance(got[1], (header.ContentHeader, body.ContentBody)):
                continue
            assert isinstance(got[1], kind), (
                f"expected {kind.__name__}, got {got[1]!r} {dict(got[1])}"
            )  # type: ignore[call-overload]
            return got[1]
        raise AssertionError(f"expected {kind.__name__}, got the end of the stream")

    def expect_close(self, code: int, text: str) -> tuple[int, int]:
        """Expect connection.close with this code and this beginning of its text; answer it.

        Return the class and method that it names.
        """
        said = self.expect(commands.Connection.Close)
        assert (said.reply_code, said.reply_text[: len(text)]) == (code, text)
        self.send(method(0, commands.Connection.CloseOk()))
        return said.class_id, said.method_id

    def expect_channel_close(self, channel: int, code: int, text: str) -> tuple[int, int]:
        """Expect that the broker closes the channel.

        Return the class and the method that the close names.

        The channel may be opened again afterwards.
        """
        said = self.expect(commands.Channel.Close)
        assert (said.reply_code, said.reply_text[: len(text)]) == (code, text)
        self.send(method(channel, commands.Channel.CloseOk()))
        return said.class_id, said.method_id

    def expect_end(self) -> None:
        """Wait until the broker hangs up, whatever it sends before."""
        while self.read() is not None:
            pass


def declare(client: RawClient, name: str, **how: Any) -> None:
    client.ask(
        1,
        commands.Queue.Declare(queue=name, **{"exclusive": True, **how}),
        commands.Queue.DeclareOk,
    )


def got(client: RawClient, queue: str, channel: int = 1) -> bytes:
    """Return the body of the next message, which counts as acknowledged at once."""
    client.ask(channel, commands.Basic.Get(queue=queue, no_ack=True), commands.Basic.GetOk)
    return client.content()


def is_empty(client: RawClient, queue: str, channel: int = 1) -> bool:
    return bool(
        client.ask(channel, commands.Basic.Get(queue=queue, no_ack=True), commands.Basic.GetEmpty)
    )


def delivered(client: RawClient) -> tuple[commands.Basic.Deliver, bytes]:
    return client.expect(commands.Basic.Deliver), client.content()
