"""Run a shard as the whole of a process: a plain blocking loop around a Server.

Without work the process sleeps in epoll until a message, the end of a sync, a signal, the end of
the supervisor, or the next timer. A shard with copies on other nodes follows first (seat.py): it
has a Server from the moment on in which this node leads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys

from shardmq.shardd.config import ShardConfig, read
from shardmq.shardd.server import FAILED, SERVES, SWITCH_INTERVAL_S, TICK_MS, Copied, Server
from shardmq.shardd.signals import Signals
from shardmq.shardd.wire.board import path_of
from shardmq.shardd.wire.memory import keep_warm
from shardmq.supervisor import notify
from shardmq.supervisor.logs import set_level

log = logging.getLogger("shardmq.shardd.process")

# The last syncs of a shard with copies wait so long for nodes that may be gone, as etcd may be.
LAST_SYNCS_S_MAX = 10.0


def run(config: ShardConfig) -> int:
    """Run a shard until it is drained or fails; return the exit status.

    The status is 0 after a stop in order, 1 if the disk or the shard itself failed, 2 if a later
    version wrote the files, and DEPOSED if another node leads the shard, which this one did.
    """
    keep_warm()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    signals = Signals()
    if config.copies is None:
        return _serve(config, signals, None)
    from shardmq.shardd.seat import Seat  # with asyncio and a client for etcd

    with contextlib.suppress(FileNotFoundError):
        os.unlink(path_of(config.runtime_dir, config.shard))
    seat = Seat(config, config.copies)
    seat.start()
    config = _follow(config, signals, seat)
    if seat.files is not None and not seat.over:
        return _serve(config, signals, seat)
    seat.stop()
    return FAILED if seat.failure is not None else 0


def _follow(config: ShardConfig, signals: Signals, seat: Copied) -> ShardConfig:
    """Return when this node leads, or has to end; return the settings as they are then."""
    lifeline, poll = notify.lifeline_fd(), select.poll()
    for fd in (signals.fd, seat.fd, *(() if lifeline is None else (lifeline,))):
        poll.register(fd, select.POLLIN)
    is_ready = False
    while seat.files is None and not seat.over:
        ready = {fd for fd, _ in poll.poll(TICK_MS)}
        notify.watchdog()
        seat.look()
        is_reload = signals.fd in ready and signals.take()
        if is_reload and (section := notify.new_section()) is not None:
            config = read(section)
            set_level(config.log_level)
        if signals.stop or lifeline in ready:
            notify.stopping()
            break
        if seat.is_settled and not is_ready:
            is_ready = True
            notify.ready()
            notify.status("has a copy, another node leads")
    return config


def _serve(config: ShardConfig, signals: Signals, seat: Copied | None) -> int:
    server = Server(config, lambda: notify.ready(serves=SERVES), seat=seat)
    lifeline = notify.lifeline_fd()
    ends = False  # without a signal
    gives = False  # the shard to another node
    is_drained = False

    def signalled() -> None:
        if signals.take() and (section := notify.new_section()) is not None:
            server.take_settings(read(section))

    def lost_supervisor() -> None:
        nonlocal ends
        log.warning("the supervisor is gone")
        ends = True

    def look_at_seat() -> None:
        nonlocal ends, gives
        assert seat is not None
        seat.look()
        gives = bool(seat.heir) and server.shard.ready
        ends = ends or gives or bool(seat.over)

    server.watch(signals.fd, signalled)
    if lifeline is not None:
        server.watch(lifeline, lost_supervisor)
    if seat is not None:
        server.watch(seat.fd, look_at_seat)
        # Until its first turn, what begins to lead waits for syncs of nodes that may be gone.
        signals.stopping = lambda: seat.leave_within(LAST_SYNCS_S_MAX)
        if signals.stop:
            signals.stopping()
    status, why = 0, ""
    try:
        server.begin()
        while not signals.stop and not ends:
            server.turn(server.links.wait(server.wait_ms()))
        if seat is not None and seat.over:
            status, why = FAILED if seat.failure is not None else notify.DEPOSED, seat.over
        else:
            if signals.stop or not gives:
                notify.stopping()
            else:
                status = notify.DEPOSED
            if seat is not None:
                seat.leave_within(LAST_SYNCS_S_MAX)
                server.leave()
            server.drain()
            is_drained = True
    except Exception as error:
        if seat is not None and seat.is_deposed(error):
            status, why = notify.DEPOSED, repr(error)
        else:
            status = server.break_off(error)
    if status == notify.DEPOSED and signals.stop:
        status = 0  # nobody starts this process again, so it has no other role to play
        if not is_drained:
            log.info("ends without the last syncs of other nodes, which end or lead: %s", why)
    elif status == notify.DEPOSED and not is_drained:
        log.warning("another node leads this shard")
    server.close()
    if seat is not None:
        if is_drained:
            seat.hand_over()
        seat.stop()
    return status
