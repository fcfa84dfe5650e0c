"""Run a front door and a shard in one event loop, as the whole of a process.

The front door begins when the shard has recovered. The two talk by a local lane
(shardd/wire/local_lane.py); to the front doors and shards of other processes each of them has lanes
as in a process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import msgspec
import uvloop

from shardmq.broker.front_door.door import FrontDoor
from shardmq.combined.config import CombinedConfig, read
from shardmq.combined.passes import Passes
from shardmq.shardd.server import SERVES, SWITCH_INTERVAL_S, Server
from shardmq.shardd.wire.local_lane import LocalLane
from shardmq.shardd.wire.memory import collect_seldom, give_back, keep_warm
from shardmq.supervisor import notify

log = logging.getLogger("shardmq.combined.process")

# At the end of the broker, the front doors of other processes take as long as this one to send the
# last messages of their clients to this shard.
OTHER_DOORS_S = 6.0
OTHER_DOORS_LOOK_S = 0.01
# The clients of a shard that failed may take this long to close.
FAILED_DRAIN_S = 0.5


class Combined:
    """A front door and a shard, from the start of their process to its end."""

    def __init__(self, config: CombinedConfig) -> None:
        self._aio = aio = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._failure: Exception | None = None  # of the shard
        self._recovered = asyncio.Event()
        self._server = Server(config.shard, self._recovered.set, alone=False)
        door_end, shard_end = LocalLane.pair()
        self._door = FrontDoor(config.front_door, door_end, config.shard.shard)
        self._passes = Passes(aio, self._server, self._door.hear_local, self._fail)
        self._server.links.add_local(self._door.endpoint, shard_end)
        if (memory := self._door.lent_memory) is not None:
            self._server.shard.membership.lends_here(config.front_door.door, memory)
        shard_end.wake = self._passes.soon
        self._door.run_beside(self._passes.run_if_soon)

    def stop(self) -> None:
        """Begin to drain."""
        self._stopped.set()

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._stopped.set()

    def reload(self) -> None:
        """Take new settings from the supervisor, and certificates as they are on disk now."""
        section, given = notify.new_section(), None
        try:
            given = None if section is None else read(section)
        except msgspec.DecodeError as error:
            log.error("settings stay as they were: %s", error)
        if given is not None:
            self._server.take_settings(given.shard)
        self._door.reload(None if given is None else given.front_door)

    async def run(self) -> int:
        """Serve until `stop` is called or the shard fails, then drain; return the exit status."""
        aio = self._aio
        try:
            self._passes.begin()
        except Exception as error:
            self._fail(error)
        opening = aio.create_task(self._open())
        stopping = aio.create_task(self._stopped.wait())
        await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            opening.result()
        beside = [aio.create_task(work) for work in (self._door.join(), self._door.tick())]
        await stopping
        notify.stopping()
        for task in (opening, *beside):
            task.cancel()
        return await self._end()

    async def _open(self) -> None:
        """Take clients as soon as the queues of this process are there."""
        await self._recovered.wait()
        await self._door.start()
        notify.ready(pid=str(os.getpid()), serves=SERVES)
        give_back()

    async def _end(self) -> int:
        status = 0
        if self._failure is not None:
            status = self._server.break_off(self._failure)
            await self._door.drain(FAILED_DRAIN_S)
        else:
            await self._door.drain()
            await self._let_other_doors_drain()
            self._passes.end()
            try:
                if self._failure is not None:
                    raise self._failure
                self._server.drain()
            except Exception as error:
                status = self._server.break_off(error)
        self._server.close()
        return status

    async def _let_other_doors_drain(self) -> None:
        """Serve the front doors of other processes until they have drained, too.

        With the whole broker they drain at the same time. A shard that went first would leave
        publishes without an answer.
        """
        until = self._aio.time() + OTHER_DOORS_S
        while (
            self._failure is None
            and self._server.links.has_other_doors
            and self._aio.time() < until
        ):
            await asyncio.sleep(OTHER_DOORS_LOOK_S)


async def serve(config: CombinedConfig) -> int:
    """Serve until SIGTERM, the end of the supervisor, or a failure; return the exit status."""
    loop = asyncio.get_running_loop()
    combined = Combined(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, combined.stop)
    loop.add_signal_handler(signal.SIGHUP, combined.reload)
    lifeline = notify.lifeline_fd()
    if lifeline is not None:

        def lost_supervisor() -> None:
            loop.remove_reader(lifeline)
            log.warning("the supervisor is gone")
            combined.stop()

        loop.add_reader(lifeline, lost_supervisor)
    return await combined.run()


def run(config: CombinedConfig) -> int:
    """Run a front door and a shard until they are drained or fail; return the exit status."""
    keep_warm()
    collect_seldom()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return uvloop.run(serve(config))
