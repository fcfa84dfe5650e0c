"""Connections that wait in the kernel when a shard begins to listen do not keep sessions out.

That is how a shard finds its socket when it takes over the lead: nobody has accepted until then.
"""

from __future__ import annotations

import select
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from shardmq.shardd.sessions import Sessions
from shardmq.shardd.wire.session import SessionKeys, prepare
from shardmq.supervisor.plan import BACKLOG

STRANGERS = 3000  # ZeroMQ keeps 2000 events for a monitor that does not read
WAIT_S = 20.0
SOMAXCONN = Path("/proc/sys/net/core/somaxconn")

pytestmark = pytest.mark.skipif(
    int(SOMAXCONN.read_text()) < BACKLOG, reason="the kernel queues fewer connections"
)


@pytest.fixture
def listening():
    """Return a socket to which strangers have connected, and that nobody has accepted at."""
    with ExitStack() as stack:
        found = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=BACKLOG))
        for _ in range(STRANGERS):
            stack.enter_context(socket.create_connection(found.getsockname()))
        yield found


@pytest.fixture
def keys():
    public, secret = zmq.curve_keypair()
    return SessionKeys(public.decode(), secret.decode())


def test_a_session_gets_in_behind_queued_strangers(listening, keys):
    context, other = zmq.Context(), zmq.Context()
    with select.epoll() as poll:
        sessions = Sessions(context, listening.fileno(), keys, poll)
        peer = other.socket(zmq.DEALER)
        prepare(peer, keys)
        peer.curve_serverkey = keys.public.encode()
        peer.connect(f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        peer.send(b"\x01\x01hello")
        came, until = None, time.monotonic() + WAIT_S
        while came is None and time.monotonic() < until:
            for fd, _ in poll.poll(1):
                sessions.hear(fd)
            came = sessions.take()
            sessions.ended()
        # If this fails, the sockets stay open: to close them would wait for ever.
        assert came is not None
        assert came[1] == b"\x01\x01hello"
        sessions.close(0)
    peer.close(0)
    other.term()
    context.term()
