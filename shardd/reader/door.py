"""Publish messages through a short AMQP connection to a front door of this host.

The connection is that of one of the front door's users. It needs no password: only the broker's own
user can reach the socket of the front door, and the HTTP call has proved who its user is. This is a
blocking driver of `supervisor/amqp_client.py`. The frames of the messages come from `publishes.pxi`
and go straight to the socket, past the client.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shardmq.supervisor import amqp_client
from shardmq.supervisor.amqp_client import Broken, Confirmed, Event, Known, Message

RECEIVE_BYTES = 256 << 10
HANDSHAKE_S_MAX = 5.0


class Closed(Exception):
    """The front door closed the connection.

    `opened` says that it closed an open connection, so some messages may be published.
    """

    def __init__(self, code: int, text: str, opened: bool) -> None:
        super().__init__(code, text)
        self.code, self.text, self.opened = code, text, opened


class Unavailable(Exception):
    """The front door is not there, or does not answer in time."""


@dataclass(slots=True)
class Outcome:
    """The results of the publishes of a call. Delivery tags count from 1."""

    settled: int = 0  # all up to this tag are acknowledged or refused
    nacked: list[int] = field(default_factory=list)
    returned: list[Message] = field(default_factory=list)  # in the order of their publishes
    # Tags of messages that some queue had before, from the same producer. A front door may report a
    # tag once for each queue.
    known: set[int] = field(default_factory=set)
    altered: set[int] = field(default_factory=set)  # known tags whose message had another body

    def add(self, event: Event) -> None:
        """Add what the front door reported about a publish."""
        match event:
            case Confirmed(tag, multiple, stored):
                if not stored:
                    self.nacked += range(self.settled + 1 if multiple else tag, tag + 1)
                self.settled = max(self.settled, tag)
            case Known(first, last, altered):
                self.known.update(range(first, last + 1))
                if altered:
                    self.altered.update(range(first, last + 1))
            case Message():
                self.returned.append(event)


class Session:
    """An open connection on which the front door confirms publishes."""

    def __init__(self, path: str, user: str, vhost: str) -> None:
        """Open the connection. Raise Closed or Unavailable."""
        self._client = amqp_client.Client(vhost, "EXTERNAL", user, keeps_content=False)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.settimeout(HANDSHAKE_S_MAX)
            self._sock.connect(path)
            self._expect(amqp_client.Opened())
            self._client.select()
            self._expect(amqp_client.Received(amqp_client.SELECT_OK))
        except (OSError, EOFError) as error:
            self._sock.close()
            raise Unavailable(f"front door: {error}") from None
        except Closed:
            self._sock.close()
            raise

    @property
    def frame_bytes_max(self) -> int:
        """The size of a frame that both sides agreed on."""
        return self._client.frame_bytes_max

    def close(self) -> None:
        self._sock.close()

    def publish(
        self,
        count: int,
        more: Callable[[], bytes | bytearray],
        answer_s: float,
    ) -> Outcome:
        """Publish the frames that `more` returns, until it returns nothing: `count` messages.

        Return when each message is settled. Raise Closed if the front door closes the connection.
        Raise Unavailable if no byte moves for `answer_s` seconds.
        """
        outcome, unsent = Outcome(), memoryview(more())
        self._sock.setblocking(False)
        last = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
            try:
                while outcome.settled < count:
                    events = selector.select(answer_s)
                    if not events and time.monotonic() - last >= answer_s:
                        raise Unavailable(f"front door: no confirm within {answer_s:g} s")
                    for _, ready in events:
                        last = time.monotonic()
                        if ready & selectors.EVENT_WRITE:
                            unsent = unsent[self._sock.send(unsent) :] or memoryview(more())
                            if not unsent:
                                selector.modify(self._sock, selectors.EVENT_READ)
                        if ready & selectors.EVENT_READ:
                            for event in self._receive():
                                outcome.add(event)
            except (OSError, EOFError) as error:
                raise Unavailable(f"front door: the connection was lost: {error}") from None
        return outcome

    def _receive(self) -> list[Event]:
        data = self._sock.recv(RECEIVE_BYTES)
        if not data:
            raise EOFError("it closed the connection")
        events = self._client.receive_data(data)
        match events[-1] if events else None:
            case amqp_client.Closed(code, text, opened):
                raise Closed(code, text, opened)
            case Broken(why):
                raise EOFError(why)
        return events

    def _expect(self, answer: Event) -> None:
        """Send the queued bytes and wait for `answer`; drop all events before it."""
        while True:
            self._sock.sendall(self._client.data_to_send())
            if answer in self._receive():
                return
