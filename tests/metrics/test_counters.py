"""Every counter says what happened, whatever way a message takes.

Each row is a history and all that it counts.

The same histories were played to RabbitMQ 3.10.8; where it counts something else, the row says so.
Besides, it counts what a transaction publishes as received_confirm.
"""

from __future__ import annotations

import base64
import json
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

import pika
import pytest
from pika.exceptions import (
    ChannelClosedByBroker,
    NackError,
    ProbableAuthenticationError,
    UnroutableError,
)

from tests.support.real_broker import RealBroker

WITHIN_S = 30.0
AT_REST_S = 1.5  # longer than front doors wait before they tell what they have counted
SMALL, LARGE = b"x", b"x" * (20 << 10)  # a large body stays where it was read
GLOBAL = (
    "received", "received_confirm", "routed", "unroutable_returned", "unroutable_dropped",
    "confirmed", "delivered", "delivered_consume_manual_ack", "delivered_consume_auto_ack",
    "delivered_get_manual_ack", "delivered_get_auto_ack", "get_empty", "redelivered",
    "acknowledged", "dead_lettered_expired", "dead_lettered_rejected", "dead_lettered_maxlen",
    "dead_lettered_delivery_limit",
)  # fmt: skip
OWN = ("shardmq_messages_duplicates_total", "shardmq_duplicates_total")
# Other series that count the same: their name and the global ones that are their sum.
ALSO = {
    "rabbitmq_channel_messages_published_total": ("received",),
    "rabbitmq_channel_messages_confirmed_total": ("confirmed",),
    "rabbitmq_channel_messages_unroutable_returned_total": ("unroutable_returned",),
    "rabbitmq_channel_messages_unroutable_dropped_total": ("unroutable_dropped",),
    "rabbitmq_channel_messages_delivered_ack_total": ("delivered_consume_manual_ack",),
    "rabbitmq_channel_messages_delivered_total": ("delivered_consume_auto_ack",),
    "rabbitmq_channel_get_ack_total": ("delivered_get_manual_ack",),
    "rabbitmq_channel_get_total": ("delivered_get_auto_ack",),
    "rabbitmq_channel_get_empty_total": ("get_empty",),
    "rabbitmq_channel_messages_redelivered_total": ("redelivered",),
    "rabbitmq_channel_messages_acked_total": ("acknowledged",),
    "rabbitmq_message_size_bytes_count": ("received",),
}
OVERVIEW = {
    "publish": ("received",),
    "confirm": ("confirmed",),
    "return_unroutable": ("unroutable_returned",),
    "drop_unroutable": ("unroutable_dropped",),
    "deliver": ("delivered_consume_manual_ack",),
    "deliver_no_ack": ("delivered_consume_auto_ack",),
    "get": ("delivered_get_manual_ack",),
    "get_no_ack": ("delivered_get_auto_ack",),
    "get_empty": ("get_empty",),
    "deliver_get": (
        "delivered_consume_manual_ack", "delivered_consume_auto_ack", "delivered_get_manual_ack",
        "delivered_get_auto_ack",
    ),
    "redeliver": ("redelivered",),
    "ack": ("acknowledged",),
}  # fmt: skip
OF_QUEUE = (
    "publish", "deliver_get", "deliver", "deliver_no_ack", "get", "get_no_ack", "get_empty",
    "redeliver", "ack",
    "duplicates",
)  # fmt: skip
OF_EXCHANGES = ("publish_in", "publish_out")
# Series of a queue that count the same.
QUEUE_SERIES = {
    "rabbitmq_queue_messages_published_total": "publish",
    "rabbitmq_queue_messages_delivered_ack_total": "deliver",
    "rabbitmq_queue_messages_delivered_total": "deliver_no_ack",
    "rabbitmq_queue_get_ack_total": "get",
    "rabbitmq_queue_get_total": "get_no_ack",
    "rabbitmq_queue_get_empty_total": "get_empty",
    "rabbitmq_queue_messages_redelivered_total": "redeliver",
    "rabbitmq_queue_messages_acked_total": "ack",
}
Counts = dict[str, float]
Channel = Any


