"""The process of bridges: it runs what the controller says, and tells the controller the states.

The controller starts the process by connecting to its socket. The process ends when it has had
nothing to run for a while; the supervisor starts it again at the next call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from functools import partial
from typing import Final

import msgspec

from shardmq.bridges.config import BridgesConfig, read
from shardmq.bridges.exchange_link import ExchangeLinkRunner
from shardmq.bridges.queue_link import QueueLinkRunner
from shardmq.bridges.shovel import ShovelRunner
from shardmq.broker.model.federation import ExchangeLink, QueueLink
from shardmq.broker.model.shovels import Shovel
from shardmq.broker.shared.bridging import (
    LINE_BYTES_MAX,
    Bindings,
    Key,
    Order,
    Pull,
    Run,
    Told,
    key_of,
    line,
)
from shardmq.supervisor import notify
from shardmq.supervisor.logs import set_level

TELL_S: Final[float] = 1.0  # states are told so often while their numbers change
WATCHDOG_S: Final[float] = 1.0
# Without a controller bridges go on for so long: one that starts anew connects again.
WITHOUT_CONTROLLER_S: Final[float] = 5.0
IDLE_S: Final[float] = 10.0
STOP_S_MAX: Final[float] = 3.0

log = logging.getLogger("bridges")


Runner = ShovelRunner | QueueLinkRunner | ExchangeLinkRunner


def _same(protocol: asyncio.StreamReaderProtocol) -> asyncio.StreamReaderProtocol:
    return protocol


class Bridges:
    """All bridges of the process, and the connection to the controller."""

    def __init__(self, config: BridgesConfig) -> None:
        self._config = config
        self._runners: dict[Key, Runner] = {}
        self._bindings: dict[tuple[str, str], Bindings] = {}  # by vhost and exchange
        self._pulling: frozenset[Key] = frozenset()
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._ending: dict[Key, asyncio.Task[None]] = {}  # stopped, and not done in time
        self._writer: asyncio.StreamWriter | None = None
        self._running = asyncio.Lock()  # one `_run` at a time: an older one is not to end last
        self._news = asyncio.Event()
        self._told = b""
        self._next_door = 0
        self._idle_since: float | None = 0.0
        self._alone_since: float | None = 0.0
        self._stop = asyncio.Event()

    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        lifeline = notify.lifeline_fd()
        if lifeline is not None:
            loop.add_reader(lifeline, self._stop.set)
        self._idle_since = self._alone_since = loop.time()
        listener = socket.socket(fileno=self._config.listen_fd)
        listener.setblocking(False)
        notify.ready()
        parts = self._watch(), self._tell_states(), self._accept(listener)
        tasks = [asyncio.create_task(each) for each in parts]
        await self._stop.wait()
        notify.stopping()
        if lifeline is not None:
            loop.remove_reader(lifeline)
        for task in tasks:
            task.cancel()
        await self._stop_all()
        return 0

    # -- the controller ----------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        """Serve each call of a controller. The socket is the supervisor's, and stays there."""
        loop = asyncio.get_running_loop()
        calls: set[asyncio.Task[None]] = set()
        while True:
            sock, _ = await loop.sock_accept(listener)
            reader = asyncio.StreamReader(LINE_BYTES_MAX)
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await loop.connect_accepted_socket(partial(_same, protocol), sock)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            call = asyncio.create_task(self._controller_calls(reader, writer))
            calls.add(call)
            call.add_done_callback(calls.discard)

    async def _controller_calls(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._writer is not None:  # of a controller that is gone, or about to be
            self._writer.transport.abort()
        self._writer, self._told, self._alone_since = writer, b"", None
        try:
            while text := await reader.readline():
                told = msgspec.json.decode(text, type=Run | Pull | Bindings)
                if isinstance(told, Pull):
                    self._pull(frozenset(told.keys))
                elif isinstance(told, Bindings):
                    self._bind(told)
                else:
                    async with self._running:
                        if self._writer is writer:
                            await self._run(told.bridges, told.cluster)
                    self._news.set()
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.warning("the connection to the controller ended: %s", error)
        finally:
            writer.transport.abort()
            if self._writer is writer:
                self._writer = None
                self._alone_since = asyncio.get_running_loop().time()

    async def _run(self, orders: list[Order], cluster: str) -> None:
        """Stop what is not to run any more, or not so, and start what is new.

        A link whose URIs cannot be read does not run. Its queue at the upstream stays.
        """
        wanted = {
            key_of(order.bridge): order
            for order in orders
            if isinstance(order.bridge, Shovel) or not order.bridge.source.obstacle
        }
        exchanges: dict[tuple[str, str], list[ExchangeLink]] = {}
        for order in orders:
            if isinstance(link := order.bridge, ExchangeLink):
                exchanges.setdefault((link.vhost, link.exchange), []).append(link)
        stopped = []
        for key, runner in self._runners.items():
            if isinstance(runner, ExchangeLinkRunner) and cluster != runner.cluster:
                runner.leaves = True
                stopped.append(key)
            elif wanted.get(key) != runner.order:
                if isinstance(runner, ExchangeLinkRunner):
                    runner.leaves = not runner.has_heir(exchanges)
                stopped.append(key)
        await self._stop_runners(stopped)
        self._bindings = {key: told for key, told in self._bindings.items() if key in exchanges}
        for key, order in wanted.items():
            if key not in self._runners:
                runner = self._runners[key] = self._runner(order, cluster)
                self._tasks[key] = asyncio.create_task(self._run_after(key, runner))
        # One that is gone and comes back waits until it is told again to take messages.
        self._pulling = frozenset(self._pulling & wanted.keys())
        now = asyncio.get_running_loop().time()
        self._idle_since = None if self._runners else self._idle_since or now

    async def _run_after(self, key: Key, runner: Runner) -> None:
        """Run a bridge when the one before it has left what both have at their ends."""
        if (before := self._ending.get(key)) is not None:
            await asyncio.wait([before])
        await runner.run()

    async def _stop_all(self) -> None:
        """Stop all, and leave at the upstreams what keeps messages for the next start."""
        await self._stop_runners(list(self._runners))

    async def _stop_runners(self, keys: list[Key]) -> None:
        tasks = {key: self._tasks.pop(key) for key in keys}
        for key, task in tasks.items():
            del self._runners[key]
            task.cancel()
        if tasks:
            await asyncio.wait(tasks.values(), timeout=STOP_S_MAX)
        self._ending = {
            key: task for key, task in (self._ending | tasks).items() if not task.done()
        }

    def _runner(self, order: Order, cluster: str) -> Runner:
        if isinstance(order.bridge, ExchangeLink):
            runner = ExchangeLinkRunner(order, cluster, self._door_paths, self._news.set)
            told = self._bindings.get((order.bridge.vhost, order.bridge.exchange))
            if told is not None:
                runner.bind(told.bindings)
            return runner
        if isinstance(order.bridge, QueueLink):
            link = QueueLinkRunner(order, self._door_paths, self._news.set)
            link.pull(key_of(order.bridge) in self._pulling)
            return link
        return ShovelRunner(order, cluster, self._door_paths, self._news.set)

    def _pull(self, keys: frozenset[Key]) -> None:
        """Let these links take messages, and no others."""
        changed, self._pulling = self._pulling ^ keys, keys
        for key in changed:
            runner = self._runners.get(key)
            if isinstance(runner, QueueLinkRunner):
                runner.pull(key in keys)

    def _bind(self, told: Bindings) -> None:
        """Let the links of an exchange make its bindings at their upstreams."""
        self._bindings[told.vhost, told.exchange] = told
        for runner in self._runners.values():
            if isinstance(runner, ExchangeLinkRunner) and runner.is_of(told):
                runner.bind(told.bindings)

    def _door_paths(self) -> list[str]:
        """Return the sockets of the front doors of this host, another one first each time."""
        config = self._config
        self._next_door += 1
        paths = [
            f"{config.runtime_dir}/door-{config.first_door + (self._next_door + n) % config.doors}"
            ".sock"
            for n in range(config.doors)
        ]
        return [path for path in paths if os.path.exists(path)]

    async def _tell_states(self) -> None:
        while True:
            try:
                async with asyncio.timeout(TELL_S):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            for runner in self._runners.values():
                runner.update()
            writer = self._writer
            told = line(Told([runner.state for runner in self._runners.values()]))
            if writer is None or told == self._told:
                continue
            if writer.transport.get_write_buffer_size():
                continue  # the controller is busy; it gets the states as they are later
            self._told = told
            writer.write(told)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            notify.watchdog()
            now = loop.time()
            if self._alone_since is not None and now - self._alone_since > WITHOUT_CONTROLLER_S:
                await self._stop_all()
                self._idle_since = self._idle_since or now
            if self._idle_since is not None and now - self._idle_since > IDLE_S:
                self._stop.set()
            await asyncio.sleep(WATCHDOG_S)

    def _reload(self) -> None:
        """Take the log level of new settings. The others hold from the next start on."""
        if (section := notify.new_section()) is not None:
            set_level(read(section).log_level)
