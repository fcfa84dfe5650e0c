"""Rows come from the broker into Arrow. These tests need no JVM."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyspark_shardmq import fetch
from pyspark_shardmq.fetch import Broker, BrokerError
from pyspark_shardmq.offsets import Range
from pyspark_shardmq.options import read_options
from tests.support.fake_streams import FakeStreams

pa = pytest.importorskip("pyarrow")

ROWS = 2500
ROW_BYTES = 300  # a batch is many times larger than one system call may receive


def scanned(url: str, one: Range) -> list[bytes]:
    broker = Broker(read_options({"shardmq.url": url, "subscribe": one.queue}).connection)
    try:
        return [
            value for batch in broker.scan(one, ["value"]) for value in batch["value"].to_pylist()
        ]
    finally:
        broker.close()


@pytest.mark.parametrize("cut_off", [0, 2])
def test_no_call_of_the_kernel_takes_in_a_whole_batch(
    streams: FakeStreams, url: str, cut_off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no row is lost between the pieces either, also if an answer is cut off.

    Other processes of the host may have to wait while a system call copies.
    """
    (shard,) = streams.declare("orders")
    streams.append("orders", ROWS)
    chosen = random.Random(cut_off)
    for row in shard.rows:
        row["value"] = chosen.randbytes(chosen.randrange(2 * ROW_BYTES))
    streams.faults["arrow"] = cut_off
    asked: list[int] = []
    receive = socket.SocketIO.readinto

    def receiving(self: socket.SocketIO, buffer: Any) -> int | None:
        asked.append(memoryview(buffer).nbytes)
        return receive(self, buffer)

    monkeypatch.setattr(socket.SocketIO, "readinto", receiving)
    found = scanned(url, Range("orders", 0, shard.id, 0, ROWS))
    assert found == [row["value"] for row in shard.rows]
    assert max(asked) <= fetch.RECEIVE_BYTES_MAX < sum(map(len, found)) / 4


# -- errors that are not tried again ---------------------------------------------------------------


