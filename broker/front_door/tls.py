"""TLS between a client and a non-blocking socket, with the methods of a socket.

`TlsSocket` has the methods of a socket that the front door uses, with the same meaning: bytes as
far as there are any, BlockingIOError when none can go, OSError when the connection is of no use any
more. `Handshake` comes before: only a client that has ended it in time is let in.

No decrypted bytes are left inside after a read, so the descriptor is readable exactly if the stream
is. `send` counts bytes only when the kernel has all of their ciphertext, so no bytes that were
taken to be sent are forgotten.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any, cast

from shardmq.broker.front_door.proxy import Peer

# Plaintext that is encrypted at one go. Its ciphertext is kept until the kernel has taken it.
WRITE_BYTES_MAX = 128 << 10
# A record on the wire: 16 KiB, and what TLS 1.2 may put around it.
RECORD_BYTES_MAX = (16 << 10) + 2048 + 5
# Answers to a client's alerts and new keys that may wait for the client to read them.
ANSWERS_BYTES_MAX = 64 << 10
HANDSHAKE_READ_BYTES = 16 << 10

log = logging.getLogger("shardmq.broker.front_door.tls")


class TlsSocket:
    """The server's side of one TLS connection.

    `sock` is connected and non-blocking. It is closed with this object.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        self._sealed = memoryview(b"")  # ciphertext on its way to the kernel
        # Bytes of plaintext in it. The caller is told of them when all of it is gone.
        self._owed = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def getsockname(self) -> Any:
        return self._sock.getsockname()

    # -- handshake ---------------------------------------------------------------------------------

    def shake_hands(self) -> bool:
        """Go on with the handshake as far as bytes have arrived; return whether it is done.

        Raises OSError when the handshake has failed.
        """
        try:
            data = self._sock.recv(HANDSHAKE_READ_BYTES)
            if not data:
                raise ConnectionResetError("the client left")
            self._in.write(data)
        except (BlockingIOError, InterruptedError):
            pass
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def flush(self) -> bool:
        """Send ciphertext; return whether the kernel has all of it."""
        while self._sealed or self._out.pending:
            if not self._sealed:
                self._sealed = memoryview(self._out.read())
            try:
                self._sealed = self._sealed[self._sock.send(self._sealed) :]
            except (BlockingIOError, InterruptedError):
                return False
        return True

    def certificate(self) -> dict[str, Any]:
        """Return the client's certificate once it is verified; empty without one."""
        return self._tls.getpeercert() or {}

    def version(self) -> str:
        return (self._tls.version() or "").replace("TLSv", "tlsv").lower()

    def cipher(self) -> str:
        found = self._tls.cipher()
        return found[0] if found else ""

    # -- in ----------------------------------------------------------------------------------------

    def recv_into(self, buffer: memoryview) -> int:
        """Decrypt all bytes there are into the buffer; return their number.

        0 is the end of the stream. `buffer` holds several times RECORD_BYTES_MAX.
        """
        try:
            # Leaves room for the rest of a record that began in an earlier read. The ciphertext
            # lies in the buffer only until it is handed over.
            count = self._sock.recv_into(buffer[: len(buffer) - RECORD_BYTES_MAX])
            if count:
                self._in.write(buffer[:count])
            else:
                self._in.write_eof()
        except (BlockingIOError, InterruptedError):
            pass  # bytes that came with the end of the handshake may be there
        try:
            return self._decrypt(buffer)
        finally:
            self._answer()

    def _decrypt(self, buffer: memoryview) -> int:
        at = 0
        try:
            while count := cast(
                int, self._tls.read(len(buffer) - at, buffer[at:])
            ):  # typeshed: bytes
                at += count
        except ssl.SSLWantReadError:
            if not at:
                raise BlockingIOError from None
        except ssl.SSLEOFError:
            pass  # gone without a close_notify: AMQP has its own close
        return at

    def _answer(self) -> None:
        """Send what TLS itself answers to the bytes that were read.

        What the kernel does not take now goes with the next bytes that are sent.
        """
        if self._out.pending:
            try:
                self.flush()
            except OSError:  # the client has left: what it said before is still read
                return
            if self._out.pending > ANSWERS_BYTES_MAX:
                raise ConnectionResetError("takes none of TLS's own answers")

    def recv(self, count: int) -> bytes:
        """Return bytes as they came, for a caller that only waits for the end of the stream."""
        return self._sock.recv(count)

    # -- out ---------------------------------------------------------------------------------------

    def send(self, data: bytes | memoryview) -> int:
        """Send as a socket does.

        After BlockingIOError the caller calls again with the same bytes.
        """
        return self._owe(0) or self._owe(self._seal(memoryview(data)[:WRITE_BYTES_MAX]))

    def sendmsg(self, chunks: Iterable[bytes | memoryview]) -> int:
        """Send as a socket does. Small chunks share a record."""
        if done := self._owe(0):
            return done
        together, size = list[bytes | memoryview](), 0
        for chunk in chunks:
            together.append(memoryview(chunk)[: WRITE_BYTES_MAX - size])
            size += len(together[-1])
            if size >= WRITE_BYTES_MAX:
                break
        return self._owe(self._seal(memoryview(b"".join(together))))

    def _seal(self, data: memoryview) -> int:
        at = 0
        while at < len(data):
            at += self._tls.write(data[at:])
        return at

    def _owe(self, count: int) -> int:
        """Return how many bytes are sent, `count` more than before, once the kernel has them.

        Raises BlockingIOError until then.
        """
        self._owed += count
        if not self.flush():
            raise BlockingIOError
        done, self._owed = self._owed, 0
        return done

    # -- the end -----------------------------------------------------------------------------------

    def shutdown(self, how: int) -> None:
        self._say_goodbye()
        self._sock.shutdown(how)

    def close(self) -> None:
        self._say_goodbye()
        self._sock.close()

    def _say_goodbye(self) -> None:
        """Send close_notify as far as possible; OpenSSL sends it once."""
        try:
            self._tls.unwrap()
        except (OSError, ValueError):  # waits for the client's, or there never was a session
            pass
        try:
            self.flush()
        except OSError:
            pass


