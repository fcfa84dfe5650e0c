"""Test exchanges that keep messages: which of them a new binding gets."""

from __future__ import annotations

import asyncio
import datetime
import time
from typing import Any

import aio_pika
import pika
import pytest
from aio_pika.abc import AbstractIncomingMessage
from pamqp import base
from pamqp.commands import Exchange, Queue

from tests.support.brokers import Api
from tests.support.crash_clients import wait_for
from tests.support.proving import proving
from tests.support.raw_client import RawClient, method
from tests.support.real_broker import RealBroker, wait_until


class Keeper:
    """A pika channel with an exchange that keeps messages."""

    def __init__(
        self,
        broker: RealBroker,
        name: str,
        kind: str = "topic",
        durable: bool = True,
        **arguments: Any,
    ) -> None:
        self.connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        self.channel = self.connection.channel()
        self.channel.confirm_delivery()
        self.name = name
        self.arguments = {key.replace("_", "-"): value for key, value in arguments.items()}
        self.channel.exchange_declare(name, kind, durable=durable, arguments=self.arguments)
        self._queues = 0

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def publish(self, *bodies: str, key: str = "k", headers: dict[str, Any] | None = None) -> None:
        for body in bodies:
            self.channel.basic_publish(
                self.name, key, body.encode(), pika.BasicProperties(headers=headers)
            )

    def bound(self, key: str = "#", **arguments: Any) -> str:
        """Return a new queue, bound with this key and these arguments."""
        self._queues += 1
        queue = f"{self.name}-{self._queues}"
        self.channel.queue_declare(queue)
        wished = {name.replace("_", "-"): value for name, value in arguments.items()}
        self.channel.queue_bind(queue, self.name, key, wished)
        return queue

    def got(self, queue: str) -> list[tuple[str, int | None]]:
        """(body, x-offset) of all there is now."""
        found = []
        while True:
            answer, properties, body = self.channel.basic_get(queue, auto_ack=True)
            if answer is None:
                return found
            found.append((body.decode(), (properties.headers or {}).get("x-offset")))

    def bodies(self, **arguments: Any) -> str:
        return "".join(body for body, _ in self.got(self.bound(**arguments)))


@pytest.mark.row("B1.15")
@pytest.mark.row("B2.1")
@pytest.mark.row("B2.8")
def test_what_was_published_without_a_queue_is_there_for_a_binding_that_asks(
    broker: RealBroker, name: str
) -> None:
    with Keeper(broker, name, x_persist_messages=10) as keeper:
        keeper.publish(*"abc")
        assert keeper.bodies() == "", "a binding that does not ask"
        queue = keeper.bound(x_from=0)
        keeper.publish("d")
        assert keeper.got(queue) == [("a", 0), ("b", 1), ("c", 2), ("d", None)]
        assert keeper.bodies(x_from=0) == "abcd", "also what was consumed before"


@pytest.mark.row("B2.3")
@pytest.mark.row("B2.4")
@pytest.mark.row("B2.5")
@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ({"x_head": 2}, "ab"), ({"x_head": 0}, ""), ({"x_head": 99}, "abcdef"),
        ({"x_head": -2}, "abcd"),
        ({"x_head": -99}, ""),
        ({"x_tail": 2}, "ef"), ({"x_tail": 0}, ""), ({"x_tail": 99}, "abcdef"),
        ({"x_tail": -2}, "cdef"),
        ({"x_tail": -99}, ""),
        ({"x_from": 0}, "abcdef"), ({"x_from": 4}, "ef"), ({"x_from": 6}, "abcdef"),
        ({"x_from": 99}, "abcdef"), ({"x_from_time": 0}, "abcdef"),
        ({"x_from_time": 9999999999}, ""),
        ({"x_from_time": datetime.datetime(2020, 1, 1)}, "abcdef"),
    ],
    ids=str,
)  # fmt: skip
def test_a_binding_says_what_it_wants(
    broker: RealBroker, name: str, wish: dict[str, Any], expected: str
) -> None:
    with Keeper(broker, name, x_persist_messages=100) as keeper:
        keeper.publish(*"abcdef")
        assert keeper.bodies(**wish) == expected


