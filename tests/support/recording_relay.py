"""A relay of one TCP connection that keeps what the one who came has said."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class RecordingRelay:
    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._said = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> RecordingRelay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.close()

    def taken(self) -> bytes:
        """Return all that was said, when the connection has ended."""
        self._thread.join(30)
        return self._said

    def _run(self) -> None:
        came, _ = self._listener.accept()
        with came, socket.create_connection(self._to) as goes:
            answers = threading.Thread(target=self._answer, args=(goes, came), daemon=True)
            answers.start()
            with contextlib.suppress(OSError):
                while data := came.recv(1 << 16):
                    self._said += data
                    goes.sendall(data)
            with contextlib.suppress(OSError):
                goes.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _answer(goes: socket.socket, came: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := goes.recv(1 << 16):
                came.sendall(data)
