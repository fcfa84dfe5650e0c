"""Nobody without the keys of the cluster gets a byte into a shard, whatever is tried."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from shardmq.shardd.sessions import STRANGERS_MAX
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.session import HANDSHAKE_S, SessionKeys
from tests.support.real_broker import wait_until
from tests.support.recording_relay import RecordingRelay
from tests.support.remote_shard import HOST, RemotePeer, RemoteShard, new_keys

pytestmark = pytest.mark.broker

SILENT = 2000  # connections that say nothing
SPEAKING = 1500  # connections that begin to say something
LATE = 1000  # connections that the loop of the shard has not heard of yet
MORE_DESCRIPTORS = 20
MORE_BYTES = 64 << 20


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteShard]:
    made = RemoteShard(tmp_path_factory.mktemp("shard"), new_keys())
    try:
        yield made
        made.close()
        assert "Traceback" not in made.log()
    finally:
        made.process.kill()


@pytest.fixture(scope="module")
def friend(shard: RemoteShard) -> Iterator[RemotePeer]:
    """Yield a controller that has the keys, through all that strangers do."""
    made = shard.controller()
    yield made
    made.close()


def speak(shard: RemoteShard, said: bytes) -> bytes:
    """Say this on a connection of its own, and return what comes until its end."""
    with socket.create_connection((HOST, shard.port), timeout=30) as made:
        heard = b""
        with contextlib.suppress(ConnectionError):
            made.sendall(said)
            while more := made.recv(1 << 16):
                heard += more
        return heard


@pytest.mark.parametrize("who", ["client", "server", "both"])
def test_other_keys_let_nobody_in(shard: RemoteShard, friend: RemotePeer, who: str) -> None:
    public, secret = (text.decode() for text in zmq.curve_keypair())
    keys = shard.keys if who == "server" else SessionKeys(public, secret)
    before = friend.stats()
    stranger = RemotePeer(shard, keys=keys, server=None if who == "client" else public, number=1)
    assert stranger.join() is None
    stranger.close()
    after = friend.stats()
    assert after["sessions"] == before["sessions"] == 1
    assert after["session_handshakes_failed"] > before["session_handshakes_failed"]


def test_the_public_key_alone_lets_nobody_in(shard: RemoteShard, friend: RemotePeer) -> None:
    _, secret = (text.decode() for text in zmq.curve_keypair())
    stranger = RemotePeer(shard, keys=SessionKeys(shard.keys.public, secret), number=1)
    assert stranger.join() is None
    stranger.close()
    assert friend.stats()["sessions"] == 1


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ, zmq.ROUTER, zmq.PUSH])
def test_a_peer_without_keys_is_not_heard(
    shard: RemoteShard, friend: RemotePeer, kind: int
) -> None:
    context = zmq.Context()
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.RECONNECT_IVL, -1)
    monitor = made.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    made.connect(shard.address)
    assert monitor.poll(30_000)
    made.disable_monitor()
    monitor.close(0)
    made.close(0)
    context.term()
    assert friend.stats()["sessions"] == 1


def recorded(shard: RemoteShard, friend: RemotePeer) -> bytes:
    """Return all that a peer with the keys sends, from the handshake to its Join."""
    with RecordingRelay(HOST, shard.port) as relay:
        peer = RemotePeer(shard, number=2, address=relay.address)
        assert isinstance(peer.join(), wire.Hello)
        peer.close()
        said = relay.taken()
    wait_until(lambda: friend.stats()["sessions"] == 1, "the shard to miss the peer")
    return said


def test_a_recorded_handshake_is_worth_nothing(shard: RemoteShard, friend: RemotePeer) -> None:
    said = recorded(shard, friend)
    assert len(said) > 400  # greeting, HELLO, INITIATE, Join
    before = friend.stats()
    answer = speak(shard, said)
    # The shard says its greeting and a WELCOME with a key of its own, and no READY.
    assert len(answer) <= 64 + 170
    after = friend.stats()
    assert after["sessions"] == before["sessions"]
    assert after["session_handshakes_failed"] > before["session_handshakes_failed"]


def test_a_handshake_that_ends_anywhere_harms_nobody(
    shard: RemoteShard, friend: RemotePeer
) -> None:
    said = recorded(shard, friend)
    for length in (*range(1, 80), *range(80, len(said), 23)):
        with socket.create_connection((HOST, shard.port)) as made:
            made.sendall(said[:length])
    assert friend.stats()["sessions"] == 1
    flipped = [said[:at] + bytes([said[at] ^ 0xFF]) + said[at + 1 : 264] for at in range(0, 264, 8)]
    with ThreadPoolExecutor(len(flipped)) as threads:
        list(threads.map(lambda each: speak(shard, each), flipped))
    assert friend.stats()["sessions"] == 1


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"AMQP\x00\x00\x09\x01", bytes(100)])
def test_other_protocols_are_cut_off(shard: RemoteShard, friend: RemotePeer, said: bytes) -> None:
    since = time.monotonic()
    speak(shard, said)
    assert time.monotonic() - since < 4 * HANDSHAKE_S
    assert friend.stats()["sessions"] == 1


def test_connections_that_say_nothing_take_few_descriptors(
    shard: RemoteShard, friend: RemotePeer
) -> None:
    before, bytes_before = shard.descriptors, shard.rss_bytes
    open_ones = []
    try:
        for _ in range(SILENT):
            made = socket.socket()
            made.setblocking(False)
            made.connect_ex((HOST, shard.port))
            open_ones.append(made)
        for _ in range(5):
            assert shard.descriptors < before + STRANGERS_MAX + LATE
            assert friend.stats()["sessions"] == 1
            time.sleep(HANDSHAKE_S / 5)
        newcomer = RemotePeer(shard, number=3)  # the flood keeps nobody out
        assert isinstance(newcomer.join(), wire.Hello)
        newcomer.close()
    finally:
        for made in open_ones:
            made.close()
    assert shard.rss_bytes < bytes_before + MORE_BYTES


def test_connections_that_do_not_shake_hands_are_closed_in_time(
    shard: RemoteShard, friend: RemotePeer
) -> None:
    before = shard.descriptors
    open_ones = [socket.create_connection((HOST, shard.port)) for _ in range(SPEAKING)]
    try:
        for made in open_ones:
            made.sendall(b"\xff")
        most = before
        for _ in range(10):
            most = max(most, shard.descriptors)
            time.sleep(0.02)
        assert before < most < before + STRANGERS_MAX + LATE
        wait_until(lambda: shard.descriptors < before + MORE_DESCRIPTORS, "the shard to close them")
        assert friend.stats()["sessions"] == 1
    finally:
        for made in open_ones:
            made.close()
    assert shard.rss_bytes < 256 << 20