@pytest.mark.row("B2.5")
def test_what_came_at_a_time_or_later(broker: RealBroker, name: str) -> None:
    with Keeper(broker, name, x_persist_messages=100) as keeper:
        keeper.publish(*"abc")
        time.sleep(1.1)
        now = int(time.time())
        keeper.publish(*"def")
        assert keeper.bodies(x_from_time=now) == "def"


@pytest.mark.row("B2.1")
@pytest.mark.parametrize(
    ("kind", "key", "arguments", "expected"),
    [
        ("topic", "a.*", {}, "ab"), ("topic", "#.z", {}, "bd"), ("direct", "a.z", {}, "b"),
        ("fanout", "", {}, "abcd"),
        ("headers", "", {"x_match": "all", "even": True}, "bd"),
        ("x-consistent-hash", "1", {}, "abcd"),
    ],
    ids=lambda value: str(value),
)  # fmt: skip
def test_a_binding_gets_what_it_would_have_got(
    broker: RealBroker, name: str, kind: str, key: str, arguments: dict[str, Any], expected: str
) -> None:
    with Keeper(broker, name, kind, x_persist_messages=100) as keeper:
        for body, routing_key in zip("abcd", ("a.y", "a.z", "b.y", "b.z"), strict=True):
            keeper.publish(body, key=routing_key, headers={"even": body in "bd"})
        assert keeper.bodies(key=key, x_from=0, **arguments) == expected


@pytest.mark.row("B2.1")
def test_only_so_many_are_kept(broker: RealBroker, name: str) -> None:
    with Keeper(broker, name, x_persist_messages=3) as keeper:
        keeper.publish(*"abcdef")
        assert keeper.got(keeper.bound(x_from=0)) == [("d", 3), ("e", 4), ("f", 5)]
        assert keeper.bodies(x_head=1) == "d"
        assert keeper.bodies(x_tail=-1) == "ef"


@pytest.mark.row("B2.1")
def test_only_what_is_young_enough_is_kept(broker: RealBroker, name: str) -> None:
    with Keeper(broker, name, x_persist_ms=2000) as keeper:
        keeper.publish(*"abc")
        time.sleep(2.2)
        keeper.publish(*"def")
        assert keeper.bodies(x_from=0) == "def"


@pytest.mark.broker
@pytest.mark.row("B2.2")
def test_what_is_kept_outlives_a_restart_and_goes_with_its_exchange(tmp_path: Any) -> None:
    broker = RealBroker(tmp_path / "data")
    try:
        with Keeper(broker, "lasting", x_persist_messages=10) as keeper:
            keeper.publish(*"abc")
        with Keeper(broker, "passing", durable=False, x_persist_messages=10) as keeper:
            keeper.publish(*"abc")
        broker.stop()
        broker.start()
        with Keeper(broker, "lasting", x_persist_messages=10) as keeper:
            assert keeper.bodies(x_from=0) == "abc"
            keeper.channel.exchange_delete("lasting")
        for name in ("lasting", "passing"):
            with Keeper(broker, name, x_persist_messages=10) as keeper:
                assert keeper.bodies(x_from=0) == ""
        broker.stop()
    finally:
        broker.clean_up()


@pytest.mark.row("B2.2")
def test_where_it_is_kept_is_nobodys_queue(
    broker: RealBroker, api: Api, client: RawClient, name: str
) -> None:
    with Keeper(broker, name, x_persist_messages=10) as keeper:
        keeper.publish("a")
        hidden = f"amq.persistent.{name}"
        assert hidden not in [row["name"] for row in api("/api/queues")]
        assert hidden not in [row["name"] for row in api("/api/definitions")["queues"]]
        client.ask(1, Queue.Delete(queue=hidden), Queue.DeleteOk)
        client.send(method(2, Queue.Declare(queue=hidden, passive=True)))
        client.expect_channel_close(2, 404, f"NOT_FOUND - no queue '{hidden}' in vhost '/'")
        assert keeper.bodies(x_from=0) == "a"


