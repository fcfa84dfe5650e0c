"""Something between two processes that passes TCP connections on, and can be told to harm them."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable

CHUNK = 1 << 16
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the end is a reset, and what is unsent is gone


class Connection:
    """One connection that is passed on: the end that came, and the end that it goes to."""

    def __init__(self, came: asyncio.StreamWriter, goes: asyncio.StreamWriter) -> None:
        self.ends = came, goes
        self.swallows = [False, False]  # what goes to this end is read and forgotten
        self.left: list[int | None] = [None, None]  # bytes that still go to this end, then a reset
        self.moves = asyncio.Event()
        self.moves.set()

    def reset(self) -> None:
        for end in self.ends:
            sock = end.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            end.transport.abort()


class Relay:
    """Relays to several addresses, in a thread of their own.

    `ended` is called in this thread when a connection has ended, whoever ended it, and when it must
    have: for each that comes.
    """

    def __init__(self, ended: Callable[[], None] = lambda: None) -> None:
        self._ended = ended
        self._loop = asyncio.new_event_loop()
        self._open: dict[str, set[Connection]] = {}
        self._servers: list[asyncio.Server] = []
        self.passed = 0  # connections
        self._came = threading.Condition()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def to(self, address: str) -> str:
        """Return the address of a new relay to the address tcp://HOST:PORT."""
        return asyncio.run_coroutine_threadsafe(self._listen(address), self._loop).result(60)

    def wait_for_more_than(self, passed: int, within_s: float) -> None:
        """Wait until there were more connections than `passed`, but no longer than `within_s`."""
        with self._came:
            self._came.wait_for(lambda: self.passed > passed, within_s)

    def close(self) -> None:
        def end() -> None:
            for server in self._servers:
                server.close()
            for connection in self._all():
                connection.reset()
            self._loop.call_later(0.05, self._loop.stop)

        self._loop.call_soon_threadsafe(end)
        self._thread.join()

    def _all(self, address: str | None = None) -> list[Connection]:
        if address is not None:
            return list(self._open.get(address, ()))
        return [each for found in self._open.values() for each in found]

    def _do(self, what: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(what)

    def cut(self, address: str | None = None) -> None:
        """End the connections by a reset. None: all."""
        self._do(lambda: [each.reset() for each in self._all(address)] and None)

    def swallow(self, end: int, address: str | None = None) -> None:
        """Forget what goes to this end (0: who came, 1: whom it goes to), without a word."""

        def do() -> None:
            for each in self._all(address):
                each.swallows[end] = True

        self._do(do)

    def truncate(self, end: int, count: int, address: str | None = None) -> None:
        """Let `count` more bytes go to this end, and reset the connection in the middle."""

        def do() -> None:
            for each in self._all(address):
                each.left[end] = count

        self._do(do)

    def stall(self, seconds: float, address: str | None = None) -> None:
        """Pass nothing on for a while."""

        def do() -> None:
            for each in self._all(address):
                each.moves.clear()
                self._loop.call_later(seconds, each.moves.set)

        self._do(do)

    async def _listen(self, address: str) -> str:
        host, _, port = address.removeprefix("tcp://").rpartition(":")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                to_reader, to_writer = await asyncio.open_connection(host, int(port))
            except OSError:
                writer.transport.abort()
                return
            with self._came:
                self.passed += 1
                self._came.notify_all()
            # Who comes anew has given up a connection before, which may be stalled here.
            self._ended()
            made = Connection(writer, to_writer)
            self._open.setdefault(address, set()).add(made)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pass(made, reader, to_writer, 1))
                    both.create_task(self._pass(made, to_reader, writer, 0))
            except* OSError:
                pass
            finally:
                self._open[address].discard(made)
                self._ended()
                made.reset()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self._servers.append(server)
        return f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _pass(
        self, made: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, end: int
    ) -> None:
        while data := await reader.read(CHUNK):
            await made.moves.wait()
            if made.swallows[end]:
                continue
            left = made.left[end]
            if left is not None:
                made.left[end] = left - len(data)
                data = data[:left]
            writer.write(data)
            await writer.drain()
            if left is not None and len(data) >= left:
                break
        made.moves.set()
        # The last bytes go before the end does.
        await asyncio.sleep(0)
        writer.close()
        raise ConnectionResetError


def harm(relay: Relay, chance: random.Random, silent_s: float) -> str:
    """Do some harm to the connections, and return what it was."""
    end = chance.randrange(2)
    match chance.choice(["cut", "cut", "cut twice", "truncate", "truncate", "swallow", "stall"]):
        case "cut":
            relay.cut()
            return "cut"
        case "cut twice":
            passed = relay.passed
            relay.cut()
            relay.wait_for_more_than(passed, silent_s)
            relay.cut()
            return "cut twice"
        case "truncate":
            count = chance.randrange(1, 100_000)
            relay.truncate(end, count)
            return f"truncate behind {count} bytes to end {end}"
        case "swallow":
            relay.swallow(end)
            return f"swallow what goes to end {end}"
        case _:
            seconds = chance.uniform(0.2, 3) * silent_s
            relay.stall(seconds)
            return f"stall for {seconds:.1f} s"