class Handshake:
    """A client that is not let in yet.

    `entered(self)` is called when the handshake is done, `left(self)` when it has failed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        peer: Peer,
        context: ssl.SSLContext,
        *,
        timeout_s: float,
        entered: Callable[[Handshake], None],
        left: Callable[[Handshake], None],
    ) -> None:
        self._loop = loop
        self.sock = TlsSocket(sock, context)
        self.peer = peer
        self._entered, self._left = entered, left
        self._fd = sock.fileno()
        self._writing = False
        self._timeout = loop.call_later(timeout_s, self._fail, f"not done within {timeout_s:g} s")
        loop.add_reader(self._fd, self._go_on)

    def close(self) -> None:
        self._let_go()
        self.sock.close()

    def _go_on(self) -> None:
        try:
            try:
                done = self.sock.shake_hands()
            finally:
                flushed = self.sock.flush()  # an alert tells the client what was wrong
        except OSError as error:  # SSLError too
            self._fail(_reason(error))
            return
        if done:
            self._let_go()
            self._entered(self)
        elif not flushed and not self._writing:
            self._writing = True
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        self._writing = False
        self._loop.remove_writer(self._fd)
        self._go_on()

    def _fail(self, reason: str) -> None:
        log.info("%s:%d: TLS handshake failed: %s", self.peer[0], self.peer[1], reason)
        self.close()
        self._left(self)

    def _let_go(self) -> None:
        self._timeout.cancel()
        self._loop.remove_reader(self._fd)
        if self._writing:
            self._loop.remove_writer(self._fd)


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return error.strerror or str(error)