REFUSALS: list[tuple[str, base.Frame, int, str]] = [
    ("B2.6", Exchange.Bind(source="NAME", destination="amq.fanout", routing_key="k"), 403,
     "ACCESS_REFUSED - Not allowed to bind persistent exchange to exchange"),
    ("B2.1", Exchange.Declare(exchange="new-NAME", arguments={"x-persist-messages": 0}), 406,
     "PRECONDITION_FAILED - invalid arg 'x-persist-messages': must be a positive integer"),
    ("B2.1", Exchange.Declare(exchange="new-NAME", arguments={"x-persist-ms": "1"}), 406,
     "PRECONDITION_FAILED - invalid arg 'x-persist-ms': must be a positive integer"),
    ("B2.1", Exchange.Declare(exchange="NAME", exchange_type="topic", durable=True,
                              arguments={"x-persist-messages": 5}), 406,
     "PRECONDITION_FAILED - inequivalent arg 'x-persist-messages' for exchange 'NAME' in vhost "
     "'/'"),
    ("B2.3", Queue.Bind(queue="NAME", exchange="NAME", arguments={"x-head": "2"}), 406,
     "PRECONDITION_FAILED - invalid arg 'x-head': must be an integer"),
    ("B2.4", Queue.Bind(queue="NAME", exchange="NAME", arguments={"x-tail": True}), 406,
     "PRECONDITION_FAILED - invalid arg 'x-tail': must be an integer"),
    ("B2.5", Queue.Bind(queue="NAME", exchange="NAME", arguments={"x-from": -1}), 406,
     "PRECONDITION_FAILED - invalid arg 'x-from': must not be negative"),
    ("B2.5", Queue.Bind(queue="NAME", exchange="NAME", arguments={"x-from": 1, "x-head": 1}), 406,
     "PRECONDITION_FAILED - only one of x-head, x-tail, x-from, x-from-time can be asked for"),
    ("B1.11", Exchange.Declare(exchange="new-NAME", exchange_type="x-recent-history",
                               arguments={"x-recent-history-length": 0}), 406,
     "PRECONDITION_FAILED - Invalid argument 0, 'x-recent-history-length' must be a positive "
     "integer"),
    ("B1.11", Exchange.Declare(exchange="new-NAME", exchange_type="x-recent-history",
                               arguments={"x-recent-history-length": "a"}), 406,
     "PRECONDITION_FAILED - Invalid argument <<\"a\">>, 'x-recent-history-length' must be a "
     "positive integer"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "code", "text"),
    [proving(case[0], str(i), *case[1:]) for i, case in enumerate(REFUSALS)],
)
def test_what_cannot_be_is_refused(
    broker: RealBroker, client: RawClient, name: str, what: base.Frame, code: int, text: str
) -> None:
    with Keeper(broker, name, x_persist_messages=10) as keeper:
        keeper.channel.queue_declare(name)
        for field in what.__slots__:
            if isinstance(value := getattr(what, field), str):
                setattr(what, field, value.replace("NAME", name))
        client.send(method(2, what))
        client.expect_channel_close(2, code, text.replace("NAME", name))


@pytest.mark.row("B2.1")
def test_a_message_that_is_only_kept_is_returned_and_goes_to_the_alternate(
    broker: RealBroker, name: str
) -> None:
    with Keeper(broker, name, x_persist_messages=10) as keeper:
        with pytest.raises(pika.exceptions.UnroutableError):
            keeper.channel.basic_publish(name, "k", b"a", mandatory=True)
        assert keeper.bodies(x_from=0) == "a"
        alternate = f"alternate-{name}"
        keeper.channel.queue_declare(alternate)
        keeper.channel.exchange_declare(alternate, "fanout")
        keeper.channel.queue_bind(alternate, alternate)
    with Keeper(
        broker, f"other-{name}", x_persist_messages=10, alternate_exchange=alternate
    ) as keeper:
        keeper.publish("b")
        assert keeper.got(alternate) == [("b", None)]
        assert keeper.bodies(x_from=0) == "b"


