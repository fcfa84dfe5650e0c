"""A stream moves to another shard with its offsets, while clients publish and read on."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pika

from tests.moving.test_moves import MOVED_S, ask, begin, has_moved, move
from tests.support.real_broker import RealBroker, wait_until

STREAM = {"x-queue-type": "stream"}
OFFSET = "x-stream-offset"


class Reader:
    """A consumer of a stream in a thread of its own: what it got, and under which tag."""

    def __init__(self, broker: RealBroker, name: str, tag: str, **arguments: Any) -> None:
        self.got: list[tuple[int, bytes, bool, str]] = []
        self.error: BaseException | None = None
        self._ends = threading.Event()
        self._start = broker, name, tag, arguments
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        broker, name, tag, arguments = self._start
        try:
            with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
                channel = connection.channel()
                channel.basic_qos(prefetch_count=50)
                channel.basic_consume(name, self._take, consumer_tag=tag, arguments=arguments)
                while not self._ends.is_set():
                    connection.process_data_events(0.02)
        except BaseException as error:
            self.error = error

    def _take(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        offset = properties.headers[OFFSET]
        self.got.append((offset, body, method.redelivered, method.consumer_tag))
        channel.basic_ack(method.delivery_tag)

    def end(self) -> None:
        self._ends.set()
        self._thread.join()
        if self.error is not None:
            raise self.error


def published(broker: RealBroker, name: str, stop: threading.Event, waits: list[float]) -> int:
    """Publish numbers until told to stop; return how many were confirmed, and note the waits."""
    count = 0
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        while not stop.is_set():
            began = time.monotonic()
            channel.basic_publish("", name, b"%d" % count)
            waits.append(time.monotonic() - began)
            count += 1
    return count


def all_of(broker: RealBroker, name: str, count: int, **arguments: Any) -> list[tuple[int, bytes]]:
    reader = Reader(broker, name, "again", **{OFFSET: 0, **arguments})
    wait_until(lambda: len(reader.got) >= count, f"{count} messages", MOVED_S)
    reader.end()
    return [(offset, body) for offset, body, _, _ in reader.got]


def rows(broker: RealBroker, name: str, start: int, stop: int) -> tuple[str, int]:
    """Ask for rows of a stream; return the id by which readers know it, and the status."""
    url = f"http://{broker.http}/api/streams/%2F/{name}"
    headers = {"Authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
        known = json.loads(answer.read())["id"]
    path = f"{url}/0/arrow?from={start}&to={stop}&id={known}"
    try:
        with urllib.request.urlopen(urllib.request.Request(path, headers=headers)) as answer:
            assert answer.read()
            return known, answer.status
    except urllib.error.HTTPError as error:
        return known, error.code


def test_clients_go_on_while_a_stream_moves_to_and_fro(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    """Each offset has one message, and a reader gets them in order, the first time unmarked."""
    channel = connection.channel()
    channel.queue_declare(name, durable=True, arguments=STREAM)
    stop, waits, counts = threading.Event(), list[float](), list[int]()
    publisher = threading.Thread(
        target=lambda: counts.append(published(broker, name, stop, waits)), daemon=True
    )
    publisher.start()
    named = Reader(broker, name, "named")
    plain = Reader(broker, name, "plain", **{OFFSET: "first"})
    try:
        for _ in range(3):
            wait_until(lambda: len(plain.got) > 50, "some messages")
            move(broker, name)
    finally:
        stop.set()
        publisher.join()
    (count,) = counts
    wait_until(lambda: bool(plain.got) and plain.got[-1][0] == count - 1, "the last message")
    for reader in (named, plain):
        reader.end()
        fresh = [(offset, body) for offset, body, again, _ in reader.got if not again]
        assert fresh == [(at, b"%d" % at) for at in range(fresh[0][0], count)]
        assert {tag for _, _, _, tag in reader.got} == {(reader is named and "named") or "plain"}
    assert all_of(broker, name, count) == [(at, b"%d" % at) for at in range(count)]
    assert max(waits) < 2.0, "publishers wait for the last messages alone"


def test_what_a_client_holds_comes_again_marked_at_the_new_place(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.queue_declare(name, durable=True, arguments=STREAM)
    for number in range(10):
        channel.basic_publish("", name, b"%d" % number)
    channel.basic_qos(prefetch_count=5)
    got: list[tuple[int, int, bool]] = []

    def take(_: Any, method: Any, properties: Any, body: bytes) -> None:
        got.append((method.delivery_tag, int(body), method.redelivered))

    def have(count: int) -> bool:
        connection.process_data_events(0.02)
        return len(got) == count

    channel.basic_consume(name, take, consumer_tag="mine", arguments={OFFSET: "first"})
    wait_until(lambda: have(5), "as many as the client may hold")
    channel.basic_ack(got[1][0], multiple=True)
    wait_until(lambda: have(7), "two more")
    move(broker, name)
    wait_until(lambda: have(12), "what the client holds")
    assert [(number, again) for _, number, again in got[7:]] == [(n, True) for n in range(2, 7)]
    channel.basic_ack(got[6][0], multiple=True)  # late acks settle nothing at the new place
    assert have(12)
    channel.basic_ack(got[11][0], multiple=True)
    wait_until(lambda: have(15), "the rest")
    assert [(number, again) for _, number, again in got[12:]] == [(n, False) for n in range(7, 10)]


def test_what_a_stream_knows_comes_along(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    """Offsets, timestamps, positions of names, sequences of producers."""
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare(
        name,
        durable=True,
        arguments={
            **STREAM, "x-stream-max-segment-size-bytes": 8192, "x-max-length-bytes": 50_000,
        },
    )  # fmt: skip

    def publish(number: int, producer: str = "p") -> None:
        headers = {"x-producer-id": producer, "x-sequence": number}
        properties = pika.BasicProperties(headers=headers, timestamp=number)
        channel.basic_publish("", name, b"%d" % number * 100, properties)

    publish(7, "whose message is gone")
    for number in range(1, 500):
        publish(number)
    reader = Reader(
        broker, name, "named", **{OFFSET: "first", "x-stream-automatic-offset-tracking": True}
    )
    wait_until(lambda: bool(reader.got) and reader.got[-1][0] == 499, "all messages")
    reader.end()
    before = [(offset, body) for offset, body, _, _ in reader.got]
    assert before[0][0] > 0, "retention has removed some"
    known = rows(broker, name, 0, 2)
    move(broker, name)
    assert rows(broker, name, 0, 2)[0] == known[0], "readers know the stream again"
    assert rows(broker, name, 490, 500)[1] == 200
    after = all_of(broker, name, len(before))
    assert after[-1] == before[-1] and after == before[-len(after) :]
    publish(7, "whose message is gone")
    for number in (100, 498, 499, 500):  # the first three are there, or were
        publish(number)
    more = Reader(broker, name, "named")
    wait_until(lambda: len(more.got) == 1, "the one new message")
    more.end()
    assert more.got[0][:2] == (500, b"500" * 100)


def test_the_move_of_a_stream_is_called_off_while_it_is_copied(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.queue_declare(name, durable=True, arguments=STREAM)
    body = bytes(1 << 20)
    for _ in range(100):
        channel.basic_publish("", name, body)
    wait_until(lambda: ask(broker, "GET", name).get("messages") == 100, "all messages", MOVED_S)
    shard = ask(broker, "GET", name)["shard"]
    begin(broker, name)
    ask(broker, "DELETE", f"{name}/relocation")
    wait_until(lambda: "moving" not in ask(broker, "GET", name), "the end of the move", MOVED_S)
    assert ask(broker, "GET", name)["shard"] == shard
    assert [offset for offset, _ in all_of(broker, name, 100)] == list(range(100))
    assert not has_moved(broker, name, 1 - shard)
