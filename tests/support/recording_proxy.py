"""A TCP proxy before a broker that keeps the bytes of every connection, both ways."""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass, field
from types import TracebackType

READ_BYTES = 1 << 16
CLOSE_S_MAX = 10.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the next close sends RST


@dataclass(slots=True)
class Conversation:
    """What both sides of one connection sent, in the order in which connections were made."""

    client: bytearray = field(default_factory=bytearray)
    server: bytearray = field(default_factory=bytearray)
    ended_by: str = ""  # "client" or "server": whose end came first


class RecordingProxy:
    """Listen on a free port of 127.0.0.1 and pass each connection on to the broker's port."""

    def __init__(self, broker_port: int) -> None:
        self.conversations: list[Conversation] = []
        self._broker_port = broker_port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def __enter__(self) -> RecordingProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def taken(self) -> list[Conversation]:
        """Return the conversations since the last call. All of them must be over, or soon be."""
        for thread in self._threads:
            thread.join(CLOSE_S_MAX)
        assert not any(thread.is_alive() for thread in self._threads), "a connection is still open"
        taken, self.conversations, self._threads = self.conversations, [], []
        return taken

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._broker_port))
            except OSError:
                client.close()
                continue
            kept = Conversation()
            self.conversations.append(kept)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=_both_ways, args=(client, server, kept), daemon=True)
            self._threads.append(thread)
            thread.start()


def _both_ways(client: socket.socket, server: socket.socket, kept: Conversation) -> None:
    back = threading.Thread(
        target=_pass_on, args=(server, client, kept.server, kept, "server"), daemon=True
    )
    back.start()
    _pass_on(client, server, kept.client, kept, "client")
    back.join()
    client.close()
    server.close()


def _pass_on(
    source: socket.socket, target: socket.socket, into: bytearray, kept: Conversation, whose: str
) -> None:
    """Pass bytes on until the source ends, then end the target in the same way."""
    try:
        while data := source.recv(READ_BYTES):
            into += data
            target.sendall(data)
    except ConnectionResetError:
        target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    except OSError:  # the target does not take more
        pass
    kept.ended_by = kept.ended_by or whose
    try:
        target.shutdown(socket.SHUT_WR)
    except OSError:  # it has ended, too
        pass