@pytest.mark.row("B1.15")
def test_what_comes_by_another_exchange_is_kept_too(broker: RealBroker, name: str) -> None:
    with Keeper(broker, name, x_persist_messages=10) as keeper:
        keeper.channel.exchange_declare(f"first-{name}", "fanout")
        keeper.channel.exchange_bind(name, f"first-{name}")
        keeper.channel.basic_publish(f"first-{name}", "k", b"a")
        assert keeper.bodies(x_from=0) == "a"


@pytest.mark.row("B2.7")
def test_the_same_binding_again_brings_nothing_again(broker: RealBroker, name: str) -> None:
    with Keeper(broker, name, x_persist_messages=10) as keeper:
        keeper.publish(*"abc")
        queue = keeper.bound(x_from=0)
        keeper.channel.queue_bind(queue, name, "#", {"x-from": 0})
        assert [body for body, _ in keeper.got(queue)] == list("abc")
        keeper.channel.queue_unbind(queue, name, "#", {"x-from": 0})
        keeper.publish("d")
        time.sleep(0.5)
        assert keeper.got(queue) == [], "unbound"
        keeper.channel.queue_bind(queue, name, "#", {"x-tail": 2})
        assert [body for body, _ in keeper.got(queue)] == list("cd")


def _into(bodies: list[str]) -> Any:
    async def collect(message: AbstractIncomingMessage) -> None:
        bodies.append(message.body.decode())

    return collect


@pytest.mark.broker
@pytest.mark.row("B2.7")
@pytest.mark.parametrize("front_doors", [pytest.param(1, marks=pytest.mark.torture), 2])
async def test_under_publishing_each_message_comes_once_and_those_before_in_order(
    tmp_path: Any, front_doors: int, name: str
) -> None:
    broker = RealBroker(tmp_path / "data", front_doors=front_doors)
    try:
        connections = [await aio_pika.connect(broker.url) for _ in range(6)]
        channels = [await each.channel() for each in connections]
        arguments = {"x-persist-messages": 1_000_000}
        exchange = await channels[0].declare_exchange(
            name, "topic", durable=True, arguments=arguments
        )
        sent: list[str] = []
        going = True

        async def publish(channel: Any, who: int) -> None:
            own = await channel.get_exchange(name)
            number = 0
            while going:
                body = f"{who}.{number}"
                sent.append(body)
                await own.publish(aio_pika.Message(body.encode()), "k")
                number += 1

        publishers = [
            asyncio.create_task(publish(channel, who)) for who, channel in enumerate(channels[1:])
        ]
        await asyncio.sleep(0.3)
        queues = []
        for number in range(8):  # on both shards
            confirmed = len(sent)
            queue = await channels[0].declare_queue(f"{name}-{number}", durable=True)
            await queue.bind(exchange, "#", arguments={"x-from": 0})
            queues.append((queue, confirmed))
        await asyncio.sleep(0.3)
        going = False
        await asyncio.gather(*publishers)
        looked_until = time.monotonic() + 6  # the time for which what was on its way is looked for
        got: list[list[str]] = [[] for _ in queues]
        for (queue, _), bodies in zip(queues, got, strict=True):
            await queue.consume(_into(bodies), no_ack=True)
        await wait_for(
            lambda: all(len(bodies) >= len(sent) for bodies in got),
            f"{len(sent)} messages in each queue",
        )
        await asyncio.sleep(looked_until - time.monotonic())
        for (_, confirmed), bodies in zip(queues, got, strict=True):
            assert len(bodies) == len(set(bodies)), "some came twice"
            assert set(bodies) == set(sent), "some are missing"
            before = max(confirmed - len(publishers), 0)
            for who in range(len(publishers)):
                own = [body for body in bodies[:before] if body.startswith(f"{who}.")]
                assert own == [f"{who}.{number}" for number in range(len(own))], "not in order"
        for connection in connections:
            await connection.close()
        broker.stop()
    finally:
        broker.clean_up()


@pytest.mark.row("B1.11")
def test_a_binding_to_a_recent_history_gets_the_last_ones(broker: RealBroker, name: str) -> None:
    with Keeper(broker, name, "x-recent-history", x_recent_history_length=3) as keeper:
        keeper.publish(*"abcd")
        keeper.publish("x", headers={"x-recent-history-no-store": True})
        queue = keeper.bound("whatever")
        keeper.publish("e", key="any key")
        assert keeper.got(queue) == [("b", None), ("c", None), ("d", None), ("e", None)]
        assert keeper.bodies() == "cde"


