"""Test dead-lettering through a real client."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pika
import pika.exceptions
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.support.proving import proving
from tests.support.real_broker import RealBroker, wait_until

WAIT_S = 60.0
OFFERED_AGAIN_S = 2.5  # dead letters that were refused are offered again each second
Arguments = dict[str, Any]


class Bench:
    """A queue that dead-letters to `dead`, both with confirms."""

    def __init__(self, connection: pika.BlockingConnection, name: str) -> None:
        self.connection, self.name = connection, name
        self.channel: BlockingChannel = connection.channel()
        self.channel.confirm_delivery()
        self.dead = f"{name}-dead"
        self.channel.queue_declare(self.dead, durable=True)

    def source(self, name: str = "", **arguments: Any) -> str:
        """Declare a queue that dead-letters to the queue `dead`.

        The arguments have `_` for `-`.
        """
        name = name or self.name
        own = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": self.dead}
        own |= {key.replace("_", "-"): value for key, value in arguments.items()}
        self.channel.queue_declare(
            name,
            durable=True,
            arguments={key: value for key, value in own.items() if value is not None},
        )
        return name

    def publish(
        self, body: bytes = b"x", queue: str = "", exchange: str = "", **properties: Any
    ) -> None:
        properties.setdefault("delivery_mode", 2)
        self.channel.basic_publish(
            exchange, queue or self.name, body, pika.BasicProperties(**properties)
        )

    def take(self, queue: str = "") -> tuple[Any, pika.BasicProperties, bytes]:
        """Return the next message of `dead`, or of another queue, as soon as it is there."""
        found: list[Any] = []

        def there() -> bool:
            method, properties, body = self.channel.basic_get(queue or self.dead, auto_ack=True)
            if method is not None:
                found.append((method, properties, body))
            return method is not None

        wait_until(there, f"a message in {queue or self.dead}", WAIT_S)
        return found[0]

    def take_unacked(self, queue: str = "") -> tuple[Any, pika.BasicProperties, bytes]:
        """Return the next message of the queue, not yet acknowledged."""
        found: list[Any] = []

        def there() -> bool:
            found[:] = self.channel.basic_get(queue or self.name)
            return found[0] is not None

        wait_until(there, f"a message in {queue or self.name}", WAIT_S)
        return found[0], found[1], found[2]

    def reject(self, queue: str = "", requeue: bool = False) -> None:
        self.channel.basic_reject(self.take_unacked(queue)[0].delivery_tag, requeue=requeue)

    def is_empty(self, queue: str) -> bool:
        return self.channel.queue_declare(queue, passive=True).method.message_count == 0


@pytest.fixture
def bench(connection: pika.BlockingConnection, name: str) -> Bench:
    return Bench(connection, name)


def _expire_by_queue(bench: Bench) -> None:
    bench.source(x_message_ttl=20)
    bench.publish()


def _expire_by_message(bench: Bench) -> None:
    bench.source()
    bench.publish(expiration="20")


def _reject(bench: Bench) -> None:
    bench.source()
    bench.publish()
    bench.reject()


def _nack(bench: Bench) -> None:
    bench.source()
    bench.publish()
    wait_until(lambda: not bench.is_empty(bench.name), "the message", WAIT_S)
    tag = bench.channel.basic_get(bench.name)[0].delivery_tag
    bench.channel.basic_nack(tag, multiple=True, requeue=False)


def _too_many(bench: Bench) -> None:
    bench.source(x_max_length=1)
    bench.publish()
    bench.publish(b"second")


def _too_big(bench: Bench) -> None:
    bench.source(x_max_length_bytes=10)
    bench.publish()
    bench.publish(b"second one")


def _refused(bench: Bench) -> None:
    bench.source(x_max_length=0, x_overflow="reject-publish-dlx")
    with pytest.raises(pika.exceptions.NackError):
        bench.publish()


def _returned_too_often(bench: Bench) -> None:
    bench.source(x_delivery_limit=2)
    bench.publish()
    for _ in range(3):
        bench.reject(requeue=True)


WAYS: list[tuple[str, str, Callable[[Bench], None], str]] = [
    ("C2.1 C1.3", "queue ttl", _expire_by_queue, "expired"),
    ("C2.1 A5.5", "message ttl", _expire_by_message, "expired"),
    ("C2.1 A6.10", "reject", _reject, "rejected"),
    ("C2.1 A6.10", "nack", _nack, "rejected"),
    ("C2.1 C1.4", "max-length", _too_many, "maxlen"),
    ("C2.1 C1.4", "max-length-bytes", _too_big, "maxlen"),
    ("C2.1 C1.5", "reject-publish-dlx", _refused, "maxlen"),
    ("C2.1 C1.10", "delivery-limit", _returned_too_often, "delivery_limit"),
]


@pytest.mark.parametrize(("die", "reason"), [proving(*way) for way in WAYS])
def test_a_message_that_leaves_arrives_at_the_dead_letter_exchange_with_the_reason(
    bench: Bench, die: Callable[[Bench], None], reason: str
) -> None:
    die(bench)
    method, properties, body = bench.take()
    assert body == b"x"
    assert (method.exchange, method.routing_key, method.redelivered) == ("", bench.dead, False)
    (death,) = properties.headers["x-death"]
    assert (death["reason"], death["queue"], death["count"]) == (reason, bench.name, 1)


@pytest.mark.row("C2.2", "C2.3", "C2.4")
def test_the_headers_say_where_when_and_how(bench: Bench) -> None:
    before = time.time()
    bench.source()
    bench.channel.queue_bind(bench.name, "amq.direct", "k")
    bench.publish(
        queue="k",
        exchange="amq.direct",
        expiration="20",
        headers={"mine": 1, "CC": ["other"]},
        priority=3,
    )
    _, properties, _ = bench.take()
    headers = properties.headers
    (death,) = headers["x-death"]
    assert before - 2 < death.pop("time").timestamp() < time.time() + 2
    assert death == {
        "count": 1,
        "reason": "expired",
        "queue": bench.name,
        "exchange": "amq.direct",
        "routing-keys": ["k", "other"],
        "original-expiration": "20",
    }
    for which in ("first", "last"):
        place = tuple(
            headers[f"x-{which}-death-{what}"] for what in ("queue", "reason", "exchange")
        )
        assert place == (bench.name, "expired", "amq.direct")
    assert (headers["mine"], properties.expiration, properties.priority) == (1, None, 3)
    assert "CC" not in headers  # it goes by another key now


@pytest.mark.row("C2.2", "C2.8")
def test_each_queue_and_reason_has_one_table_the_newest_first(bench: Bench) -> None:
    """A retry queue in front of the queue, round and round."""
    retry = f"{bench.name}-retry"
    bench.source(x_dead_letter_routing_key=retry)
    bench.source(retry, x_dead_letter_routing_key=bench.name, x_message_ttl=1)
    bench.publish()
    for _ in range(3):
        bench.reject()
    _, properties, _ = bench.take(bench.name)
    deaths = [
        (each["queue"], each["reason"], each["count"]) for each in properties.headers["x-death"]
    ]
    assert deaths == [(retry, "expired", 3), (bench.name, "rejected", 3)]
    assert properties.headers["x-first-death-queue"] == bench.name
    assert properties.headers["x-last-death-queue"] == retry


@pytest.mark.row("C1.6", "A5.7")
def test_without_a_routing_key_a_dead_letter_keeps_its_own_and_cc(bench: Bench) -> None:
    exchange, other = f"{bench.name}-dlx", f"{bench.name}-other"
    bench.channel.exchange_declare(exchange, "direct")
    bench.channel.queue_bind(bench.dead, exchange, bench.name)
    bench.channel.queue_declare(other)
    bench.channel.queue_bind(other, exchange, "cc-key")
    bench.source(x_dead_letter_exchange=exchange, x_dead_letter_routing_key=None)
    bench.publish(headers={"CC": ["cc-key"]})
    bench.reject()
    for queue in (bench.dead, other):
        method, properties, _ = bench.take(queue)
        assert (method.exchange, method.routing_key) == (exchange, bench.name)
        assert properties.headers["CC"] == ["cc-key"]


@pytest.mark.row("C1.6")
def test_a_headers_exchange_may_route_by_what_is_said_of_the_death(bench: Bench) -> None:
    bench.channel.queue_bind(
        bench.dead,
        "amq.headers",
        "",
        {"x-match": "all-with-x", "x-first-death-reason": "rejected", "mine": "v"},
    )
    bench.source(x_dead_letter_exchange="amq.headers")
    bench.publish(headers={"mine": "v"})
    bench.reject()
    assert bench.take()[2] == b"x"


@pytest.mark.row("C2.5")
def test_a_cycle_that_nobody_rejects_in_ends_and_one_with_a_reject_goes_on(bench: Bench) -> None:
    bench.source(x_dead_letter_routing_key=bench.name, x_message_ttl=50)
    bench.publish(b"expires")
    wait_until(lambda: bench.is_empty(bench.name), "its end", WAIT_S)
    time.sleep(0.3)  # in which it would come again
    assert bench.is_empty(bench.name)
    other = bench.source(f"{bench.name}-other", x_dead_letter_routing_key=f"{bench.name}-other")
    bench.publish(b"rejected", queue=other)
    for count in (1, 2):
        bench.reject(other)
        _, properties, body = bench.take_unacked(other)
        (death,) = properties.headers["x-death"]
        assert (body, death["reason"], death["count"]) == (b"rejected", "rejected", count)
        bench.channel.basic_recover(requeue=True)


@pytest.mark.row("C1.6")
def test_without_the_exchange_they_are_dropped_and_the_queue_goes_on(bench: Bench) -> None:
    bench.source(x_dead_letter_exchange=f"{bench.name}-none")
    bench.publish()
    bench.reject()
    bench.publish(b"next")
    assert bench.take(bench.name)[2] == b"next"
    assert bench.is_empty(bench.dead)


@pytest.mark.row("C2.7")
def test_a_thousand_that_expire_at_once_all_arrive_in_their_order(bench: Bench) -> None:
    bench.source(x_message_ttl=100)
    sender = bench.connection.channel()  # without confirms: all within a moment
    for number in range(1000):
        persistent = pika.BasicProperties(delivery_mode=2, message_id=str(number))
        sender.basic_publish("", bench.name, b"%d" % number, persistent)
    arrived: list[int] = []
    for method, _, body in bench.channel.consume(
        bench.dead, auto_ack=True, inactivity_timeout=WAIT_S
    ):
        assert method is not None, f"{len(arrived)} arrived"
        arrived.append(int(body))
        if len(arrived) == 1000:
            break
    bench.channel.cancel()
    assert arrived == list(range(1000))


REFUSED: list[tuple[str, str, Arguments, str]] = [
    ("C1.6", "key alone", {"x-dead-letter-routing-key": "k"},
     "invalid arg 'x-dead-letter-routing-key' for queue '{n}' in vhost '/': "
     "routing_key_but_no_dlx_defined"),
    ("C1.6", "long key", {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "k" * 256},
     "invalid arg 'x-dead-letter-routing-key' for queue '{n}' in vhost '/': \"a routing key has at "
     "most 255 bytes\""),
    ("C1.6", "type", {"x-dead-letter-exchange": 1},
     "invalid type 'signedint' for arg 'x-dead-letter-exchange' in queue '{n}' in vhost '/'"),
    ("C1.7", "strategy", {"x-dead-letter-strategy": "maybe"},
     "invalid arg 'x-dead-letter-strategy' for queue '{n}' in vhost '/': invalid_dlx_strategy"),
    ("C1.5", "overflow", {"x-overflow": "shrug"},
     "invalid arg 'x-overflow' for queue '{n}' in vhost '/': invalid_overflow"),
    ("C1.8", "priority", {"x-max-priority": 256},
     "invalid arg 'x-max-priority' for queue '{n}' in vhost '/': {{max_value_exceeded,256}}"),
    ("C1.9", "single active consumer", {"x-single-active-consumer": "yes"},
     "invalid arg 'x-single-active-consumer' for queue '{n}' in vhost '/': "
     "{{unacceptable_type,longstr}}"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "text"), [proving(*case) for case in REFUSED])
def test_arguments_that_mean_nothing_are_refused_in_rabbitmqs_words(
    connection: pika.BlockingConnection, name: str, arguments: Arguments, text: str
) -> None:
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
        connection.channel().queue_declare(name, arguments=arguments)
    expected = f"PRECONDITION_FAILED - {text.format(n=name)}"
    assert (closed.value.reply_code, closed.value.reply_text) == (406, expected)


@pytest.mark.row("C1.7")
def test_at_least_once_offers_a_full_queue_its_dead_letters_again(
    broker: RealBroker, bench: Bench
) -> None:
    full = f"{bench.name}-full"
    bench.channel.queue_declare(full, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    bench.publish(b"first", queue=full)
    bench.source(
        x_dead_letter_routing_key=full,
        x_dead_letter_strategy="at-least-once",
        x_overflow="reject-publish",
    )
    bench.publish(b"second")
    bench.reject()
    time.sleep(0.2)
    assert bench.take(full)[2] == b"first"
    assert bench.take(full)[2] == b"second"


@pytest.mark.row("C1.10")
def test_a_message_that_came_back_says_how_often(bench: Bench) -> None:
    bench.source(x_delivery_limit=5)
    bench.publish(headers={"mine": 1, "x-delivery-count": 77})
    bench.publish(b"other")
    said = []
    for _ in range(3):
        found = bench.take_unacked()
        said.append((found[0].redelivered, found[1].headers.get("x-delivery-count")))
        bench.channel.basic_reject(found[0].delivery_tag, requeue=True)
    for method, properties, _ in bench.channel.consume(bench.name):
        said.append(
            (method.redelivered, properties.headers and properties.headers.get("x-delivery-count"))
        )
        if len(said) == 5:
            break
    bench.channel.cancel()
    assert said == [(False, 77), (True, 1), (True, 2), (True, 3), (False, None)]


@pytest.mark.row("C1.10")
def test_messages_that_came_back_differently_often_each_say_their_own(bench: Bench) -> None:
    bench.source(x_delivery_limit=9)
    for number in range(6):
        bench.publish(b"%d" % number)
    tags = [bench.take_unacked()[0].delivery_tag for _ in range(6)]
    for number in (1, 2, 4):
        bench.channel.basic_reject(tags[number], requeue=True)
    again = [bench.take_unacked()[0].delivery_tag for _ in range(3)]
    bench.channel.basic_reject(again[1], requeue=True)
    bench.channel.close()
    bench.channel = bench.connection.channel()
    said = {}
    for _, properties, body in bench.channel.consume(bench.name):
        said[body] = (properties.headers or {}).get("x-delivery-count")
        if len(said) == 6:
            break
    assert said == {b"0": 1, b"1": 2, b"2": 2, b"3": 1, b"4": 2, b"5": 1}


@pytest.mark.row("C1.10")
def test_without_an_exchange_what_came_back_too_often_is_dropped(bench: Bench) -> None:
    bench.source(x_delivery_limit=1, x_dead_letter_exchange=None, x_dead_letter_routing_key=None)
    bench.publish()
    bench.reject(requeue=True)
    bench.reject(requeue=True)
    assert bench.is_empty(bench.name)


@pytest.fixture
def watched(bench: Bench) -> str:
    """Declare an exchange that routes every message to the queue `dead`."""
    bench.channel.exchange_declare(f"{bench.name}-own", "fanout")
    bench.channel.queue_bind(bench.dead, f"{bench.name}-own")
    return f"{bench.name}-own"


@pytest.mark.row("C2.6")
@pytest.mark.parametrize(
    "other", [None, "amq.fanout"], ids=["a queue without one", "a queue that has another"]
)
def test_a_message_says_itself_where_it_goes_when_it_dies(
    bench: Bench, watched: str, other: str | None
) -> None:
    bench.source(x_dead_letter_exchange=other, x_dead_letter_routing_key=None)
    wish = {"x-dead-letter-exchange": watched, "x-dead-letter-routing-key": "its own", "mine": 1}
    bench.publish(b"without a wish")
    bench.publish(b"with a wish", headers=wish)
    bench.reject()
    bench.reject()
    method, properties, body = bench.take()
    assert (body, method.exchange, method.routing_key) == (b"with a wish", watched, "its own")
    assert not {*wish} - {"mine"} & {*properties.headers} and properties.headers["mine"] == 1
    assert properties.headers["x-death"][0]["queue"] == bench.name
    assert bench.is_empty(bench.dead)


@pytest.mark.row("C2.6")
def test_its_own_key_wins_over_that_of_the_queue_and_its_exchange_goes_with_that_of_the_queue(
    bench: Bench, watched: str
) -> None:
    bench.source(x_dead_letter_exchange="amq.fanout", x_dead_letter_routing_key="of the queue")
    bench.publish(headers={"x-dead-letter-exchange": watched})
    bench.reject()
    assert bench.take()[0].routing_key == "of the queue"
    bench.source(f"{bench.name}-2")
    bench.publish(queue=f"{bench.name}-2", headers={"x-dead-letter-routing-key": f"{bench.name}-3"})
    bench.channel.queue_declare(f"{bench.name}-3")
    bench.reject(f"{bench.name}-2")
    assert "x-dead-letter-routing-key" not in bench.take(f"{bench.name}-3")[1].headers


@pytest.mark.row("C2.6")
@pytest.mark.parametrize("value", [5, "n" * 256, ["amq.fanout"]])
def test_what_is_no_name_says_nothing_of_where_it_goes(bench: Bench, value: Any) -> None:
    bench.source()
    bench.publish(headers={"x-dead-letter-exchange": value, "x-dead-letter-routing-key": value})
    bench.reject()
    assert bench.take()[0].routing_key == bench.dead


def put(broker: RealBroker, path: str, body: dict[str, str]) -> None:
    request = urllib.request.Request(
        f"http://{broker.http}{path}", json.dumps(body).encode(), method="PUT"
    )
    request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status in (201, 204)


@pytest.mark.row("C2.6", "I5")
def test_who_may_not_publish_to_an_exchange_sends_no_dead_letters_there(
    bench: Bench, broker: RealBroker
) -> None:
    user, may = f"{bench.name}-user", bench.name
    put(broker, f"/api/users/{user}", {"password": "secret", "tags": ""})
    put(
        broker,
        f"/api/permissions/%2F/{user}",
        {"configure": "", "write": f"^(amq\\.default|{may})$", "read": ""},
    )
    credentials = pika.PlainCredentials(user, "secret")
    with pika.BlockingConnection(
        pika.ConnectionParameters(port=broker.port, credentials=credentials)
    ) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        properties = pika.BasicProperties(headers={"x-dead-letter-exchange": "amq.fanout"})
        text = (
            "ACCESS_REFUSED - write access to exchange 'amq.fanout' in vhost '/' refused for "
            f"user '{user}'"
        )
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
            channel.basic_publish("", bench.name, b"x", properties)
        assert (refused.value.reply_code, refused.value.reply_text) == (403, text)


@pytest.mark.row("A5.7", "C2.2")
def test_a_dead_letter_goes_by_bcc_keys_too_and_nobody_sees_them(bench: Bench) -> None:
    """Twice: they count for each of its deaths."""
    exchange, second = f"{bench.name}-dlx", f"{bench.name}-2"
    bench.channel.exchange_declare(exchange, "direct")
    bench.source(x_dead_letter_exchange=exchange, x_dead_letter_routing_key=None)
    bench.source(
        second, x_dead_letter_exchange=exchange, x_dead_letter_routing_key=None, x_message_ttl=50
    )
    bench.channel.queue_bind(second, exchange, "bcc-key")
    bench.publish(headers={"CC": ["cc-key"], "BCC": ["bcc-key"], "mine": 1})
    method, properties, _ = bench.take_unacked()
    assert properties.headers == {"CC": ["cc-key"], "mine": 1}
    bench.channel.basic_reject(method.delivery_tag, requeue=True)
    for method, properties, _ in bench.channel.consume(bench.name):
        assert method.redelivered and properties.headers == {"CC": ["cc-key"], "mine": 1}
        bench.channel.basic_reject(method.delivery_tag, requeue=False)
        break
    bench.channel.cancel()
    wait_until(lambda: not bench.is_empty(second), "the first dead letter", WAIT_S)
    bench.channel.queue_bind(bench.dead, exchange, "bcc-key")
    headers = bench.take()[1].headers
    assert "BCC" not in headers and headers["CC"] == ["cc-key"] and headers["mine"] == 1
    assert [death["queue"] for death in headers["x-death"]] == [second, bench.name]
    assert [death["routing-keys"] for death in headers["x-death"]] == [[bench.name, "cc-key"]] * 2


@pytest.mark.row("A5.7")
def test_with_a_key_of_its_queue_a_dead_letter_goes_by_no_other(bench: Bench) -> None:
    bench.source()
    bench.channel.queue_declare(other := f"{bench.name}-bcc")
    bench.publish(headers={"BCC": [other]})
    assert bench.take(other)[1].headers == {}
    bench.reject()
    assert "BCC" not in bench.take()[1].headers
    assert bench.is_empty(other)


def test_a_full_queue_beside_another_keeps_no_dead_letter_going_round(bench: Bench) -> None:
    """Two queues get each dead letter, and one of them refuses all.

    The other queue has each one once, at any time.
    """
    full, exchange = f"{bench.name}-full", f"{bench.name}-both"
    bench.channel.exchange_declare(exchange, "fanout")
    bench.channel.queue_declare(full, arguments={"x-max-length": 0, "x-overflow": "reject-publish"})
    for queue in (full, bench.dead):
        bench.channel.queue_bind(queue, exchange)
    bench.source(x_dead_letter_exchange=exchange, x_dead_letter_routing_key=None)
    for number in range(5):
        bench.publish(b"%d" % number)
        bench.reject()
    got = [bench.take()[2] for _ in range(5)]
    time.sleep(OFFERED_AGAIN_S)
    assert sorted(got) == [b"%d" % number for number in range(5)]
    assert bench.channel.basic_get(bench.dead, auto_ack=True)[0] is None
