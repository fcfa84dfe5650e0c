"""The commands `shardctl migrate`: bad input, passwords, and a move of 20 queues in both orders."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from typer.testing import CliRunner

from shardmq.supervisor.cli import migrate as migrate_command
from shardmq.supervisor.cli import old_broker as old_brokers
from shardmq.supervisor.cli.app import app
from tests.bridges.moving import call, connected
from tests.support.real_broker import RealBroker, wait_until

QUEUES = 20
MESSAGES = 100  # of each queue
PREFETCH = 10


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """Return the broker that applications leave."""
    other = RealBroker(tmp_path_factory.mktemp("old") / "data", shards=1)
    yield other
    other.stop()


# -- where the old broker is -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amqp", "http", "options", "expected"),
    [
        ("amqp://h", "http://h:1", {}, ("amqp://guest:guest@h/v", "guest", "guest", "")),
        ("amqp://h:7/", "http://h:1", {}, ("amqp://guest:guest@h:7/v", "guest", "guest", "")),
        ("amqps://u:p%2F@h/a%2Fb", "https://h:1", {}, ("amqps://u:p%2F@h/v", "u", "p/", "a/b")),
        ("amqp://h?heartbeat=5", "http://u:p@h:1", {},
         ("amqp://u:p@h/v?heartbeat=5", "u", "p", "")),
        ("amqp://a:b@h", "http://u:p@h:1", {}, ("amqp://a:b@h/v", "u", "p", "")),
        ("amqp://u:p@h", "http://h:1", {"password": "x"}, ("amqp://u:x@h/v", "u", "x", "")),
        ("amqp://h", "http://h:1", {"user": "u", "password": "x@"},
         ("amqp://u:x%40@h/v", "u", "x@", "")),
        ("amqp://h", "http://h:1", {"password": "x"}, ("amqp://guest:x@h/v", "guest", "x", "")),
    ],
)  # fmt: skip
def test_the_login_comes_from_uris_and_options(
    amqp: str, http: str, options: dict[str, str], expected: tuple[str, str, str, str]
) -> None:
    given = {"user": "", "password": None, "password_file": None, "timeout_s": 1.0} | options
    found = old_brokers.old_broker(amqp, http, **given)  # type: ignore[arg-type]
    assert (found.uri("v"), found.api.user, found.api.password, found.vhost) == expected
    assert "@" not in found.shown() + found.api.endpoint.url


def run(*words: str, given: str | None = None, **environment: str) -> Any:
    return CliRunner().invoke(app, ["migrate", *words], input=given, env=environment)


@pytest.mark.parametrize(
    ("amqp", "http", "said"),
    [
        ("http://h", "http://h", "the AMQP address of the old broker has the form amqp://HOST"),
        ("amqp://", "http://h", "the AMQP address"),
        ("amqp://h:x", "http://h", "the AMQP address"),
        ("amqp://h", "amqp://h", "the HTTP address of the old broker has the form http://HOST"),
        ("amqp://h", "http://h:99999", "the HTTP address"),
        ("amqp://u:secret@h/a/b", "http://h", "a vhost with a slash is written with %2F"),
        ("amqp://u@h", "http://h", "no password in standard input"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "start", "status", "finish"])
def test_bad_addresses_are_wrong_usage(command: str, amqp: str, http: str, said: str) -> None:
    result = run(command, amqp, http, "--url", "http://127.0.0.1:1", given="")
    assert result.exit_code == 64
    assert said in result.output
    assert "secret" not in result.output


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def test_an_old_broker_that_does_not_answer_is_named(tmp_path: Path) -> None:
    port = free_port()
    result = run("plan", "amqp://h", f"http://u:secret@127.0.0.1:{port}")
    assert result.exit_code == 69
    assert f"no broker reachable at http://127.0.0.1:{port}" in result.output
    assert "rabbitmq-plugins enable rabbitmq_management" in result.output
    assert "secret" not in result.output


# -- with brokers ----------------------------------------------------------------------------------


def test_refusals_of_the_old_broker_are_named(broker: RealBroker, old: RealBroker) -> None:
    call(old, "PUT", "users/reader", {"password": "reader", "tags": "monitoring"})
    here, http = ("--url", f"http://{broker.http}"), f"http://{old.http}"
    amqp = f"amqp://127.0.0.1:{old.port}"
    wrong = run("plan", amqp, http, *here, SHARDMQ_OLD_PASSWORD="wrong")
    assert (wrong.exit_code, "user guest is not accepted" in wrong.output) == (70, True)
    few = run("plan", amqp, http, "--old-user", "reader", *here, given="reader\n")
    assert (few.exit_code, "user reader is not accepted" in few.output) == (70, True)
    no_amqp = run("plan", f"amqp://127.0.0.1:{free_port()}", http, *here)
    assert no_amqp.exit_code in (0, 69)  # without a queue nothing is asked by AMQP
    absent = run("plan", f"{amqp}/nowhere", http, *here)
    assert "nowhere" in absent.output
    assert absent.exit_code == 65


class Ledger:
    """Publishers and consumers of queues, and what the consumers got."""

    def __init__(self) -> None:
        self.published: dict[str, int] = defaultdict(int)
        self.got: dict[str, list[int]] = defaultdict(list)

    def publish(self, broker: RealBroker, queues: list[str], count: int) -> None:
        """Publish so many messages more to each queue, and return when they are confirmed."""
        with connected(broker) as connection:
            channel = connection.channel()
            channel.tx_select()
            for _ in range(count):
                for queue in queues:
                    body = b"%d" % self.published[queue]
                    channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2))
                    self.published[queue] += 1
            channel.tx_commit()

    def consume(self, broker: RealBroker, queues: list[str]) -> pika.BlockingConnection:
        """Begin to consume the queues; the caller processes the events of the connection."""
        connection = connected(broker)
        channel = connection.channel()
        channel.basic_qos(prefetch_count=PREFETCH)

        def got(channel: Any, method: Any, _: Any, body: bytes) -> None:
            self.got[method.consumer_tag].append(int(body))
            channel.basic_ack(method.delivery_tag)

        for queue in queues:
            channel.basic_consume(queue, got, consumer_tag=queue)
        return connection

    def is_whole(self, queues: list[str]) -> bool:
        return all(len(self.got[queue]) >= self.published[queue] for queue in queues)


def drained(connection: pika.BlockingConnection, is_over: Callable[[], bool], what: str) -> None:
    """Process the events of a connection until something is so."""

    def happened() -> bool:
        connection.process_data_events(0.02)
        return is_over()

    wait_until(happened, what)


def test_both_orders_lose_nothing_and_keep_order(
    broker: RealBroker, old: RealBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate_command, "LISTED_S", 0.0)
    names = [f"moving {number:02}" for number in range(QUEUES)]
    publishers_first, consumers_first = names[: QUEUES // 2], names[QUEUES // 2 :]
    for name in names:
        assert call(old, "PUT", f"queues/%2F/{name.replace(' ', '%20')}", {})[0] == 201
    call(old, "PUT", "parameters/federation-upstream/%2F/mine", {"value": {"uri": "amqp://"}})
    ends = (f"amqp://guest:guest@127.0.0.1:{old.port}", f"http://{old.http}")

    def migrate(command: str, *more: str, status: int = 0) -> str:
        here = ("--url", f"http://{broker.http}", "--user", "guest", "--password", "guest")
        result = run(command, *ends, *here, *more)
        assert result.exit_code == status, result.output
        return result.stdout if "--json" in more else result.output

    def hints(queues: list[str]) -> set[str]:
        rows = json.loads(migrate("status", "--json"))
        return {row["hint"] for row in rows if row["name"] in queues}

    def look() -> None:
        migrate("start", "--once")

    ledger = Ledger()
    ledger.publish(old, names, 40)
    planned = json.loads(migrate("plan", "--json"))
    assert planned["messages"] == 40 * QUEUES
    assert ("left", "/: mine (federation-upstream)") in {
        (each["verdict"], each["things"][0]) for each in planned["findings"]
    }
    # Nobody has moved: messages stay, and may be consumed there.
    there = ledger.consume(old, names)
    look()
    assert "is not here" not in migrate("finish", status=1)

    # Publishers first. A consumer that comes early gets nothing while older messages are there.
    ledger.publish(broker, publishers_first, MESSAGES - 40)
    early = ledger.consume(broker, publishers_first)
    look()
    early.process_data_events(0.1)
    early.close()
    drained(there, lambda: all(len(ledger.got[name]) == 40 for name in names), "old ones consumed")
    may_move = {"its consumers may move"}
    drained(there, lambda: hints(publishers_first) == may_move, "the old queues are empty")
    there.close()

    # Consumers first, while their publishers go on at the old broker.
    ledger.publish(old, consumers_first, 30)
    here = ledger.consume(broker, names)
    wait_until(lambda: look() is None and bridges(broker) == QUEUES, "a bridge for each queue")
    look()  # changes nothing
    # A bridge that is otherwise is made anew, and a paused queue that does not move is named.
    shovel = f"parameters/shovel/%2F/migration-{names[0].replace(' ', '%20')}"
    value = call(broker, "GET", shovel)[1]["value"]
    call(broker, "PUT", shovel, {"value": {**value, "src-uri": "amqp://guest:other@127.0.0.1:1"}})
    look()
    assert call(broker, "GET", shovel)[1]["value"] == value
    call(broker, "PUT", "queues/%2F/alone", {})
    call(broker, "PUT", "queues/%2F/alone/pause")
    gone = {**value, "src-queue": "alone", "dest-queue": "alone"}
    call(broker, "PUT", "parameters/shovel/%2F/migration-alone", {"value": gone})
    assert any("not at the old broker" in hint for hint in hints(["alone"]))
    ledger.publish(old, consumers_first, 10)
    drained(here, lambda: hints(consumers_first) == {"its publishers may move"}, "caught up")
    ledger.publish(broker, consumers_first, MESSAGES - 80)
    drained(here, lambda: ledger.is_whole(names), "all consumed")

    # A queue without consumers comes at the end.
    ledger.publish(old, consumers_first, 0)
    # Rates at the old broker are some seconds old: it may still say that messages are published.
    results = []

    def finished() -> bool:
        login = ("--url", f"http://{broker.http}", "--user", "guest", "--password", "guest")
        results.append(run("finish", *ends, *login, "--interval", "0.1"))
        assert results[-1].exit_code == 0 or "are published" in results[-1].output, results
        return bool(results[-1].exit_code == 0)

    drained(here, finished, "finished")
    said = results[-1].output
    assert f"{QUEUES} queues are empty at the old broker" in said
    assert "not taken over: parameter /: mine (federation-upstream)" in said
    assert "paused here, not at the old broker: queue 'alone'" in said
    assert bridges(broker) == 0
    here.close()
    assert {name: ledger.got[name] for name in names} == {
        name: list(range(MESSAGES)) for name in names
    }


def bridges(broker: RealBroker) -> int:
    """Return how many bridges of migrations there are."""
    rows = call(broker, "GET", "shovels")[1]
    return sum(row["name"].startswith("migration-") for row in rows)
