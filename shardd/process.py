"""Run a shard as the whole of a process: a plain blocking loop around a Server.

Without work the process sleeps in epoll until a message, the end of a sync, a signal, the end of
the supervisor, or the next timer.
"""

from __future__ import annotations

import logging
import sys

from shardmq.shardd.config import ShardConfig, read
from shardmq.shardd.server import SWITCH_INTERVAL_S, Server
from shardmq.shardd.signals import Signals
from shardmq.shardd.wire.memory import keep_warm
from shardmq.supervisor import notify

log = logging.getLogger("shardmq.shardd.process")


def run(config: ShardConfig) -> int:
    """Run a shard until it is drained or fails; return the exit status.

    The status is 0 after a drain, 1 if the disk or the shard itself failed, and 2 if a later
    version wrote the files.
    """
    keep_warm()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    server, signals, lifeline = Server(config, notify.ready), Signals(), notify.lifeline_fd()
    orphaned = False

    def signalled() -> None:
        if signals.take() and (section := notify.new_section()) is not None:
            server.take_settings(read(section))

    def lost_supervisor() -> None:
        nonlocal orphaned
        log.warning("the supervisor is gone")
        orphaned = True

    server.watch(signals.fd, signalled)
    if lifeline is not None:
        server.watch(lifeline, lost_supervisor)
    status = 0
    try:
        server.begin()
        while not signals.stop and not orphaned:
            server.turn(server.links.wait(server.wait_ms()))
        notify.stopping()
        server.drain()
    except Exception as error:
        status = server.break_off(error)
    server.close()
    return status
