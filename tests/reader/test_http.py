"""Streams by HTTP as Arrow give what AMQP consumers get.

Only users with the right may read, and any process may be killed meanwhile.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import socket
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from shardmq.supervisor.cli.app import app
from tests.support.certificates import Authority
from tests.support.real_broker import RealBroker, wait_until

SETTINGS = """
[reader]
bytes_per_s = 8000000
[listen]
amqps_port = 0
https_port = 0
[tls]
cert = "{directory}/server.pem"
"""
STREAM = {"x-queue-type": "stream"}
TWO_SHARDS = {"x-shards": 2, "x-shard-arguments": STREAM}
SETTLE_S = 60.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """One of its own: its processes are killed. Slow enough that a scan can be met on its way."""
    directory: Path = tmp_path_factory.mktemp("streams-http")
    Authority(directory, "servers").make(
        "server.pem", "CN=localhost", hosts=("localhost", "127.0.0.1")
    )
    (directory / "broker.toml").write_text(SETTINGS.format(directory=directory))
    made = RealBroker(directory / "data", more=("--config", str(directory / "broker.toml")))
    try:
        yield made
        made.stop()
        assert "Traceback" not in made.log_path.read_text()
    finally:
        made.clean_up()


class Http:
    """One connection, kept alive."""

    def __init__(self, broker: RealBroker, user: str = "guest") -> None:
        host, _, port = broker.http.rpartition(":")
        self._connection = http.client.HTTPConnection(
            "127.0.0.1" if host == "0.0.0.0" else host, int(port), timeout=60
        )
        self._login = "Basic " + base64.b64encode(f"{user}:{user}".encode()).decode()

    def open(
        self, path: str, method: str = "GET", body: bytes | None = None
    ) -> http.client.HTTPResponse:
        self._connection.request(method, f"/api{path}", body, {"Authorization": self._login})
        return self._connection.getresponse()

    def call(self, path: str, method: str = "GET", body: Any = None) -> tuple[int, Any]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        answer = self.open(path, method, data)
        said = answer.read()
        return answer.status, json.loads(said) if said and answer.getheader(
            "Content-Type"
        ) == "application/json" else said

    def get(self, path: str) -> Any:
        status, said = self.call(path)
        assert status == 200, (status, said)
        return said

    def table(self, stream: str, shard: int = 0, **query: Any) -> Any:
        return pa.ipc.open_stream(self.get(arrow(stream, shard, **query))).read_all()


def arrow(stream: str, shard: int = 0, **query: Any) -> str:
    said = urllib.parse.urlencode({key.rstrip("_"): value for key, value in query.items()})
    return f"/streams/%2F/{urllib.parse.quote(stream, safe='')}/{shard}/arrow?{said}"


def ipc(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


@pytest.fixture
def channel(connection: pika.BlockingConnection) -> Any:
    made = connection.channel()
    made.confirm_delivery()
    return made


def consumed(
    connection: pika.BlockingConnection, stream: str, count: int
) -> list[tuple[Any, Any, bytes]]:
    channel = connection.channel()
    channel.basic_qos(prefetch_count=100)
    found = []
    for method, properties, body in channel.consume(
        stream, arguments={"x-stream-offset": "first"}, inactivity_timeout=60
    ):
        assert method is not None, f"{len(found)} of {count} messages came"
        channel.basic_ack(method.delivery_tag)
        found.append((method, properties, body))
        if len(found) == count:
            break
    channel.cancel()
    return found


@pytest.mark.row("D9")
def test_rows_are_what_a_consumer_gets(
    broker: RealBroker, connection: pika.BlockingConnection, channel: Any, name: str
) -> None:
    channel.queue_declare(name, durable=True, arguments=STREAM)
    channel.exchange_declare(f"{name}-x", "fanout")
    channel.queue_bind(name, f"{name}-x")
    for number in range(60):
        headers = (
            {"number": number, "table": {"list": [1, "two"]}, "void": None} if number % 3 else None
        )
        properties = pika.BasicProperties(
            headers=headers,
            content_type="text/plain" if number % 2 else None,
            timestamp=1_700_000_000 + number,
            correlation_id=f"é{number}",
            priority=number % 5,
            app_id="app" if number % 7 else None,
            delivery_mode=1 + number % 2,
        )
        channel.basic_publish(f"{name}-x", f"key.{number}", os.urandom(number * 100), properties)
    columns = "offset,exchange,routing_key,value,headers,properties,queue,shard"
    rows = Http(broker).table(name, columns=columns).to_pylist()
    messages = consumed(connection, name, 60)
    assert len(rows) == 60
    for row, (method, properties, body) in zip(rows, messages, strict=True):
        assert (row["queue"], row["shard"]) == (name, 0)
        assert row["offset"] == properties.headers.pop("x-stream-offset")
        assert (row["exchange"], row["routing_key"], row["value"]) == (
            method.exchange,
            method.routing_key,
            body,
        )
        said = row["properties"]
        assert said.pop("timestamp").timestamp() == properties.timestamp
        assert said == {key: getattr(properties, key) for key in said}
        pairs = {pair["key"]: (pair["type"], pair["value"]) for pair in row["headers"] or []}
        assert sorted(pairs) == sorted(properties.headers)
        if pairs:
            assert pairs["number"] == ("I", int(properties.headers["number"]).to_bytes(4, "big"))
            assert pairs["void"] == ("V", b"")


def test_what_is_there_and_news_of_it(broker: RealBroker, channel: Any, name: str) -> None:
    client = Http(broker)
    channel.queue_declare(name, durable=True, arguments=STREAM)
    assert {"name": name, "vhost": "/", "kind": "queue", "shards": 1} in client.get("/streams/%2F")
    empty = client.get(f"/streams/%2F/{name}")
    assert [(one["shard"], one["first"], one["next"]) for one in empty["shards"]] == [(0, 0, 0)]
    assert client.table(name).num_rows == 0
    began = time.monotonic()
    client.get(f"/streams/%2F/{name}?after=0:0&wait_ms=300")
    assert time.monotonic() - began >= 0.29
    channel.basic_publish("", name, b"1")
    began = time.monotonic()
    found = client.get(f"/streams/%2F/{name}?after=0:0&wait_ms=30000")
    assert time.monotonic() - began < 25 and found["shards"][0]["next"] == 1
    assert client.get(f"/streams/%2F/{name}/offset-for-time?timestamp=0")["shards"] == {"0": 0}
    late = int(time.time() * 1000) + 3_600_000
    assert client.get(f"/streams/%2F/{name}/offset-for-time?timestamp={late}")["shards"] == {"0": 1}
    channel.queue_delete(name)
    assert client.call(f"/streams/%2F/{name}")[0] == 404
    channel.queue_declare(name, durable=True, arguments=STREAM)
    anew = client.get(f"/streams/%2F/{name}")
    assert anew["id"] != empty["id"]
    status, said = client.call(arrow(name, id=empty["id"]))
    assert (status, said["id"]) == (409, anew["id"])


def test_a_stream_exchange_is_read_part_by_part(
    broker: RealBroker, channel: Any, name: str
) -> None:
    arguments = {"x-shards": 3, "x-shard-arguments": STREAM}
    channel.exchange_declare(name, "x-consistent-hash", durable=True, arguments=arguments)
    for number in range(90):
        channel.basic_publish(name, str(number), b"%d" % number)
    client = Http(broker)
    found = client.get(f"/streams/%2F/{name}")
    assert found["kind"] == "exchange" and [one["shard"] for one in found["shards"]] == [0, 1, 2]
    tables = [client.table(name, one["shard"], to=one["next"]) for one in found["shards"]]
    assert [table.num_rows for table in tables] == [one["next"] for one in found["shards"]]
    rows = [row for table in tables for row in table.to_pylist()]
    assert sorted(int(row["value"]) for row in rows) == list(range(90))
    assert {row["queue"] for row in rows} == {name} and {row["shard"] for row in rows} == {0, 1, 2}


def test_ranges_that_are_not_all_there(broker: RealBroker, channel: Any, name: str) -> None:
    arguments = STREAM | {"x-stream-max-segment-size-bytes": 4096, "x-max-length-bytes": 16384}
    channel.queue_declare(name, durable=True, arguments=arguments)
    for _ in range(100):
        channel.basic_publish("", name, bytes(1000))
    client = Http(broker)
    # Two segments or three are too many then.
    wait_until(
        lambda: client.get(f"/streams/%2F/{name}")["shards"][0]["first"] > 75, "retention", SETTLE_S
    )
    status, gone = client.call(arrow(name, from_=0))
    assert status == 410 and gone["first"] > 0 and gone["next"] == 100
    assert client.table(name, from_=gone["first"]).num_rows == 100 - gone["first"]
    assert client.call(arrow(name, to=101))[0] == 416
    assert client.call(arrow(name, from_=99, to=98))[0] == 416
    assert client.call(arrow(name, 1))[0] == 404
    for query in ({"columns": "colour"}, {"filter": "colour:red"}, {"from_": "x"}, {"limit": 1}):
        assert client.call(arrow(name, **query))[0] == 400, query


def test_only_who_may_read_does(broker: RealBroker, channel: Any, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments=STREAM)
    admin = Http(broker)
    for user, read in ((f"{name}-r", ".*"), (f"{name}-w", "^$")):
        assert (
            admin.call(f"/users/{user}", "PUT", {"password": user, "tags": "management"})[0] == 201
        )
        rights = {"configure": "^$", "write": "^$", "read": read}
        assert admin.call(f"/permissions/%2F/{user}", "PUT", rights)[0] == 201
    reader, other = Http(broker, f"{name}-r"), Http(broker, f"{name}-w")
    assert reader.table(name).num_rows == 0
    assert name in [one["name"] for one in reader.get("/streams")]
    assert name not in [one["name"] for one in other.get("/streams")]
    for path in (
        arrow(name),
        f"/streams/%2F/{name}",
        f"/streams/%2F/{name}/offset-for-time?timestamp=0",
    ):
        assert other.call(path)[0] == 401
    body = ipc(pa.table({"value": ["x"]}))
    for client in (reader, other):  # neither may write
        assert (
            client.call("/exchanges/%2F/amq.fanout/arrow?mandatory=false", "POST", body)[0] == 401
        )
    assert Http(broker, "nobody").call(arrow(name))[0] == 401


def test_what_is_published_as_rows_comes_back_as_it_was(
    broker: RealBroker, channel: Any, name: str
) -> None:
    client, other = Http(broker), f"{name}-copy"
    for stream in (name, other):
        channel.queue_declare(stream, durable=True, arguments=STREAM)
    for number in range(50):
        headers = {"n": number, "t": {"a": [1]}} if number % 2 else None
        channel.basic_publish(
            "", name, b"x" * number, pika.BasicProperties(headers=headers, message_id=str(number))
        )
    columns = "value,headers,properties"
    rows = client.table(name, columns=columns)
    status, said = client.call(
        f"/exchanges/%2F/amq.default/arrow?routing_key={other}", "POST", ipc(rows)
    )
    assert (status, said) == (200, {"rows": 50, "confirmed": 50})
    assert client.table(other, columns=columns) == rows
    large = ipc(pa.table({"value": [bytes(10_000_000)]}))
    assert (
        client.call(f"/exchanges/%2F/amq.default/arrow?routing_key={other}", "POST", large)[0]
        == 200
    )
    assert client.table(other, from_=50, columns="value").to_pylist() == [
        {"value": bytes(10_000_000)}
    ]


def test_rows_without_a_queue_are_told_with_a_sample(
    broker: RealBroker, channel: Any, name: str
) -> None:
    channel.queue_declare(name, durable=True, arguments=STREAM)
    client = Http(broker)
    body = ipc(pa.table({"value": ["a", "b", "c"], "routing_key": [name, f"{name}-none", None]}))
    status, said = client.call(f"/exchanges/%2F/amq.default/arrow?routing_key={name}", "POST", body)
    assert status == 422 and (said["rows"], said["confirmed"], said["unroutable"]) == (3, 2, 1)
    assert said["sample"] == [{"row": 1, "exchange": "", "routing_key": f"{name}-none"}]
    path = f"/exchanges/%2F/amq.default/arrow?routing_key={name}&mandatory=false"
    assert client.call(path, "POST", body)[0] == 200
    assert client.call(f"/exchanges/%2F/{name}/arrow", "POST", body)[0] == 404
    assert client.call("/exchanges/%2F/amq.default/arrow?producer=p", "POST", body)[0] == 400


def test_rows_that_are_repeated_are_stored_once(
    broker: RealBroker, channel: Any, name: str
) -> None:
    channel.queue_declare(name, durable=True)
    client = Http(broker)
    path = f"/exchanges/%2F/amq.default/arrow?routing_key={name}&producer={name}"
    for start, stop, known in ((0, 100, 0), (0, 100, 100), (50, 150, 50), (150, 160, 0)):
        body = ipc(pa.table({"value": [b"%d" % n for n in range(start, stop)]}))
        status, said = client.call(f"{path}&seq={start}", "POST", body)
        rows = stop - start
        assert (status, said) == (
            200,
            {"rows": rows, "confirmed": rows, "stored": rows - known, "known": known},
        )
    got = [channel.basic_get(name, auto_ack=True) for _ in range(161)]
    assert [body for _, _, body in got[:160]] == [b"%d" % n for n in range(160)]
    assert got[160] == (None, None, None)
    assert got[7][1].headers == {"x-producer-id": name, "x-sequence": 7}


def test_other_rows_under_the_numbers_of_a_producer_are_a_conflict(
    broker: RealBroker, channel: Any, name: str
) -> None:
    """In a queue and in the shards of a stream exchange; what was stored stays as it was."""
    channel.queue_declare(name, durable=True)
    arguments = {"x-shards": 2, "x-shard-arguments": {"x-queue-type": "stream"}}
    channel.exchange_declare(f"{name}-x", "x-modulus-hash", durable=True, arguments=arguments)
    client = Http(broker)

    def publish(exchange: str, word: str) -> tuple[int, Any]:
        keys = [name] * 100 if exchange == "amq.default" else [f"key-{n}" for n in range(100)]
        body = ipc(pa.table({"value": [f"{word}-{n}" for n in range(100)], "routing_key": keys}))
        return client.call(f"/exchanges/%2F/{exchange}/arrow?producer={name}&seq=0", "POST", body)

    for exchange in ("amq.default", f"{name}-x"):
        assert publish(exchange, "one") == (
            200,
            {"rows": 100, "confirmed": 100, "stored": 100, "known": 0},
        )
        assert publish(exchange, "one") == (
            200,
            {"rows": 100, "confirmed": 100, "stored": 0, "known": 100},
        )
        status, said = publish(exchange, "two")
        assert (status, said["error"], said["stored"], said["known"]) == (409, "conflict", 0, 100)
        assert said["reason"] == f"producer '{name}' sent other rows before, by the same numbers"
        assert 8 <= said["altered"] <= 16 and said["sample"][0]["row"] == 0
    assert channel.basic_get(name, auto_ack=True)[2] == b"one-0"


@pytest.mark.minutes
def test_where_a_shard_ended_is_told_when_it_is_gone(
    broker: RealBroker, channel: Any, name: str
) -> None:
    arguments = {"x-shards": 1, "x-shard-arguments": {"x-queue-type": "stream"}}
    channel.exchange_declare(name, "x-consistent-hash", durable=True, arguments=arguments)
    client = Http(broker)

    def shards(count: int) -> None:
        assert client.call(f"/exchanges/%2F/{name}/shards", "PUT", {"number": count})[0] < 300

    def looked() -> Any:
        return client.call(f"/streams/%2F/{name}")[1]

    shards(2)
    wait_until(lambda: len(looked()["shards"]) == 2, "the second shard", 60)
    body = ipc(pa.table({"value": ["x"] * 200, "routing_key": [f"k{n}" for n in range(200)]}))
    assert client.call(f"/exchanges/%2F/{name}/arrow", "POST", body)[0] == 200
    wait_until(lambda: sum(s["next"] for s in looked()["shards"]) == 200, "what was published", 60)
    goes = looked()["shards"][1]
    assert goes["next"] > 0
    shards(1)
    channel.queue_purge(goes["queue"])
    wait_until(lambda: len(looked()["shards"]) == 1, "the shard to go", 120)
    assert looked()["ended"] == [{"shard": 1, "id": goes["id"], "next": goes["next"]}]


def old_client(broker: RealBroker, path: str, secure: bool) -> bytes:
    """Return the body that an HTTP/1.0 client gets, or with TLS an HTTP/1.1 client."""
    login = base64.b64encode(b"guest:guest").decode()
    if secure:
        port = int(broker.addresses["https"].rpartition(":")[2])
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
        connection.request("GET", path, headers={"Authorization": f"Basic {login}"})
        return connection.getresponse().read()
    with socket.create_connection(("127.0.0.1", int(broker.http.rpartition(":")[2])), 60) as plain:
        plain.sendall(f"GET {path} HTTP/1.0\r\nAuthorization: Basic {login}\r\n\r\n".encode())
        with plain.makefile("rb") as file:
            head, _, body = file.read().partition(b"\r\n\r\n")
    assert b"200" in head.split(b"\r\n")[0] and b"chunked" not in head.lower()
    return body


@pytest.mark.parametrize("secure", [False, True], ids=["HTTP/1.0", "HTTPS"])
def test_who_cannot_be_written_to_directly_gets_the_same_bytes(
    broker: RealBroker, channel: Any, name: str, secure: bool
) -> None:
    rows = filled(broker, channel, name, 6000)
    path = arrow(name)
    direct = Http(broker).get(path)
    assert pa.ipc.open_stream(direct).read_all().num_rows == rows
    assert old_client(broker, f"/api{path}", secure) == direct


# -- kills -----------------------------------------------------------------------------------------


def filled(broker: RealBroker, channel: Any, name: str, rows: int = 40_000) -> int:
    """Fill a stream that takes seconds to be read; return how many rows it has."""
    channel.queue_declare(name, durable=True, arguments=STREAM)
    table = pa.table({"value": [b"%06d" % n + bytes(494) for n in range(rows)]})
    status, said = Http(broker).call(
        f"/exchanges/%2F/amq.default/arrow?routing_key={name}", "POST", ipc(table)
    )
    assert status == 200, said
    return rows


class Resuming:
    """Reads a stream to its end as the connector does.

    It goes on at the last offset + 1 when an answer is cut off.
    """

    def __init__(self, broker: RealBroker, name: str, stop: int) -> None:
        self.broker, self.name, self.stop = broker, name, stop
        self.offsets: list[int] = []
        self.values: list[bytes] = []
        self.cuts = 0

    def read(self, kill: Any) -> None:
        while len(self.offsets) < self.stop:
            try:
                self._read_once(kill if self.cuts == 0 else None)
            except (http.client.IncompleteRead, OSError, pa.ArrowInvalid):
                self.cuts += 1
                time.sleep(0.2)

    def _read_once(self, kill: Any) -> None:
        answer = Http(self.broker).open(
            arrow(self.name, from_=len(self.offsets), to=self.stop, columns="offset,value")
        )
        if answer.status != 200:
            assert answer.status == 503, answer.read()
            raise OSError("not there yet")
        for batch in pa.ipc.open_stream(pa.PythonFile(answer, mode="r")):
            self.offsets += batch.column("offset").to_pylist()
            self.values += [value[:6] for value in batch.column("value").to_pylist()]
            if kill is not None:
                kill()
                kill = None


@pytest.mark.parametrize("victim", ["reader", "shard"])
def test_a_scan_resumes_where_it_was_whatever_is_killed(
    broker: RealBroker, channel: Any, name: str, victim: str
) -> None:
    stop = filled(broker, channel, name)
    index = int(Http(broker).get(f"/queues/%2F/{name}")["shard"]) if victim == "shard" else 0
    Http(broker).table(name, to=1)  # the reader lives from the first call on
    old = broker.pid(victim, index)
    reading = Resuming(broker, name, stop)
    reading.read(lambda: os.kill(old, signal.SIGKILL))
    assert reading.offsets == list(range(stop))
    assert reading.values == [b"%06d" % n for n in range(stop)]
    # The files are there without the shard: only the reader's death is noticed.
    assert reading.cuts > 0 if victim == "reader" else reading.cuts == 0
    wait_until(lambda: broker.is_replaced(victim, index, old), f"the {victim}", SETTLE_S)
    path = f"/streams/%2F/{name}"
    wait_until(
        lambda: Http(broker).call(path)[1]["shards"][0]["next"] == stop, "the stream", SETTLE_S
    )


def test_the_broker_goes_on_without_a_reader(broker: RealBroker, channel: Any, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments=STREAM)
    assert Http(broker).table(name).num_rows == 0
    old = broker.pid("reader")
    os.kill(old, signal.SIGSTOP)
    try:
        channel.basic_publish("", name, b"x")
        assert Http(broker).get(f"/streams/%2F/{name}")["shards"][0]["next"] == 1
    finally:
        os.kill(old, signal.SIGKILL)
    assert Http(broker).table(name).num_rows == 1  # it starts while the call waits


def kept_positions(broker: RealBroker, group: bytes) -> int:
    """How many streams have one of that name on disk; where a kill finds it."""
    return sum(
        group in file.read_bytes() for file in broker.data_dir.glob("shard-*/*/stream.*/positions")
    )


@pytest.mark.row("D15", "D14")
def test_how_far_a_group_has_come_is_shown_and_outlives_its_shard(
    broker: RealBroker, channel: Any
) -> None:
    channel.exchange_declare("grouped", "x-modulus-hash", durable=True, arguments=TWO_SHARDS)
    for number in range(20):
        channel.basic_publish("grouped", f"key.{number}", b"x")
    http = Http(broker)
    shards = http.get("/streams/%2F/grouped")["shards"]
    total = sum(shard["next"] for shard in shards)
    assert total == 20
    path = "/streams/%2F/grouped/groups/spark"
    said = {
        str(shard["shard"]): {"next": shard["next"] // 2, "id": shard["id"]} for shard in shards
    }
    assert http.call(path, "PUT", {"shards": said})[0] == 204
    expected = [
        {"shard": s["shard"], "next": s["next"] // 2, "lag": s["next"] - s["next"] // 2}
        for s in shards
    ]
    group = {"name": "spark", "lag": sum(row["lag"] for row in expected), "shards": expected}

    def shown() -> Any:
        status, found = http.call(path)
        return found if status == 200 else None

    wait_until(lambda: shown() == group, "the group", SETTLE_S)
    wait_until(
        lambda: kept_positions(broker, b"spark") == 2, "its positions in both files", SETTLE_S
    )
    for number in range(2):
        broker.kill("shard", number)
    wait_until(lambda: shown() == group, "the group again", SETTLE_S)
    shardctl = ["--url", f"http://{broker.http}"]
    listed = CliRunner().invoke(
        app, ["list_stream_tracking", "grouped", *shardctl, "--formatter", "json"]
    )
    assert json.loads(listed.stdout) == [{"reference": "spark", **row} for row in expected]
    metrics = urllib.request.urlopen(
        f"http://{broker.metrics}/metrics/detailed?family=stream_group_metrics"
    ).read()
    lags = [
        float(line.split()[-1]) for line in metrics.decode().splitlines() if 'group="spark"' in line
    ]
    assert sum(lags) == group["lag"]
    assert CliRunner().invoke(app, ["reset_offset", "grouped", "spark", *shardctl]).exit_code == 0
    wait_until(lambda: shown() is None, "nobody to know it", SETTLE_S)
