"""A TCP proxy on a free port that cuts connections where a test says, and counts them."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final

READ_BYTES: Final = 1 << 16


class CutProxy:
    """Pass connections on to a port of 127.0.0.1, as an async context manager.

    `answer_bytes_max` bounds what the client of each later connection gets before it is cut: 0 lets
    the whole request through and nothing back. `refuse` ends new connections at once.
    """

    def __init__(self, to_port: int) -> None:
        self.answer_bytes_max: int | None = None
        self.refuse = False
        self.connections = 0
        self.endpoint = ""
        self._to_port = to_port
        self._accepted = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> CutProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Cut all connections that are open."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_for_connections(self, count: int) -> None:
        """Return when there were `count` more connections than now."""
        count += self.connections
        while self.connections < count:
            self._accepted.clear()
            await self._accepted.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        self.connections += 1
        self._accepted.set()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_pass_on(reader, to_writer, None))
                    group.create_task(_pass_on(to_reader, writer, self.answer_bytes_max))
            finally:
                to_writer.transport.abort()
        except (asyncio.CancelledError, ConnectionError, ExceptionGroup):
            pass  # cut
        finally:
            writer.transport.abort()
            self._tasks.discard(task)


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_max: int | None
) -> None:
    """Copy to the end, or up to a number of bytes. Raise ConnectionError at either."""
    passed = 0
    while chunk := await reader.read(READ_BYTES):
        if bytes_max is not None and passed + len(chunk) > bytes_max:
            writer.write(chunk[: bytes_max - passed])
            await writer.drain()
            break
        passed += len(chunk)
        writer.write(chunk)
        await writer.drain()
    raise ConnectionResetError("cut")