class Bench:
    """A broker that nobody else uses, and what it counts."""

    def __init__(self, url: str, http: str, metrics: str, name: str) -> None:
        self.connection = pika.BlockingConnection(pika.URLParameters(url))
        self._http, self._metrics, self.name = http, metrics, name

    def channel(self, *, confirm: bool = False, tx: bool = False) -> Channel:
        channel = self.connection.channel()
        if confirm:
            channel.confirm_delivery()
        if tx:
            channel.tx_select()
        return channel

    def queue(self, channel: Channel, which: str = "q", **arguments: Any) -> str:
        name = f"{self.name}-{which}"
        channel.queue_declare(
            name, durable=True, arguments={k.replace("_", "-"): v for k, v in arguments.items()}
        )
        return name

    def exchange(self, channel: Channel, kind: str, which: str = "e", **arguments: Any) -> str:
        name = f"{self.name}-{which}"
        said = {k.replace("_", "-"): v for k, v in arguments.items()}
        channel.exchange_declare(name, kind, durable=True, arguments=said)
        return name

    def wait_for(self, channel: Channel, queue: str, messages: int) -> None:
        until = time.monotonic() + WITHIN_S
        while channel.queue_declare(queue, passive=True).method.message_count != messages:
            assert time.monotonic() < until, f"{queue} has no {messages} messages"
            time.sleep(0.05)

    def consume(self, channel: Channel, queue: str, count: int, **more: Any) -> list[Any]:
        """Consume `count` messages; return the methods of the deliveries."""
        got: list[Any] = []
        tag = channel.basic_consume(queue, lambda c, method, p, body: got.append(method), **more)
        until = time.monotonic() + WITHIN_S
        while len(got) < count:
            assert time.monotonic() < until, f"{len(got)} of {count} deliveries"
            self.connection.process_data_events(0.05)
        channel.basic_cancel(tag)
        return got

    def api(self, path: str) -> Any:
        request = urllib.request.Request(f"http://{self._http}/api/{path}")
        request.add_header("Authorization", "Basic " + base64.b64encode(b"guest:guest").decode())
        return json.loads(urllib.request.urlopen(request, timeout=60).read())

    def of_queue(self, which: str) -> Counts:
        stats = self.api(f"queues/%2F/{quote(f'{self.name}-{which}', safe='')}").get(
            "message_stats", {}
        )
        return {name: stats[name] for name in OF_QUEUE if stats.get(name)}

    def series_of_queue(self, which: str) -> Counts:
        """Return the counters of a queue from the series of /metrics/per-object."""
        found, label = {}, f'queue="{self.name}-{which}"'
        for line in self._lines("/metrics/per-object"):
            series, _, value = line.rpartition(" ")
            name = QUEUE_SERIES.get(series.partition("{")[0])
            if name is not None and label in series and float(value):
                found[name] = float(value)
        return found

    def of_exchanges(self) -> Counter[str]:
        """Return what all exchanges have counted.

        The histories have no other exchanges.
        """
        found: Counter[str] = Counter()
        for exchange in self.api("exchanges/%2F"):
            stats = exchange.get("message_stats", {})
            found.update({name: stats[name] for name in OF_EXCHANGES if name in stats})
        return found

    def _lines(self, path: str) -> list[str]:
        text: bytes = urllib.request.urlopen(f"http://{self._metrics}{path}", timeout=60).read()
        return text.decode().splitlines()

    def counted(self) -> Counts:
        """All counters of the broker, by a name of their own; labels summed up."""
        found: Counts = {}
        for line in self._lines("/metrics"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            if name.startswith("rabbitmq_global_messages_") or name in ALSO or name in OWN:
                name = name.removeprefix("rabbitmq_global_messages_")
                name = name if name in ALSO or name in OWN else name.removesuffix("_total")
                found[name] = found.get(name, 0) + float(value)
        stats = self.api("overview")["message_stats"]
        of_vhost = self.api("vhosts/%2F")["message_stats"]
        return found | {
            f"{of} {name}": known.get(name, 0)
            for of, known in (("overview", stats), ("vhost", of_vhost))
            for name in OVERVIEW
        }


class History(NamedTuple):
    """Steps, the counters that they raise (no others), and the counts of the queues in the end."""

    name: str
    play: Callable[[Bench], None]
    counts: Counts
    queues: dict[str, Counts] = {}
    # Messages that came to exchanges and that these gave to queues, where that is not what is
    # received and routed.
    passed: tuple[int, int] | None = None


def publish(
    channel: Channel, exchange: str, key: str, count: int = 1, body: bytes = SMALL, **more: Any
) -> None:
    mandatory = more.pop("mandatory", False)
    for _ in range(count):
        channel.basic_publish(exchange, key, body, pika.BasicProperties(**more), mandatory)


# -- in --------------------------------------------------------------------------------------------


def _to_a_queue(body: bytes, **how: bool) -> Callable[[Bench], None]:
    def play(bench: Bench) -> None:
        channel = bench.channel(**how)
        publish(channel, "", bench.queue(channel), 3, body)
        if how.get("tx"):
            channel.tx_commit()

    return play


def _nowhere(
    kind: str, body: bytes = SMALL, mandatory: bool = False, **how: bool
) -> Callable[[Bench], None]:
    """Three messages to an exchange without bindings."""

    def play(bench: Bench) -> None:
        channel = bench.channel(**how)
        exchange = "" if kind == "default" else bench.exchange(channel, kind)
        for _ in range(3):
            try:
                publish(channel, exchange, bench.name, 1, body, mandatory=mandatory)
            except UnroutableError:
                assert mandatory
        if how.get("tx"):
            channel.tx_commit()

    return play


def _one_of_them(body: bytes, **more: Any) -> Callable[[Bench], None]:
    """Keys with and without a binding in one read."""

    def play(bench: Bench) -> None:
        channel = bench.channel()
        exchange, queue = bench.exchange(channel, "topic"), bench.queue(channel)
        channel.queue_bind(queue, exchange, "here.#")
        for key in ("here", "elsewhere", "here.too", "elsewhere", "nowhere"):
            publish(channel, exchange, key, 1, body, **more)

    return play


def _rolled_back(bench: Bench) -> None:
    channel = bench.channel(tx=True)
    publish(channel, "", bench.queue(channel), 3)
    channel.tx_rollback()


def _refused_commit(bench: Bench) -> None:
    channel = bench.channel(tx=True)
    publish(channel, "", bench.queue(channel, x_max_length=1, x_overflow="reject-publish"), 3)
    with pytest.raises(ChannelClosedByBroker):
        channel.tx_commit()


def _to_all(body: bytes) -> Callable[[Bench], None]:
    def play(bench: Bench) -> None:
        channel = bench.channel()
        exchange = bench.exchange(channel, "fanout")
        for which in ("q", "r", "s"):
            channel.queue_bind(bench.queue(channel, which), exchange)
        publish(channel, exchange, "", 2, body)

    return play


def _copies(header: str) -> Callable[[Bench], None]:
    def play(bench: Bench) -> None:
        channel = bench.channel(confirm=True)
        names = [bench.queue(channel, which) for which in ("q", "r", "s")]
        publish(channel, "", names[0], 2, headers={header: [*names[1:], "nowhere"]})

    return play


def _alternate(is_bound: bool) -> Callable[[Bench], None]:
    def play(bench: Bench) -> None:
        channel = bench.channel()
        other = bench.exchange(channel, "fanout", "ae")
        exchange = bench.exchange(channel, "direct", alternate_exchange=other)
        if is_bound:
            channel.queue_bind(bench.queue(channel), other)
        publish(channel, exchange, "nobody", 3)

    return play


def _by_headers(bench: Bench) -> None:
    channel = bench.channel()
    exchange = bench.exchange(channel, "headers")
    channel.queue_bind(bench.queue(channel), exchange, "", {"x-match": "all", "a": 1})
    publish(channel, exchange, "", 2, headers={"a": 1})
    publish(channel, exchange, "", 1, headers={"a": 2})


def _nacked(bench: Bench) -> None:
    channel = bench.channel(confirm=True)
    queue = bench.queue(channel, x_max_length=2, x_overflow="reject-publish")
    publish(channel, "", queue, 2)
    with pytest.raises(NackError):
        publish(channel, "", queue, 1)


def _repeated(bench: Bench) -> None:
    channel = bench.channel(confirm=True)
    queue = bench.queue(channel)
    for sequence in (1, 2, 2, 1, 3):
        publish(channel, "", queue, headers={"x-producer-id": "p", "x-sequence": sequence})


def _deduplicated(bench: Bench) -> None:
    channel = bench.channel(confirm=True)
    exchange = bench.exchange(
        channel,
        "fanout",
        x_message_deduplication=True,
        x_cache_size=100,
        x_deduplication_header="id",
    )
    channel.queue_bind(bench.queue(channel), exchange)
    for id in ("a", "b", "a"):
        publish(channel, exchange, "", headers={"id": id, "x-deduplication-header": id})


# -- out -------------------------------------------------------------------------------------------


def _consumed(body: bytes, auto_ack: bool) -> Callable[[Bench], None]:
    def play(bench: Bench) -> None:
        channel = bench.channel(confirm=True)
        queue = bench.queue(channel)
        publish(channel, "", queue, 3, body)
        got = bench.consume(channel, queue, 3, auto_ack=auto_ack)
        if not auto_ack:
            channel.basic_ack(got[-1].delivery_tag, multiple=True)
        bench.wait_for(channel, queue, 0)

    return play


def _got(auto_ack: bool) -> Callable[[Bench], None]:
    def play(bench: Bench) -> None:
        channel = bench.channel(confirm=True)
        queue = bench.queue(channel)
        publish(channel, "", queue, 2)
        for _ in range(3):
            method = channel.basic_get(queue, auto_ack=auto_ack)[0]
            if method is not None and not auto_ack:
                channel.basic_ack(method.delivery_tag)

    return play


def _acked_in_a_transaction(bench: Bench) -> None:
    channel = bench.channel(tx=True)
    queue = bench.queue(channel)
    publish(channel, "", queue, 2)
    channel.tx_commit()
    for _ in range(2):
        channel.basic_ack(channel.basic_get(queue)[0].delivery_tag)
    channel.tx_commit()


def _came_again(how: str) -> Callable[[Bench], None]:
    """Got, given back, got again and acknowledged."""

    def play(bench: Bench) -> None:
        channel = bench.channel(confirm=True)
        queue = bench.queue(channel)
        publish(channel, "", queue, 2)
        tags = [channel.basic_get(queue)[0].delivery_tag for _ in range(2)]
        if how == "nack":
            channel.basic_nack(tags[1], multiple=True, requeue=True)
        elif how == "reject":
            for tag in tags:
                channel.basic_reject(tag, requeue=True)
        elif how == "recover":
            channel.basic_recover(requeue=True)
        else:
            channel.close()
            channel = bench.channel()
        bench.wait_for(channel, queue, 2)
        for _ in range(2):
            channel.basic_ack(channel.basic_get(queue)[0].delivery_tag)

    return play


def _consumed_again(bench: Bench) -> None:
    channel = bench.channel(confirm=True)
    queue = bench.queue(channel)
    publish(channel, "", queue, 2)
    got = bench.consume(channel, queue, 2)
    channel.basic_nack(got[-1].delivery_tag, multiple=True, requeue=True)
    bench.wait_for(channel, queue, 2)
    got = bench.consume(channel, queue, 2)
    channel.basic_ack(got[-1].delivery_tag, multiple=True)


def _purged(bench: Bench) -> None:
    channel = bench.channel(confirm=True)
    queue = bench.queue(channel)
    publish(channel, "", queue, 3)
    channel.queue_purge(queue)


def _deleted(bench: Bench) -> None:
    """Delete a queue: its counts stay in the totals."""
    channel = bench.channel(confirm=True)
    queue = bench.queue(channel)
    publish(channel, "", queue, 3)
    channel.basic_get(queue, auto_ack=True)
    channel.queue_delete(queue)


# -- deaths ----------------------------------------------------------------------------------------


def _dies(reason: str, letters: bool) -> Callable[[Bench], None]:
    """Two messages leave a queue for that reason."""

    def play(bench: Bench) -> None:
        channel = bench.channel(confirm=True)
        more: dict[str, Any] = {}
        if letters:
            exchange = bench.exchange(channel, "fanout", "dlx")
            channel.queue_bind(bench.queue(channel, "dead"), exchange)
            more = {"x_dead_letter_exchange": exchange}
        if reason == "maxlen":
            publish(channel, "", bench.queue(channel, x_max_length=1, **more), 3)
        elif reason == "expired":
            queue = bench.queue(channel, x_message_ttl=1, **more)
            publish(channel, "", queue, 2)
            bench.wait_for(channel, queue, 0)
        else:
            queue = bench.queue(channel, **more)
            publish(channel, "", queue, 2)
            tags = [channel.basic_get(queue)[0].delivery_tag for _ in range(2)]
            channel.basic_nack(tags[-1], multiple=True, requeue=False)
        if letters:
            bench.wait_for(channel, f"{bench.name}-dead", 2)

    return play


def _delivered_too_often(bench: Bench) -> None:
    channel = bench.channel(confirm=True)
    exchange = bench.exchange(channel, "fanout", "dlx")
    channel.queue_bind(bench.queue(channel, "dead"), exchange)
    queue = bench.queue(channel, x_dead_letter_exchange=exchange, x_delivery_limit=1)
    publish(channel, "", queue, 1)
    for _ in range(2):
        channel.basic_nack(channel.basic_get(queue)[0].delivery_tag, requeue=True)
    bench.wait_for(channel, f"{bench.name}-dead", 1)


# -- other kinds -----------------------------------------------------------------------------------


def _delayed(is_bound: bool) -> Callable[[Bench], None]:
    def play(bench: Bench) -> None:
        channel = bench.channel(confirm=True)
        exchange = bench.exchange(channel, "x-delayed-message", x_delayed_type="direct")
        queue = bench.queue(channel)
        if is_bound:
            channel.queue_bind(queue, exchange, "k")
        publish(channel, exchange, "k", 2, headers={"x-delay": 1})
        if is_bound:
            bench.wait_for(channel, queue, 2)

    return play


def _read_from_a_stream(bench: Bench) -> None:
    channel = bench.channel(confirm=True)
    queue = bench.queue(channel, x_queue_type="stream")
    publish(channel, "", queue, 3)
    channel.basic_qos(prefetch_count=10)
    got = bench.consume(channel, queue, 3, arguments={"x-stream-offset": "first"})
    channel.basic_ack(got[-1].delivery_tag, multiple=True)


def _spread(parts: str) -> Callable[[Bench], None]:
    """Over the shard queues of a stream exchange, and read by its name."""

    def play(bench: Bench) -> None:
        channel = bench.channel(confirm=True)
        more = {"x_shard_arguments": {"x-queue-type": "stream"}} if parts == "stream" else {}
        exchange = bench.exchange(channel, "x-modulus-hash", "v", x_shards=3, **more)
        for number in range(6):
            publish(channel, exchange, f"key-{number}")
        channel.basic_qos(prefetch_count=10)
        arguments = {"x-stream-offset": "first"} if parts == "stream" else {}
        got = bench.consume(channel, exchange, 6, arguments=arguments)
        channel.basic_ack(got[-1].delivery_tag, multiple=True)

    return play


def _replied(bench: Bench) -> None:
    """Asked and answered without a queue of one's own."""
    asking, answering = bench.channel(), bench.channel()
    queue = bench.queue(answering)
    got: list[bytes] = []
    asking.basic_consume(
        "amq.rabbitmq.reply-to", lambda c, m, p, body: got.append(body), auto_ack=True
    )
    publish(asking, "", queue, 1, reply_to="amq.rabbitmq.reply-to")
    bench.wait_for(answering, queue, 1)
    properties = answering.basic_get(queue, auto_ack=True)[1]
    publish(answering, "", properties.reply_to, 1)
    while not got:
        bench.connection.process_data_events(0.05)


IN = {"received": 3, "routed": 3}
CONFIRMED = {"received_confirm": 3, "confirmed": 3}
DROPPED = {"received": 3, "unroutable_dropped": 3}
RETURNED = {"received": 3, "unroutable_returned": 3}
TWO = {"received": 2, "received_confirm": 2, "confirmed": 2, "routed": 2}
THREE_COPIES = {"received": 2, "received_confirm": 2, "confirmed": 2, "routed": 6}
AGAIN = TWO | {"delivered": 4, "delivered_get_manual_ack": 4, "redelivered": 2, "acknowledged": 2}
GOT_TWICE = {"publish": 2, "deliver_get": 4, "get": 4, "redeliver": 2, "ack": 2}
EACH = {which: {"publish": 2} for which in ("q", "r", "s")}

# A channel counts what it publishes in a transaction at the commit, as in RabbitMQ.
NOT_COMMITTED = {"received": 3, "vhost publish": 0}

HISTORIES = [
    History("small", _to_a_queue(SMALL), IN, {"q": {"publish": 3}}),
    History("large", _to_a_queue(LARGE), IN, {"q": {"publish": 3}}),
    History(
        "small, confirmed", _to_a_queue(SMALL, confirm=True), IN | CONFIRMED, {"q": {"publish": 3}}
    ),
    History(
        "large, confirmed", _to_a_queue(LARGE, confirm=True), IN | CONFIRMED, {"q": {"publish": 3}}
    ),
    History("committed", _to_a_queue(SMALL, tx=True), IN, {"q": {"publish": 3}}),
    History("large, committed", _to_a_queue(LARGE, tx=True), IN, {"q": {"publish": 3}}),
    History("rolled back", _rolled_back, NOT_COMMITTED, {"q": {}}, (0, 0)),
    # RabbitMQ counts all three as routed and published, and what is committed as received_confirm,
    # too.
    History("commit refused", _refused_commit, NOT_COMMITTED, {"q": {}}, (0, 0)),
    *(
        History(f"no route: {kind}", _nowhere(kind), DROPPED)
        for kind in ("default", "direct", "fanout", "topic", "headers", "x-consistent-hash")
    ),
    History("no route: large", _nowhere("direct", LARGE), DROPPED),
    History("no route: confirmed", _nowhere("direct", confirm=True), DROPPED | CONFIRMED),
    History(
        "no route: large, confirmed", _nowhere("direct", LARGE, confirm=True), DROPPED | CONFIRMED
    ),
    History("no route: committed", _nowhere("direct", tx=True), DROPPED),
    History("returned", _nowhere("direct", mandatory=True), RETURNED),
    History("returned: large", _nowhere("topic", LARGE, mandatory=True), RETURNED),
    History("returned: headers", _nowhere("headers", mandatory=True), RETURNED),
    History(
        "returned: confirmed",
        _nowhere("direct", mandatory=True, confirm=True),
        RETURNED | CONFIRMED,
    ),
    History("returned: committed", _nowhere("direct", mandatory=True, tx=True), RETURNED),
    *(
        History(
            f"some have a route: {size}",
            _one_of_them(body),
            {"received": 5, "routed": 2, "unroutable_dropped": 3},
            {"q": {"publish": 2}},
        )
        for size, body in (("small", SMALL), ("large", LARGE))
    ),
    History(
        "some have a route: returned",
        _one_of_them(SMALL, mandatory=True),
        {"received": 5, "routed": 2, "unroutable_returned": 3},
        {"q": {"publish": 2}},
    ),
    History(
        "some have a route: by headers",
        _by_headers,
        {"received": 3, "routed": 2, "unroutable_dropped": 1},
        {"q": {"publish": 2}},
    ),
    History("three queues", _to_all(SMALL), {"received": 2, "routed": 6}, EACH),
    History("three queues: large", _to_all(LARGE), {"received": 2, "routed": 6}, EACH),
    History("CC", _copies("CC"), THREE_COPIES, EACH),
    History("BCC", _copies("BCC"), THREE_COPIES, EACH),
    History("alternate exchange", _alternate(True), IN, {"q": {"publish": 3}}),
    History("alternate exchange without a queue", _alternate(False), DROPPED),
    # RabbitMQ counts the one that the queue refused as routed and published, too.
    History(
        "nacked",
        _nacked,
        {"received": 3, "received_confirm": 3, "confirmed": 2, "routed": 3},
        {"q": {"publish": 3}},
    ),
    History(
        "repeated by their producer",
        _repeated,
        {"received": 5, "received_confirm": 5, "confirmed": 5, "routed": 3, OWN[0]: 2},
        {"q": {"publish": 3, "duplicates": 2}},
        (5, 5),
    ),
    History(
        "came to the exchange before",
        _deduplicated,
        {"received": 3, "received_confirm": 3, "confirmed": 3, "routed": 2, OWN[1]: 1},
        {"q": {"publish": 2}},
    ),
    *(
        History(
            f"consumed and acknowledged: {size}",
            _consumed(body, False),
            IN | CONFIRMED | {"delivered": 3, "delivered_consume_manual_ack": 3, "acknowledged": 3},
            {"q": {"publish": 3, "deliver_get": 3, "deliver": 3, "ack": 3}},
        )
        for size, body in (("small", SMALL), ("large", LARGE))
    ),
    History(
        "consumed without acknowledgements",
        _consumed(SMALL, True),
        IN | CONFIRMED | {"delivered": 3, "delivered_consume_auto_ack": 3},
        {"q": {"publish": 3, "deliver_get": 3, "deliver_no_ack": 3}},
    ),
    History(
        "got and acknowledged",
        _got(False),
        TWO | {"delivered": 2, "delivered_get_manual_ack": 2, "get_empty": 1, "acknowledged": 2},
        {"q": {"publish": 2, "deliver_get": 2, "get": 2, "get_empty": 1, "ack": 2}},
    ),
    History(
        "got without acknowledgements",
        _got(True),
        TWO | {"delivered": 2, "delivered_get_auto_ack": 2, "get_empty": 1},
        {"q": {"publish": 2, "deliver_get": 2, "get_no_ack": 2, "get_empty": 1}},
    ),
    History(
        "acknowledged in a transaction",
        _acked_in_a_transaction,
        {
            "received": 2,
            "routed": 2,
            "delivered": 2,
            "delivered_get_manual_ack": 2,
            "acknowledged": 2,
        },
        {"q": {"publish": 2, "deliver_get": 2, "get": 2, "ack": 2}},
    ),
    *(
        History(f"came again: {how}", _came_again(how), AGAIN, {"q": GOT_TWICE})
        for how in ("nack", "reject", "recover", "close")
    ),
    History(
        "came again to a consumer",
        _consumed_again,
        TWO
        | {"delivered": 4, "delivered_consume_manual_ack": 4, "redelivered": 2, "acknowledged": 2},
        {"q": {"publish": 2, "deliver_get": 4, "deliver": 4, "redeliver": 2, "ack": 2}},
    ),
    History("purged", _purged, IN | CONFIRMED, {"q": {"publish": 3}}),
    History("deleted", _deleted, IN | CONFIRMED | {"delivered": 1, "delivered_get_auto_ack": 1}),
    # RabbitMQ counts these as dead-lettered, too, under dead_letter_strategy "disabled".
    History("dropped by a limit", _dies("maxlen", False), IN | CONFIRMED, {"q": {"publish": 3}}),
    History("expired", _dies("expired", False), TWO, {"q": {"publish": 2}}),
    History(
        "rejected",
        _dies("rejected", False),
        TWO | {"delivered": 2, "delivered_get_manual_ack": 2},
        {"q": {"publish": 2, "deliver_get": 2, "get": 2}},
    ),
    # RabbitMQ does not count dead letters as routed, nor as published where they come to.
    History(
        "dead letters: a limit",
        _dies("maxlen", True),
        IN | CONFIRMED | {"routed": 5, "dead_lettered_maxlen": 2},
        {"q": {"publish": 3}, "dead": {"publish": 2}},
        (3, 3),
    ),
    History(
        "dead letters: expired",
        _dies("expired", True),
        TWO | {"routed": 4, "dead_lettered_expired": 2},
        {"q": {"publish": 2}, "dead": {"publish": 2}},
        (2, 2),
    ),
    History(
        "dead letters: rejected",
        _dies("rejected", True),
        TWO
        | {"routed": 4, "delivered": 2, "delivered_get_manual_ack": 2, "dead_lettered_rejected": 2},
        {"q": {"publish": 2, "deliver_get": 2, "get": 2}, "dead": {"publish": 2}},
        (2, 2),
    ),
    History(
        "dead letters: delivered too often",
        _delivered_too_often,
        {
            "received": 1,
            "received_confirm": 1,
            "confirmed": 1,
            "routed": 2,
            "delivered": 2,
            "redelivered": 1,
        }
        | {"delivered_get_manual_ack": 2, "dead_lettered_delivery_limit": 1},
        {"q": {"publish": 1, "deliver_get": 2, "get": 2, "redeliver": 1}, "dead": {"publish": 1}},
        (1, 1),
    ),
    # An exchange counts what it gives to queues at once.
    History("delayed", _delayed(True), TWO, {"q": {"publish": 2}}, (2, 0)),
    History(
        "delayed, and then no route",
        _delayed(False),
        {
            "received": 2,
            "received_confirm": 2,
            "confirmed": 2,
            "unroutable_dropped": 2,
            # No channel is there when a message is due.
            "vhost drop_unroutable": 0,
        },
        {"q": {}},
    ),
    History(
        "read from a stream",
        _read_from_a_stream,
        IN | CONFIRMED | {"delivered": 3, "delivered_consume_manual_ack": 3, "acknowledged": 3},
        {"q": {"publish": 3, "deliver_get": 3, "deliver": 3, "ack": 3}},
    ),
    *(
        History(
            f"spread over {parts} queues",
            _spread(parts),
            dict.fromkeys(
                (
                    "received",
                    "received_confirm",
                    "confirmed",
                    "routed",
                    "delivered",
                    "acknowledged",
                ),
                6,
            )
            | {"delivered_consume_manual_ack": 6},
        )
        for parts in ("classic", "stream")
    ),
    # RabbitMQ counts a direct reply as dropped for want of a route, and not as delivered.
    History(
        "direct reply",
        _replied,
        {
            "received": 2,
            "routed": 1,
            "delivered": 1,
            "delivered_get_auto_ack": 1,
            "delivered_consume_auto_ack": 1,
        },
        {"q": {"publish": 1, "deliver_get": 1, "get_no_ack": 1}},
        (2, 2),
    ),
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """Yield a broker of this file: queues that other tests leave behind may still do something."""
    made = RealBroker(tmp_path_factory.mktemp("counters") / "data")
    try:
        yield made
        made.stop()
        assert "Traceback" not in made.log_path.read_text()
    finally:
        made.clean_up()


@pytest.fixture
def bench(broker: RealBroker, name: str) -> Iterator[Bench]:
    made = Bench(broker.url, broker.http.replace("0.0.0.0", "127.0.0.1"), broker.metrics, name)
    yield made
    made.connection.close()


def expected_of(counts: Counts) -> Counts:
    """Return how much every counter of the broker grows, without those that do not grow."""
    all_counts = dict.fromkeys((*GLOBAL, *OWN), 0.0) | counts
    for names, before in ((ALSO, ""), (OVERVIEW, "overview "), (OVERVIEW, "vhost ")):
        all_counts |= {
            before + name: sum(all_counts[part] for part in parts) for name, parts in names.items()
        }
    return {name: count for name, count in (all_counts | counts).items() if count}


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.name)
def test_all_counters_say_what_happened_and_nothing_else(bench: Bench, history: History) -> None:
    before, passed_before = bench.counted(), bench.of_exchanges()
    missing = {*GLOBAL, *OWN, *ALSO, *(f"overview {name}" for name in OVERVIEW)} - before.keys()
    assert not missing
    history.play(bench)
    series = {
        which: {name: count for name, count in counts.items() if name in QUEUE_SERIES.values()}
        for which, counts in history.queues.items()
    }
    counts = history.counts
    came, left = history.passed or (counts.get("received", 0), counts.get("routed", 0))
    passed = {name: count for name, count in zip(OF_EXCHANGES, (came, left), strict=True) if count}
    wanted = (expected_of(counts), history.queues, series, passed)
    until = time.monotonic() + WITHIN_S
    while True:
        after = bench.counted()
        grown = {
            name: count - before.get(name, 0)
            for name, count in after.items()
            if count != before.get(name, 0)
        }
        of_queues = {which: bench.of_queue(which) for which in history.queues}
        series_of = {which: bench.series_of_queue(which) for which in history.queues}
        found = (grown, of_queues, series_of, dict(bench.of_exchanges() - passed_before))
        if found == wanted or time.monotonic() > until:
            break
        time.sleep(0.2)
    assert found == wanted


# -- what is not a message -------------------------------------------------------------------------

# Series of /metrics, and what `_come_and_go` adds to each.
COME_AND_GONE = {
    "rabbitmq_connections_opened_total": 3,
    "rabbitmq_connections_closed_total": 2,
    "rabbitmq_channels_opened_total": 7,
    "rabbitmq_channels_closed_total": 6,
    "rabbitmq_queues_declared_total": 4,
    "rabbitmq_queues_created_total": 3,
    "rabbitmq_queues_deleted_total": 3,
    'rabbitmq_auth_attempts_total{protocol="amqp091"}': 5,
    'rabbitmq_auth_attempts_succeeded_total{protocol="amqp091"}': 3,
    'rabbitmq_auth_attempts_failed_total{protocol="amqp091"}': 2,
}


def _come_and_go(url: str, name: str) -> pika.BlockingConnection:
    """Return the connection that stays, with one channel."""
    first, second, third = (pika.BlockingConnection(pika.URLParameters(url)) for _ in range(3))
    channels = [first.channel() for _ in range(3)] + [second.channel() for _ in range(3)]
    for _ in range(2):
        channels[0].queue_declare(name)
    channels[0].queue_declare(name, passive=True)
    channels[0].queue_declare("", exclusive=True)
    channels[1].queue_declare(f"{name}-auto", auto_delete=True)
    channels[1].basic_cancel(channels[1].basic_consume(f"{name}-auto", lambda *said: None))
    for _ in range(2):
        channels[0].queue_delete(name)
    with pytest.raises(ChannelClosedByBroker):
        channels[3].queue_declare(f"{name}-none", passive=True)
    channels[4].close()
    wrong = pika.URLParameters(url)
    wrong.credentials = pika.PlainCredentials("guest", "wrong")
    for _ in range(2):
        with pytest.raises(ProbableAuthenticationError):
            pika.BlockingConnection(wrong)
    first.close()
    second.close()
    third.channel()
    return third


def test_connections_channels_queues_and_logins_are_counted(
    bench: Bench, broker: RealBroker
) -> None:
    def counted() -> Counts:
        lines = (line.rpartition(" ") for line in bench._lines("/metrics"))
        return {series: float(value) for series, _, value in lines if series in COME_AND_GONE}

    until = time.monotonic() + WITHIN_S
    before: Counts = {}
    while before != (before := counted()):  # front doors count what tests before have closed
        assert time.monotonic() < until
        time.sleep(AT_REST_S)
    stays = _come_and_go(broker.url, bench.name)
    while (
        grown := {key: count - before[key] for key, count in counted().items()}
    ) != COME_AND_GONE:
        assert time.monotonic() < until, grown
        time.sleep(0.2)
    stays.close()
