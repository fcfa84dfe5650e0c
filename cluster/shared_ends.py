"""The end of a stream by TLS that the loop shares with threads.

asyncio's own transports belong to the thread of their loop. A leader of copies sends operations
from the thread whose sync needs them, and hears the answer in the same thread, because to wake
another one takes longer than both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, Final, cast

from shardmq.cluster.loop_thread import LoopThread
from shardmq.cluster.streams import OPENING_S_MAX, Receiving

RECEIVED_BYTES: Final = 64 << 10
# So many bytes are encrypted and sent at a time: they stay in the cache of the processor.
SENT_AT_ONCE_BYTES: Final = 512 << 10
# With more unsent bytes than this the protocol is asked to write nothing more.
UNSENT_BYTES_MAX: Final = 64 << 10
# A server that has no descriptor for a connection tries again after so long.
ACCEPT_AGAIN_S: Final = 1.0

log = logging.getLogger(__name__)


class SharedEnd(asyncio.Transport):
    """The server's end of a stream. Its protocol is told of everything under `lock`.

    `write` and `hear` may be called by any thread. Then the protocol takes bytes in that thread. It
    is told in the thread of the loop of all else.
    """

    def __init__(
        self,
        connected: socket.socket,
        tls: ssl.SSLContext,
        protocol: Receiving,
        lock: threading.RLock,
    ) -> None:
        super().__init__()
        connected.setblocking(False)
        self._socket = connected
        self.lock = lock
        self._loop = asyncio.get_running_loop()
        # Calls a function in the thread of the loop, at once if it is the present one.
        self.in_loop = LoopThread().call
        self._came, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.wrap_bio(self._came, self._to_send, server_side=True)
        self._unsent = bytearray()
        self._is_open = False  # the handshake is over
        self._is_over = False
        self._is_held = False
        self._is_paused = False  # the protocol was asked to write nothing more
        self._is_watched = False  # the loop hears it
        self.set_protocol(protocol)
        self._late = self._loop.call_later(OPENING_S_MAX, self.abort)
        self.watch(True)

    # -- for any thread ----------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when `hear` has something to do; or -1."""
        return -1 if self._is_held or self._is_over else self._socket.fileno()

    def hear(self) -> None:
        """Take in what has come, without waiting."""
        with self.lock:
            if self._is_over or self._is_held:
                return
            try:
                data = self._socket.recv(RECEIVED_BYTES)
                self._came.write(data) if data else self._came.write_eof()
                if not self._is_open:
                    self._shake_hands()
                if self._is_open:
                    self._take()
            except (BlockingIOError, ssl.SSLWantReadError):
                pass
            except ssl.SSLEOFError:
                self._end(None)
            except OSError as error:  # those of TLS are, too
                self._end(error)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with self.lock:
            if self._is_over:
                return
            try:
                if len(data) <= SENT_AT_ONCE_BYTES:
                    self._tls.write(data)
                    self._send()
                    return
                with memoryview(data) as view:
                    for start in range(0, len(view), SENT_AT_ONCE_BYTES):
                        self._tls.write(view[start : start + SENT_AT_ONCE_BYTES])
                        self._send()
            except OSError as error:
                self._end(error)

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def is_closing(self) -> bool:
        return self._is_over

    def close(self) -> None:
        """Close it at once. What the system has not taken yet is lost."""
        with self.lock:
            if self._is_open and not self._is_over and not self._unsent:
                with contextlib.suppress(OSError):  # the other end may be gone
                    self._say_goodbye()
            self._end(None)

    def abort(self) -> None:
        self._end(None)

    # -- for the thread of the loop ----------------------------------------------------------------

    def watch(self, is_watched: bool) -> None:
        """Let the loop hear what comes; or leave that to those who call `hear`."""
        if is_watched == self._is_watched or self._is_over:
            return
        self._is_watched = is_watched
        if is_watched:
            self._loop.add_reader(self._socket.fileno(), self._readable)
        else:
            self._loop.remove_reader(self._socket.fileno())

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        is_buffered = isinstance(protocol, asyncio.BufferedProtocol)
        self._buffered = cast(asyncio.BufferedProtocol, protocol) if is_buffered else None

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        match name:
            case "socket":
                return self._socket
            case "shared end":
                return self
            case "peername" if not self._is_over:
                return self._socket.getpeername()
        return default

    def is_reading(self) -> bool:
        return not self._is_held and not self._is_over

    def pause_reading(self) -> None:
        self._is_held = True

    def resume_reading(self) -> None:
        with self.lock:
            if not self._is_held or self._is_over:
                return
            self._is_held = False
            if not self._is_watched:
                self.watch(True)
        # Bytes that TLS has already make no descriptor readable.
        self._loop.call_soon(self._go_on)

    # -- reading -----------------------------------------------------------------------------------

    def _readable(self) -> None:
        if self._is_held:
            self.watch(False)
        else:
            self.hear()

    def _go_on(self) -> None:
        with self.lock:
            if self._is_open and not self._is_over:
                try:
                    self._take()
                except ssl.SSLWantReadError:
                    pass
                except OSError as error:
                    self._end(error)

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        finally:
            self._send()
        self._is_open = True
        self._late.cancel()
        self._protocol.connection_made(self)

    def _take(self) -> None:
        """Give the protocol what TLS has decrypted. Raises SSLWantReadError."""
        while not self._is_held and not self._is_over:
            if self._buffered is None:
                data = self._tls.read(RECEIVED_BYTES)
                if data:
                    cast(asyncio.Protocol, self._protocol).data_received(data)
                size = len(data)
            else:
                room = memoryview(self._buffered.get_buffer(-1))
                size = cast(int, self._tls.read(len(room), room))  # typeshed has no overload
                if size:
                    self._buffered.buffer_updated(size)
            if not size:  # the other end has said goodbye
                self._end(None)
            elif not self._came.pending and not self._tls.pending():
                return

    # -- writing -----------------------------------------------------------------------------------

    def _say_goodbye(self) -> None:
        try:
            self._tls.unwrap()
        except ssl.SSLWantReadError:  # the other end need not answer
            self._send()

    def _send(self) -> None:
        """Send what TLS has encrypted."""
        data = self._to_send.read()
        if self._unsent:
            self._unsent += data
        else:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            if sent == len(data):
                return
            self._unsent += data[sent:]
            self.in_loop(self._wait_for_room)
        if len(self._unsent) > UNSENT_BYTES_MAX and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def _wait_for_room(self) -> None:
        if self._unsent and not self._is_over:
            self._loop.add_writer(self._socket.fileno(), self._send_rest)

    def _send_rest(self) -> None:
        with self.lock:
            if self._is_over:
                return
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(error)
                return
            del self._unsent[:sent]
            if not self._unsent:
                self._loop.remove_writer(self._socket.fileno())
                if self._is_paused:
                    self._is_paused = False
                    self._protocol.resume_writing()

    # -- the end -----------------------------------------------------------------------------------

    def _end(self, error: Exception | None) -> None:
        with self.lock:
            if self._is_over:
                return
            self._is_over = True
        self.in_loop(self._ended, error)

    def _ended(self, error: Exception | None) -> None:
        self._late.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who polls it
        except OSError:
            pass
        self._socket.close()
        self._unsent.clear()
        if self._is_open:
            self._loop.call_soon(self._protocol.connection_lost, error)


class SharedServer:
    """Accepts streams at a listening socket; in the thread of the loop.

    accept: returns the protocol of a new connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext,
        accept: Callable[[], Receiving],
        lock: threading.RLock,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._tls = tls
        self._new = accept
        self._lock = lock
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Accept nothing more. Connections stay."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _listen(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # The connection waits and would wake the loop at once, again and again.
            log.warning("no connection is accepted for now: %s", error)
            self._loop.remove_reader(self._listener.fileno())
            self._again = self._loop.call_later(ACCEPT_AGAIN_S, self._listen)
            return
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        SharedEnd(connected, self._tls, self._new(), self._lock)