class Answering:
    """A server that handles each connection by a given function and counts the connections."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with connection, contextlib.suppress(OSError):
                self._answer(connection)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def asked(url: str, retries: int = 3) -> None:
    options = {"shardmq.url": url, "subscribe": "orders", "fetchOffset.numRetries": str(retries)}
    broker = Broker(
        read_options(
            {**options, "fetchOffset.retryIntervalMs": "1", "requestTimeoutMs": "20000"}
        ).connection
    )
    try:
        broker.inspect("orders")
    finally:
        broker.close()


def speaks_tls(tmp_path: Path) -> Callable[[socket.socket], None]:
    from tests.support.certificates import Authority

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(
        Authority(tmp_path).make("server.pem", "CN=localhost", hosts=("127.0.0.1",))
    )

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(ssl.SSLError):
            context.wrap_socket(connection, server_side=True).recv(1)

    return answer


def says(text: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass

    return answer


def refusal(status: int, error: str) -> bytes:
    body = b'{"error": "%s", "reason": "why"}' % error.encode()
    return b"HTTP/1.1 %d X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


STAYS = {
    "a certificate of nobody": (
        "https",
        speaks_tls,
        fetch.Untrusted,
        "certificate is not accepted",
    ),
    "no TLS": (
        "https",
        lambda _: says(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        fetch.Untrusted,
        "no TLS connection",
    ),
    "no HTTP": (
        "http",
        lambda _: says(b"AMQP\x00\x00\x09\x01\r\n"),
        BrokerError,
        "does not speak HTTP",
    ),
    "damage": ("http", lambda _: says(refusal(500, "unreadable")), BrokerError, "500 why"),
    "no right": ("http", lambda _: says(refusal(401, "not_authorised")), BrokerError, "401 why"),
}


@pytest.mark.parametrize("what", STAYS)
def test_a_trouble_that_stays_is_an_error_at_once(what: str, tmp_path: Path) -> None:
    scheme, answer, kind, why = STAYS[what]
    server = Answering(answer(tmp_path))
    try:
        with pytest.raises(kind, match=why) as raised:
            asked(f"{scheme}://127.0.0.1:{server.port}")
        assert not isinstance(raised.value, fetch.Transient) and "tried" not in str(raised.value)
        assert server.connections == 1
    finally:
        server.close()


@pytest.mark.parametrize("text", [b"", refusal(503, "unavailable"), refusal(500, "internal")])
def test_a_trouble_that_may_pass_is_tried_again(text: bytes) -> None:
    server = Answering(says(text))
    try:
        with pytest.raises(BrokerError, match="tried 4 times"):
            asked(f"http://127.0.0.1:{server.port}")
        assert server.connections == 4
    finally:
        server.close()


# -- scans that are sent to another node ---------------------------------------------------------


class Cluster:
    """Two servers: the one that is asked sends all scans to the other one, and lists `nodes`."""

    def __init__(self, scheme: str = "http") -> None:
        self.asked: list[tuple[str, bytes]] = []  # requests of both, by the name of the server
        self.refusal = b""  # the answer of the other one, if it refuses
        self.refuses_always = b""
        self.far = Answering(self._give)
        self.near = Answering(self._send_on)
        self.far_url = f"{scheme}://127.0.0.1:{self.far.port}"
        self.nodes = {"b": [self.far_url]}

    def close(self) -> None:
        self.near.close()
        self.far.close()

    def _send_on(self, connection: socket.socket) -> None:
        request = connection.recv(1 << 16)
        self.asked.append(("near", request))
        if b"/arrow?" in request:
            self._say(connection, b"307 X\r\nLocation: %b/rows/t" % self.far_url.encode(), b"{}")
        else:
            self._say(connection, b"200 X", json.dumps({"nodes": self.nodes}).encode())

    def _give(self, connection: socket.socket) -> None:
        self.asked.append(("far", connection.recv(1 << 16)))
        if status := self.refusal or self.refuses_always:
            self.refusal = b""
            self._say(connection, status, b"{}")
            return
        rows = pa.record_batch({"value": [b"a", b"b"], "offset": [0, 1]})
        self._say(connection, b"200 X", fetch.as_stream(rows))

    @staticmethod
    def _say(connection: socket.socket, head: bytes, body: bytes) -> None:
        connection.sendall(
            b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
            % (head, len(body), body)
        )


@pytest.fixture
def two() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def sent_on(cluster: Cluster) -> list[bytes]:
    url = f"http://127.0.0.1:{cluster.near.port}"
    options = {"shardmq.url": url, "subscribe": "orders", "shardmq.password": "hidden"}
    options |= {"fetchOffset.retryIntervalMs": "1", "requestTimeoutMs": "20000"}
    broker = Broker(read_options(options).connection)
    one = Range("orders", 0, "an id", 0, 2)
    return [value for batch in broker.scan(one, ["value"]) for value in batch["value"].to_pylist()]


def test_a_scan_is_followed_to_a_node_without_a_password(two: Cluster) -> None:
    assert sent_on(two) == [b"a", b"b"]
    assert [where for where, _ in two.asked] == ["near", "near", "far"]
    (request,) = [request for where, request in two.asked if where == "far"]
    assert request.startswith(b"GET /rows/t HTTP/1.1\r\n")
    assert b"authorization" not in request.lower()
    assert all(b"authorization" in said.lower() for where, said in two.asked if where == "near")


def test_a_node_that_follows_may_send_a_scan_on_to_the_leader_once(two: Cluster) -> None:
    """Two nodes that send a scan to each other do not hold the reader for ever."""
    on = b"307 X\r\nLocation: %b/rows/u" % two.far_url.encode()
    two.refusal = on
    assert sent_on(two) == [b"a", b"b"]
    assert [request[:12] for where, request in two.asked if where == "far"] == [
        b"GET /rows/t ", b"GET /rows/u ",
    ]  # fmt: skip
    two.asked.clear()
    two.refuses_always = on
    with pytest.raises(BrokerError):
        sent_on(two)
    assert len([where for where, _ in two.asked if where == "far"]) == 2


@pytest.mark.parametrize(
    "nodes", [{}, {"b": []}, {"b": ["http://127.0.0.1:1"]}, {"b": ["https://127.0.0.1:1"]}], ids=str
)
def test_a_scan_that_is_sent_to_a_stranger_is_not_followed(
    two: Cluster, nodes: dict[str, list[str]]
) -> None:
    two.nodes = nodes
    with pytest.raises(BrokerError, match="which is no node that it lists"):
        sent_on(two)
    assert two.far.connections == 0


@pytest.mark.parametrize(
    "location", ["", "/rows/t", "http://", "file:///etc/passwd", "http://u@b/"]
)
def test_a_location_that_is_no_url_of_a_node_is_not_followed(two: Cluster, location: str) -> None:
    two.far_url = location
    with pytest.raises(BrokerError, match="which is no node that it lists"):
        sent_on(two)


def test_tls_is_not_left_for_plain_http_or_the_other_way() -> None:
    cluster = Cluster("https")
    with pytest.raises(BrokerError, match="which is no node that it lists"):
        sent_on(cluster)
    assert cluster.far.connections == 0
    cluster.close()


@pytest.mark.parametrize("status", [b"401 X", b"404 X", b"503 X"])
def test_a_node_that_does_not_know_the_ticket_is_not_the_end(two: Cluster, status: bytes) -> None:
    """The ticket was too old, or the stream is on another node now: the leader knows."""
    two.refusal = status
    assert sent_on(two) == [b"a", b"b"]
    assert [where for where, _ in two.asked] == ["near", "near", "far", "near", "far"]
