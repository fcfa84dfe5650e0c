"""shardctl publish, get, tail, move_messages, bind and create_queue, against a real broker."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import pika
import pytest
import typer
from typer.testing import CliRunner, Result

from shardmq.supervisor import amqp_client
from shardmq.supervisor.amqp_client import Message
from shardmq.supervisor.cli import messages
from shardmq.supervisor.cli.api import fail
from shardmq.supervisor.cli.app import app
from shardmq.supervisor.cli.channel import Channel
from tests.support.brokers import Api
from tests.support.real_broker import SOURCE, RealBroker

Ctl = Callable[..., Result]


def command_line(broker: RealBroker, *words: str) -> list[str]:
    at = ["--data-dir", str(broker.data_dir)]
    return [sys.executable, "-m", "shardmq.supervisor.cli", *words, *at]


@pytest.fixture
def ctl(broker: RealBroker) -> Ctl:
    def run(*words: str, piped: bytes | None = None, status: int = 0) -> Result:
        found = CliRunner().invoke(app, [*words, "--data-dir", str(broker.data_dir)], input=piped)
        assert found.exit_code == status, found.output
        return found

    return run


@pytest.fixture
def queue(ctl: Ctl, name: str) -> str:
    ctl("create_queue", name)
    return name


def bodies(ctl: Ctl, queue: str) -> list[str]:
    lines = ctl("get", queue, "--count", "100", "--json").stdout.splitlines()
    return [json.loads(line)["payload"] for line in lines]


@pytest.mark.parametrize("body", [b"", b"\0\xff\n\r raw", "kaffee ü ☕".encode(), b"x" * 3_000_000])
def test_a_body_from_a_pipe_comes_out_to_the_byte(ctl: Ctl, queue: str, body: bytes) -> None:
    assert ctl("publish", queue, piped=body).output == ""
    assert ctl("get", queue).stdout_bytes == body


def test_a_body_larger_than_any_frame_or_window_arrives(ctl: Ctl, queue: str) -> None:
    body = os.urandom(10_000_000)
    ctl("publish", queue, "--persistent", piped=body)
    assert ctl("get", queue, "--ack").stdout_bytes == body


def test_properties_and_headers_arrive(
    ctl: Ctl, queue: str, connection: pika.BlockingConnection
) -> None:
    ctl("publish", queue, "text", "--persistent", "-H", "n=7", "--header", "t=a b",
        "--properties", '{"type": "T", "priority": 3, "timestamp": 1700000000, '
        '"headers": {"x": {"y": [1, true]}}}')  # fmt: skip
    _, got, body = connection.channel().basic_get(queue)
    assert body == b"text"
    assert (got.type, got.priority, got.delivery_mode, got.timestamp) == ("T", 3, 2, 1700000000)
    assert got.headers == {"n": 7, "t": "a b", "x": {"y": [1, True]}}


def test_a_message_without_a_queue_is_said_and_is_status_1(ctl: Ctl, name: str) -> None:
    said = ctl("publish", name, "x", status=1).stderr
    assert said == f"shardctl: the message was not routed: no queue '{name}' in vhost '/'\n"
    said = ctl("publish", "-e", "amq.topic", "-k", name, "x", "--count", "300", status=1).stderr
    assert said.startswith("shardctl: 300 messages were not routed: exchange 'amq.topic'")


def test_a_full_queue_refuses_and_is_status_70(ctl: Ctl, name: str) -> None:
    ctl("create_queue", name, "--max-length", "2", "--reject-on-overflow")
    ctl("publish", name, "x", "--count", "2")
    assert "the message was refused" in ctl("publish", name, "x", status=70).stderr
    assert "9 messages were refused" in ctl("publish", name, "x", "--count", "9", status=70).stderr
    assert len(bodies(ctl, name)) == 2


def test_get_leaves_messages_in_their_order_unless_they_are_taken(ctl: Ctl, queue: str) -> None:
    for body in ("a", "b", "c"):
        ctl("publish", queue, body)
    assert ctl("get", queue).stdout == "a"
    assert ctl("get", queue, "--count", "9").stdout == "a\nb\nc\n"
    assert ctl("get", queue, "--count", "2", "--ack").stdout == "a\nb\n"
    assert bodies(ctl, queue) == ["c"]
    row = json.loads(ctl("get", queue, "--json", "--ack").stdout)
    assert (row["payload"], row["payload_encoding"], row["routing_key"]) == ("c", "string", queue)
    said = ctl("get", queue, status=1).stderr
    assert said == f"shardctl: queue '{queue}' in vhost '/' is empty\n"


def test_get_of_many_fetches_each_message_once(ctl: Ctl, queue: str) -> None:
    ctl("publish", queue, "x" * 5000, "--count", "700")
    assert len(ctl("get", queue, "--count", "650", "--ack").stdout.splitlines()) == 650
    assert len(ctl("get", queue, "--count", "1000", "--ack").stdout.splitlines()) == 50


def test_json_of_a_body_that_is_no_text_is_base64(ctl: Ctl, queue: str) -> None:
    ctl("publish", queue, piped=b"\xff\0")
    row = json.loads(ctl("get", queue, "--json").stdout)
    assert (row["payload"], row["payload_encoding"], row["payload_bytes"]) == ("/wA=", "base64", 2)


@pytest.fixture
def stream(ctl: Ctl, name: str) -> str:
    more = ["--durable", "--queue-type", "stream", "--arguments", '{"x-max-age": "1D"}']
    ctl("create_queue", name, *more)
    for body in ("a", "b", "c"):
        ctl("publish", name, body)
    return name


def test_a_queue_is_created_with_its_type_and_arguments(ctl: Ctl, stream: str, api: Api) -> None:
    made = api(f"/api/queues/%2F/{stream}")
    assert (made["type"], made["durable"], made["arguments"]["x-max-age"]) == ("stream", True, "1D")


@pytest.mark.parametrize(
    ("start", "shown"),
    [("first", "a\nb\nc\n"), ("1", "b\nc\n"), ("1h", "a\nb\nc\n"), ("2020-01-01", "a\nb\nc\n")],
)
def test_tail_begins_where_it_is_told(ctl: Ctl, stream: str, start: str, shown: str) -> None:
    count = str(shown.count("\n"))
    assert ctl("tail", stream, "--from", start, "--count", count).stdout == shown


def test_tail_follows_until_ctrl_c_and_ends_well(ctl: Ctl, broker: RealBroker, stream: str) -> None:
    # Tests that run in the background of a shell ignore SIGINT, and their children would, too.
    command = ["env", "--default-signal=INT"]
    command += command_line(broker, "tail", stream, "--from", "2", "--json")
    with subprocess.Popen(command, cwd=SOURCE, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert json.loads(following.stdout.readline())["payload"] == "c"
        ctl("publish", stream, "later")
        row = json.loads(following.stdout.readline())
        assert row["payload"] == "later" and row["properties"]["headers"]["x-stream-offset"] == 3
        following.send_signal(signal.SIGINT)
        assert following.wait(60) == 0


def test_tail_ends_when_nobody_reads_it(broker: RealBroker, stream: str) -> None:
    command = command_line(broker, "tail", stream, "--from", "first")
    with subprocess.Popen(
        command, cwd=SOURCE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as following:
        assert following.stdout is not None and following.stderr is not None
        assert following.stdout.readline() == b"a\n"
        following.stdout.close()
        assert following.wait(60) == 1
        assert following.stderr.read() == b""


def test_tail_of_what_is_no_stream_takes_nothing(ctl: Ctl, queue: str) -> None:
    ctl("publish", queue, "x")
    assert f"stream '{queue}' in vhost '/' does not exist" in ctl("tail", queue, status=65).stderr
    assert bodies(ctl, queue) == ["x"]


def test_messages_move_in_order_with_their_properties(ctl: Ctl, queue: str) -> None:
    other = f"{queue}-other"
    ctl("create_queue", other)
    for at in range(5):
        ctl("publish", queue, f"m{at}", "-H", f"at={at}")
    assert ctl("move_messages", queue, other, "--count", "2").stdout == "2 messages moved\n"
    assert (bodies(ctl, queue), bodies(ctl, other)) == (["m2", "m3", "m4"], ["m0", "m1"])
    assert ctl("move_messages", queue, other).stdout == "3 messages moved\n"
    assert ctl("move_messages", queue, other).stdout == "0 messages moved\n"
    rows = ctl("get", other, "--count", "9", "--json").stdout.splitlines()
    assert [json.loads(row)["properties"]["headers"]["at"] for row in rows] == [0, 1, 2, 3, 4]


def test_what_the_other_queue_does_not_take_stays(ctl: Ctl, queue: str) -> None:
    other = f"{queue}-full"
    ctl("create_queue", other, "--max-length", "30", "--reject-on-overflow")
    ctl("publish", queue, "x", "--count", "100")
    found = ctl("move_messages", queue, other, status=1)
    assert found.stdout == "30 messages moved\n"
    assert f"the others stay: queue '{other}' in vhost '/' takes no more" in found.stderr
    assert len(bodies(ctl, queue)) == 70
    assert len(bodies(ctl, other)) == 30


def test_messages_that_would_be_taken_for_repeated_ones_do_not_move(ctl: Ctl, queue: str) -> None:
    other, careful = f"{queue}-other", f"{queue}-careful"
    ctl("create_queue", other)
    ctl("create_queue", careful, "--arguments", '{"x-message-deduplication": true}')
    ctl("publish", queue, "x", "-H", "x-producer-id=p", "-H", "x-sequence=1")
    assert "might take a message" in ctl("move_messages", queue, other, status=1).stderr
    assert "x-message-deduplication" in ctl("move_messages", queue, careful, status=1).stderr
    assert bodies(ctl, queue) == ["x"]


def test_binds_route_until_they_are_removed(ctl: Ctl, queue: str) -> None:
    key = ["-k", f"{queue}.#"]
    assert ctl("bind", "amq.topic", queue, *key).output == ""
    ctl("publish", "-e", "amq.topic", "-k", f"{queue}.1", "routed")
    assert bodies(ctl, queue) == ["routed"]
    assert "no such binding" in ctl("unbind", "amq.topic", queue, "-k", "other", status=65).stderr
    assert ctl("unbind", "amq.topic", queue, *key).output == ""
    ctl("publish", "-e", "amq.topic", "-k", f"{queue}.1", "lost", status=1)


def test_exchanges_and_arguments_can_be_bound(ctl: Ctl, queue: str, api: Api) -> None:
    ctl("create_exchange", "headers", f"{queue}-x")
    to_exchange = ["bind", "amq.fanout", f"{queue}-x", "--destination-type", "exchange"]
    ctl(*to_exchange)
    match = ["--arguments", '{"x-match": "all", "n": 1}']
    ctl("bind", f"{queue}-x", queue, *match)
    ctl("publish", "--exchange", f"{queue}-x", "matching", "--header", "n=1")
    assert bodies(ctl, queue) == ["matching"]
    ctl("unbind", f"{queue}-x", queue, status=65)  # with other arguments it is another binding
    ctl("unbind", f"{queue}-x", queue, *match)
    ctl("unbind", *to_exchange[1:])
    assert api(f"/api/exchanges/%2F/{queue}-x/bindings/destination") == []


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        (["publish"], 64, "where to: QUEUE, or --exchange"),
        (["publish", "q", "x", "--exchange", "e"], 64, "QUEUE or --exchange, not both"),
        (["publish", "q", "x", "-k", "k"], 64, "--routing-key needs --exchange"),
        (["publish", "q", "x", "--properties", "{"], 64, "not JSON"),
        (["publish", "q", "x", "--properties", '{"colour": 1}'], 64, "no property colour"),
        (["publish", "q", "x", "--properties", '{"priority": 300}'], 64, "--properties: "),
        (["publish", "q", "x", "--properties", '{"headers": 3}'], 64, "--properties: "),
        (["publish", "q", "x", "--properties", '{"timestamp": "now"}'], 64, "--properties: "),
        (["publish", "q", "x", "--properties", '{"headers": [1]}', "-H", "a=1"], 64, "headers is"),
        (["publish", "q", "x", "-H", "novalue"], 64, "not NAME=VALUE: novalue"),
        (["publish", "q" * 256, "x"], 64, "longer than 255 bytes"),
        (["publish", "-e", "no-such-exchange", "x"], 65, "no exchange 'no-such-exchange'"),
        (["publish", "-p", "nowhere", "q", "x"], 65, "vhost 'nowhere' does not exist"),
        (["publish", "q", "x", "--user", "guest", "--password", "wrong"], 70, "not accepted"),
        (["get", "no-such-queue"], 65, "no queue 'no-such-queue' in vhost '/'"),
        (["get", "q", "--count", "0"], 64, "--count"),
        (["tail", "s", "--from", "yesterday"], 64, "--from: first, last, next"),
        (["move_messages", "a", "a"], 64, "to itself"),
        (["move_messages", "a", "no-such-queue"], 65, "queue 'no-such-queue'"),
        (["bind", "no-such-exchange", "q"], 65, "does not exist"),
        (["bind", "amq.direct", "q", "--arguments", "[]"], 64, "not a JSON object"),
        (["create_queue", "q", "--arguments", "x"], 64, "not JSON"),
    ],
)
def test_bad_input_is_one_clear_line(ctl: Ctl, command: list[str], status: int, says: str) -> None:
    said = ctl(*command, status=status).stderr
    assert says in said
    if status != 64 or "Usage" not in said:
        assert said.count("\n") == 1


def test_a_login_over_tcp_may_do_what_its_user_may(ctl: Ctl, queue: str) -> None:
    login = ["--user", "guest", "--password", "guest"]
    ctl("publish", queue, "by tcp", *login)
    assert ctl("get", queue, "--ack", *login).stdout == "by tcp"


def test_a_message_that_cannot_move_stays_and_nothing_doubles(
    ctl: Ctl, queue: str, connection: pika.BlockingConnection
) -> None:
    """A refused publish would close the channel after others of its batch are in both queues."""
    channel = connection.channel()
    channel.confirm_delivery()
    other, third = f"{queue}-other", f"{queue}-third"
    for name in (other, third):
        ctl("create_queue", name)
    ctl("add_user", queue, "pw")
    ctl("set_permissions", queue, ".*", ".*", ".*")
    for at in range(60):
        channel.basic_publish("", queue, b"%d" % at)
    channel.basic_publish("", queue, b"owned", pika.BasicProperties(user_id="guest"))
    login = ["--user", queue, "--password", "pw"]
    ctl("set_user_tags", queue, "monitoring")
    said = ctl("move_messages", queue, other, *login, status=1)
    assert said.stdout == "60 messages moved\n"
    assert "has the user_id 'guest', and this is user" in said.stderr
    assert ctl("move_messages", queue, other, *login, status=1).stdout == "0 messages moved\n"
    assert len(bodies(ctl, other)) == 60
    assert ctl("move_messages", queue, other).stdout == "1 messages moved\n"
    ctl("delete_user", queue)
    channel.basic_publish("", other, b"cc", pika.BasicProperties(headers={"CC": [third]}))
    assert len(bodies(ctl, third)) == 1
    said = ctl("move_messages", other, queue, status=1)
    assert said.stdout == "61 messages moved\n"
    assert "the next message has the header CC" in said.stderr
    assert bodies(ctl, other) == ["cc"]
    assert len(bodies(ctl, third)) == 1


def test_what_was_confirmed_is_taken_if_a_later_publish_fails(
    ctl: Ctl, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = f"{queue}-other"
    ctl("create_queue", other)
    ctl("publish", queue, "x", "--count", "60")
    publish = messages.Publisher.publish

    def failing(self: messages.Publisher, *given: Any) -> None:
        if self.published == 40:
            self.finish()
            fail("no more", 70)
        publish(self, *given)

    monkeypatch.setattr(messages.Publisher, "publish", failing)
    assert ctl("move_messages", queue, other, status=70).stdout == "40 messages moved\n"
    assert (len(bodies(ctl, queue)), len(bodies(ctl, other))) == (20, 40)


def test_what_is_fetched_at_once_is_bounded_in_bytes() -> None:
    """Small messages before large ones must not make the command ask for many large ones."""
    sizes = [1] * 100 + [1 << 20] * 50 + [1] * 300

    class Fetching:
        def __init__(self) -> None:
            self.client, self.asked, self.answered = self, 0, 0

        def get(self, queue: str) -> Any:
            self.asked += 1
            return self.fetched() if self.asked == 1 else None

        def fetched(self) -> Any:
            self.answered += 1
            left = len(sizes) - self.answered
            body = b"x" * sizes[self.answered - 1]
            return Message(amqp_client.GET_OK, self.answered, False, "", "", left, b"", body)

    batches = [*messages._batches(cast(Channel, Fetching()), "q", 0)]
    assert [len(message.body) for batch in batches for message in batch] == sizes
    largest = max(sum(len(message.body) for message in batch) for batch in batches)
    assert largest <= messages.AT_ONCE_BYTES_MAX + messages.GETS_AHEAD_MAX * max(sizes)
    assert sum(map(len, batches)) / len(batches) > 5


@pytest.mark.parametrize("time", [2**60, 1_700_000_000_000])
def test_a_time_that_no_clock_shows_is_a_number(
    ctl: Ctl, queue: str, connection: pika.BlockingConnection, time: int
) -> None:
    properties = pika.BasicProperties(timestamp=time)
    connection.channel().basic_publish("", queue, b"x", properties)
    row = json.loads(ctl("get", queue, "--json").stdout)
    assert row["properties"]["timestamp"] == time


def test_an_output_that_takes_nothing_is_one_line(broker: RealBroker, ctl: Ctl, queue: str) -> None:
    ctl("publish", queue, "x")
    for words in (["get", queue, "--ack"], ["list_queues"]):
        with open("/dev/full", "wb") as full:
            ended = subprocess.run(
                command_line(broker, *words), cwd=SOURCE, stdout=full, stderr=subprocess.PIPE
            )
        assert ended.returncode == 1
        assert ended.stderr == b"shardctl: [Errno 28] No space left on device\n"
    assert bodies(ctl, queue) == ["x"]


def test_properties_that_are_not_readable_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """AMQP has no encoding for a short string, and a client may send any bytes."""
    unreadable = b"\x04\x00\x01\xff"  # The property correlation_id alone.
    with pytest.raises(typer.Exit):
        messages._row(Message(amqp_client.GET_OK, 1, False, "", "", 0, unreadable, b""))
    assert capsys.readouterr().err.startswith("shardctl: the properties of a message are not")


def test_an_output_that_is_closed_is_no_traceback(broker: RealBroker, queue: str) -> None:
    command = shlex.join(command_line(broker, "list_queues", "--silent"))
    for redirected in (">&-", "| true"):
        ended = subprocess.run(
            ["sh", "-c", f"{command} {redirected}"], cwd=SOURCE, stderr=subprocess.PIPE
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
