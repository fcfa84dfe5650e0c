"""Run a front door as the whole of a process, with signals and the supervisor's lifeline."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import uvloop

from shardmq.broker.front_door.door import FrontDoor
from shardmq.broker.shared.config import BrokerConfig, ConfigError, read_config
from shardmq.shardd.wire.memory import collect_seldom, give_back, keep_warm
from shardmq.supervisor import notify

log = logging.getLogger("shardmq.broker.front_door.process")


async def serve(config: BrokerConfig) -> None:
    """Run a front door until SIGTERM, or until the supervisor is gone."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    lifeline = notify.lifeline_fd()
    if lifeline is not None:
        loop.add_reader(lifeline, stopped.set)
    door = FrontDoor(config)

    def reload() -> None:
        section, given = notify.new_section(), None
        try:
            given = None if section is None else read_config(["--config", section])
        except ConfigError as error:
            log.error("settings stay as they were: %s", error)
        door.reload(given)

    loop.add_signal_handler(signal.SIGHUP, reload)
    joining = loop.create_task(door.join())
    starting = loop.create_task(door.start())
    stopping = loop.create_task(stopped.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        starting.result()
        notify.ready(pid=str(os.getpid()))
        give_back()
    ticking = loop.create_task(door.tick())
    await stopping
    if lifeline is not None:
        loop.remove_reader(lifeline)
    notify.stopping()
    for task in (starting, ticking, joining):
        task.cancel()
    await door.drain()


def run(config: BrokerConfig) -> None:
    """Run a front door as the whole of this process."""
    keep_warm()
    collect_seldom()
    uvloop.run(serve(config))