@pytest.mark.row("B1.11")
def test_a_recent_history_is_twenty_messages_long_if_nothing_else_is_said(
    broker: RealBroker, name: str
) -> None:
    with Keeper(broker, name, "x-recent-history") as keeper:
        keeper.publish(*(f"{number}." for number in range(30)))
        assert keeper.bodies() == "".join(f"{number}." for number in range(10, 30))


WITHIN_S = 60.0
SOON_MS = 1500  # longer than what is done meanwhile takes


def wait_for_bodies(keeper: Keeper, queue: str, count: int) -> list[tuple[str, int | None]]:
    found: list[tuple[str, int | None]] = []
    give_up = time.monotonic() + WITHIN_S
    while len(found) < count and time.monotonic() < give_up:
        found += keeper.got(queue)
    return found


@pytest.mark.row("B1.10")
@pytest.mark.row("B2.1")
@pytest.mark.parametrize("kind", ["x-delayed-message", "fanout"])
def test_what_is_delayed_is_kept_when_it_is_due(
    broker: RealBroker, api: Api, name: str, kind: str
) -> None:
    said: dict[str, Any] = (
        {"x_delayed_type": "fanout"} if kind != "fanout" else {"x_delayed_exchange": True}
    )
    with Keeper(broker, name, kind, x_persist_messages=10, **said) as keeper:
        queue = keeper.bound()
        keeper.publish("late", headers={"x-delay": SOON_MS})
        keeper.publish("now")
        assert keeper.bodies(x_from=0) == "now"
        assert wait_for_bodies(keeper, queue, 2) == [("now", None), ("late", None)]
        assert keeper.got(keeper.bound(x_from=0)) == [("now", 0), ("late", 1)]
        hidden = {f"amq.delayed.{name}", f"amq.persistent.{name}"}
        assert not hidden & {row["name"] for row in api("/api/queues")}
        row = f"/api/exchanges/%2F/{name}"
        wait_until(
            lambda: api(row).get("messages_delayed") == 0,
            "what is kept does not count as delayed",
            WITHIN_S,
        )
        keeper.channel.exchange_delete(name)
    with Keeper(broker, name, kind, x_persist_messages=10, **said) as keeper:
        assert keeper.bodies(x_from=0) == "", "what was kept went with the exchange"


@pytest.mark.row("B1.10")
@pytest.mark.row("B1.11")
def test_a_recent_history_that_delays(broker: RealBroker, name: str) -> None:
    said = {"x_delayed_type": "x-recent-history", "x_recent_history_length": 2}
    with Keeper(broker, name, "x-delayed-message", **said) as keeper:
        queue = keeper.bound()
        keeper.publish("late", headers={"x-delay": SOON_MS})
        keeper.publish(*"abc")
        assert keeper.bodies() == "bc"
        assert [body for body, _ in wait_for_bodies(keeper, queue, 4)] == ["a", "b", "c", "late"]
        assert keeper.bodies() == "clate"


@pytest.mark.row("B1.13")
@pytest.mark.row("B2.1")
def test_what_is_deduplicated_is_kept_once(broker: RealBroker, name: str) -> None:
    said: dict[str, Any] = {"x_message_deduplication": True, "x_cache_size": 10}
    with Keeper(broker, name, x_persist_messages=10, **said) as keeper:
        for body in ("a", "b", "a"):
            keeper.publish(body, headers={"x-deduplication-header": body})
        assert keeper.bodies(x_from=0) == "ab"


@pytest.mark.row("B1.10")
def test_a_vhosts_limit_and_totals_do_not_count_where_messages_are_kept(
    broker: RealBroker, api: Api, name: str
) -> None:
    before = api("/api/overview")["object_totals"]["queues"]
    with Keeper(broker, name, x_persist_messages=10) as keeper:
        keeper.publish(*"abc")
        assert api("/api/overview")["object_totals"]["queues"] == before
        keeper.channel.exchange_delete(name)
