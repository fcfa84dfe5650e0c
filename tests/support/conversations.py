"""Conversations with a broker that have one outcome, whatever its timing.

Each is a function of the port of a fresh enough broker: a conversation cleans up its own queues or
uses exclusive ones. Where the outcome would depend on what comes first, the conversation waits.
The broker has one front door: some conversations drop a connection and at once declare its
exclusive queue again. Another front door may ask for the queue before the first one has seen the
end, and is refused (RESOURCE_LOCKED).
Two brokers, or one broker in two modes, are compared by what `seen` makes of their answers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pika
import pika.exceptions
from pamqp import base, commands

from tests.support.player import Player
from tests.support.raw_client import (
    HEADER,
    content_header,
    method,
    publish,
    raw_frame,
    with_properties,
)
from tests.support.seen import (
    ACK,
    CANCEL,
    CANCEL_OK,
    CHANNEL_CLOSE,
    CHANNEL_CLOSE_OK,
    CHANNEL_OPEN_OK,
    CONNECTION_CLOSE,
    CONSUME_OK,
    DELIVER,
    GET_OK,
    RETURN,
)

Conversation = Callable[[int], None]

QOS_OK, GET_EMPTY, RECOVER_OK, FLOW_OK = (60, 11), (60, 72), (60, 111), (20, 21)
DECLARE_OK, BIND_OK, UNBIND_OK, PURGE_OK, DELETE_OK = (
    (50, 11),
    (50, 21),
    (50, 51),
    (50, 31),
    (50, 41),
)
EXCHANGE_DECLARE_OK, EXCHANGE_DELETE_OK = (40, 11), (40, 21)
CONFIRM_OK, TX_OK, COMMIT_OK, ROLLBACK_OK = (85, 11), (90, 11), (90, 21), (90, 31)
HEARTBEAT_FRAME = raw_frame(8, 0, b"")
FRAME_BODY_MAX = 131072 - 8

basic, queue, exchange = commands.Basic, commands.Queue, commands.Exchange


# -- shorter words ---------------------------------------------------------------------------------


def declare(player: Player, name: str, channel: int = 1, **how: object) -> None:
    said = queue.Declare(queue=name, **{"exclusive": True, **how})  # type: ignore[arg-type]
    player.ask(channel, said, DECLARE_OK)


def consume(player: Player, name: str, tag: str, channel: int = 1, **how: object) -> None:
    said = basic.Consume(queue=name, consumer_tag=tag, **how)  # type: ignore[arg-type]
    player.ask(channel, said, CONSUME_OK)


def confirm(player: Player, channel: int = 1) -> None:
    player.ask(channel, commands.Confirm.Select(), CONFIRM_OK)


def ack(channel: int, tag: int, *, multiple: bool = False) -> bytes:
    return method(channel, basic.Ack(tag, multiple))


def nack(channel: int, tag: int, *, multiple: bool = False, requeue: bool = True) -> bytes:
    return method(channel, basic.Nack(tag, multiple, requeue))


def reject(channel: int, tag: int, *, requeue: bool) -> bytes:
    return method(channel, basic.Reject(tag, requeue))


def settled(player: Player, channel: int = 1) -> None:
    """Wait until the broker has read what was sent on a channel before."""
    player.ask(channel, basic.Qos(prefetch_count=0), QOS_OK)


def closed_with_error(player: Player, channel: int, *data: bytes) -> None:
    """Send something for which the broker closes the channel; open it again."""
    before = player.heard(channel, CHANNEL_CLOSE)
    player.send(*data)
    player.wait(channel, CHANNEL_CLOSE, before + 1)
    player.send(method(channel, commands.Channel.CloseOk()))
    player.ask(channel, commands.Channel.Open(), CHANNEL_OPEN_OK)


@contextmanager
def warm(port: int, name: str, channels: int = 2) -> Iterator[Player]:
    """Yield a client whose publishes to its queue `name` have gone their way a few times.

    Channel 1 consumes without acks, channel 2 publishes with confirms; three messages have passed.
    """
    with Player(port, channels=channels) as player:
        declare(player, name)
        consume(player, name, "warm", no_ack=True)
        confirm(player, 2)
        for number in range(1, 4):
            player.send(publish(2, "", name, b"warm %d" % number))
            player.wait(1, DELIVER, number)
            player.wait(2, ACK, number)
        yield player


# -- publishes -------------------------------------------------------------------------------------


def publishes_with_confirms_by_pika(port: int) -> None:
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    channel = connection.channel()
    channel.queue_declare("pika.q", durable=True)
    channel.confirm_delivery()
    sizes = (0, 1, 15, 16, 1024, FRAME_BODY_MAX - 1, FRAME_BODY_MAX, FRAME_BODY_MAX + 1, 700_001)
    properties = [
        None,
        pika.BasicProperties(delivery_mode=2),
        pika.BasicProperties(
            content_type="text/plain", headers={"n": 1, "list": ["a", None]}, priority=3,
            correlation_id="c", reply_to="r", message_id="m", timestamp=1, type="t", app_id="a",
        ),
    ]  # fmt: skip
    bodies = [bytes([n % 251]) * size for n, size in enumerate(sizes)]
    count = 0
    for each in properties:
        for body in bodies:
            channel.basic_publish("", "pika.q", body, each)
            count += 1
    for got, (_, _, body) in enumerate(
        channel.consume("pika.q", consumer_tag="ctag", inactivity_timeout=60), 1
    ):
        assert body is not None
        if got == count:
            break
    channel.basic_ack(0, multiple=True)
    channel.cancel()
    channel.queue_delete("pika.q")
    connection.close()


def one_at_a_time(port: int) -> None:
    with warm(port, "one") as player:
        for number in range(4, 40):
            player.send(publish(2, "", "one", b"%d" % number))
            player.wait(1, DELIVER, number)
            player.wait(2, ACK, number)


def persistent_one_at_a_time(port: int) -> None:
    with Player(port, channels=2) as player:
        declare(player, "stays", exclusive=False, durable=True)
        consume(player, "stays", "c")
        confirm(player, 2)
        for number in range(1, 30):
            player.send(with_properties(2, "", "stays", b"%d" % number, delivery_mode=2))
            player.wait(1, DELIVER, number)
            player.wait(2, ACK, number)
            player.send(ack(1, number))
        player.ask(1, queue.Delete(queue="stays"), DELETE_OK)
        player.wait(1, CANCEL)


def bursts(port: int) -> None:
    """Many publishes in one write, writes that are cut anywhere, and both again."""
    with warm(port, "burst") as player:
        count = 3
        for burst in (400, 7, 60):
            data = b"".join(publish(2, "", "burst", b"%d" % n) for n in range(burst))
            if burst == 400:
                player.send(data)
            else:
                player.send_in_pieces(data, [1, 2, 5, 13] * 10)
            count += burst
            player.wait(1, DELIVER, count)
            player.wait(2, ACK, count)


def large_and_empty_bodies(port: int) -> None:
    with warm(port, "sizes") as player:
        for number, size in enumerate((0, FRAME_BODY_MAX, 0, 1_500_000, 1, 0, 300_000, 16_384), 4):
            player.send(publish(2, "", "sizes", bytes([number]) * size))
            player.wait(1, DELIVER, number)
            player.wait(2, ACK, number)


def bodies_in_small_frames(port: int) -> None:
    with warm(port, "pieces") as player:
        said = method(2, basic.Publish(exchange="", routing_key="pieces"))
        for number, pieces in enumerate(([1] * 30, [5, 0, 5], [100, 1, 100], [50]), 4):
            bodies = b"".join(raw_frame(3, 2, b"y" * size) for size in pieces if size)
            player.send(said, content_header(2, sum(pieces)), bodies)
            player.wait(1, DELIVER, number)
            player.wait(2, ACK, number)


def interleaved_frames(port: int) -> None:
    """Mix the frames of two channels' publishes, with heartbeats between them."""
    with warm(port, "mixed", channels=3) as player:
        confirm(player, 3)
        for turn in range(4):
            parts = [
                [
                    method(channel, basic.Publish(exchange="", routing_key="mixed")),
                    content_header(channel, 20),
                    raw_frame(3, channel, bytes([channel]) * 10),
                    raw_frame(3, channel, bytes([turn]) * 10),
                ]
                for channel in (2, 3)
            ]
            mixed = [
                frame for pair in zip(*parts, strict=True) for frame in (*pair, HEARTBEAT_FRAME)
            ]
            player.send(*mixed)
            player.wait(1, DELIVER, 3 + 2 * (turn + 1))
            player.wait(2, ACK, 4 + turn)
            player.wait(3, ACK, 1 + turn)


def mandatory_publishes(port: int) -> None:
    with warm(port, "there") as player:
        sent = 3
        for key, routed in (
            ("there", True),
            ("nowhere", False),
            ("there", True),
            ("nowhere", False),
        ):
            returned = player.heard(2, RETURN)
            player.send(publish(2, "", key, b"to " + key.encode(), mandatory=True))
            sent += 1
            player.wait(2, ACK, sent)
            player.wait(2, RETURN, returned + (not routed))
        player.wait(1, DELIVER, 5)
        player.send(
            *(publish(2, "", key, b"m", mandatory=True) for key in ("nowhere", "there") * 20)
        )
        player.wait(2, ACK, sent + 40)
        player.wait(2, RETURN, 22)
        player.wait(1, DELIVER, 25)


def properties_of_all_kinds(port: int) -> None:
    headers = {"a": [1, {"b": None}], "CC": ["props.other"], "t": True}
    with warm(port, "props") as player:
        declare(player, "props.other")
        consume(player, "props.other", "other", no_ack=True)
        for number, (key, properties) in enumerate(
            (
                ("props", {"headers": headers}),
                ("props", {"priority": 9, "message_id": "m", "app_id": "a"}),
                ("props", {"expiration": "60000"}),
                ("props", {"user_id": "guest"}),
                ("props.other", {"headers": {"BCC": ["props"]}}),
                ("props.other", {"delivery_mode": 2, "content_encoding": "x" * 255}),
            ),
            4,
        ):
            player.send(with_properties(2, "", key, b"body", **properties))
            player.wait(2, ACK, number)
        player.wait(1, DELIVER, 3 + 4 + 1 + 1 + 1 + 1)


def publishes_that_are_refused(port: int) -> None:
    with warm(port, "refused", channels=3) as player:
        bad_user = with_properties(3, "", "refused", b"x", user_id="somebody")
        bad_expiration = with_properties(3, "", "refused", b"x", expiration="soon")
        closed_with_error(player, 3, publish(3, "", "refused", b"well") + bad_user)
        closed_with_error(player, 3, bad_expiration)
        closed_with_error(player, 3, publish(3, "no.such.exchange", "refused", b"x"))
        closed_with_error(player, 3, publish(3, "", "refused", b"well") * 3 + bad_user * 2)
        player.wait(1, DELIVER, 3 + 1 + 3)
        player.send(publish(3, "", "refused", b"well again"))
        player.wait(1, DELIVER, 8)


# -- routes ----------------------------------------------------------------------------------------


def routes_that_change(port: int) -> None:
    """Use a route often, take it away, and bring it back."""
    with Player(port, channels=3) as player:
        player.ask(
            1, exchange.Declare(exchange="ways", exchange_type="direct"), EXCHANGE_DECLARE_OK
        )
        for name in ("way.a", "way.b"):
            declare(player, name)
            consume(player, name, name, no_ack=True)
        confirm(player, 2)
        sent = arrived = 0

        def passes(copies: int) -> None:
            nonlocal sent, arrived
            for _ in range(3):
                player.send(publish(2, "ways", "k", b"%d" % sent, mandatory=True))
                sent, arrived = sent + 1, arrived + copies
                player.wait(2, ACK, sent)
                player.wait(1, DELIVER, arrived)

        passes(0)
        for name, copies in (("way.a", 1), ("way.b", 2)):
            player.ask(3, queue.Bind(queue=name, exchange="ways", routing_key="k"), BIND_OK)
            passes(copies)
        player.ask(3, queue.Unbind(queue="way.a", exchange="ways", routing_key="k"), UNBIND_OK)
        passes(1)
        player.ask(3, queue.Delete(queue="way.b"), DELETE_OK)
        player.wait(1, CANCEL)
        passes(0)
        player.ask(3, exchange.Delete(exchange="ways"), EXCHANGE_DELETE_OK)
        closed_with_error(player, 2, publish(2, "ways", "k", b"late"))


def exchanges_of_all_types(port: int) -> None:
    with Player(port, channels=2) as player:
        for kind in ("direct", "topic", "fanout", "headers"):
            name = f"all.{kind}"
            player.ask(1, exchange.Declare(exchange=name, exchange_type=kind), EXCHANGE_DECLARE_OK)
            for number in range(2):
                held = f"{name}.{number}"
                declare(player, held)
                key = {"topic": ("a.*", "a.#")[number]}.get(kind, "a.b")
                arguments = {"x-match": "all", "h": number} if kind == "headers" else {}
                bind = queue.Bind(queue=held, exchange=name, routing_key=key, arguments=arguments)
                player.ask(1, bind, BIND_OK)
                consume(player, held, held, no_ack=True)
        confirm(player, 2)
        arrived = 0
        for turn in range(3):
            for kind, copies in (("direct", 2), ("topic", 2), ("fanout", 2), ("headers", 1)):
                data = with_properties(
                    2, f"all.{kind}", "a.b", b"%d" % turn, headers={"h": turn % 2}
                )
                player.send(data)
                arrived += copies
                player.wait(1, DELIVER, arrived)
        player.wait(2, ACK, 12)
        for kind in ("direct", "topic", "fanout", "headers"):
            player.ask(1, exchange.Delete(exchange=f"all.{kind}"), EXCHANGE_DELETE_OK)


def queues_of_all_kinds(port: int) -> None:
    """Queues with limits, times, priorities, deduplication and logs are not the plain ones."""
    kinds: tuple[tuple[str, dict[str, object]], ...] = (
        ("max", {"x-max-length": 2}),
        ("refusing", {"x-max-length": 1, "x-overflow": "reject-publish"}),
        ("bytes", {"x-max-length-bytes": 10}),
        ("priorities", {"x-max-priority": 5}),
        ("single", {"x-single-active-consumer": True}),
        (
            "ttl",
            {"x-message-ttl": 0, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"},
        ),
    )
    with Player(port, channels=3) as player:
        declare(player, "dead")
        confirm(player, 2)
        sent = 0
        for name, arguments in kinds:
            declare(player, name, arguments=arguments)
            for number in range(4):
                priority = {"priority": number} if name == "priorities" else {}
                player.send(
                    with_properties(2, "", name, b"%s %d" % (name.encode(), number), **priority)
                )
                sent += 1
                player.wait(2, ACK, sent)
        consume(player, "dead", "dead", no_ack=True)
        player.wait(1, DELIVER, 4)
        for name, count in (
            ("max", 2),
            ("refusing", 1),
            ("bytes", 1),
            ("priorities", 4),
            ("single", 4),
        ):
            arrived = player.heard(1, DELIVER)
            consume(player, name, name, no_ack=True)
            player.wait(1, DELIVER, arrived + count)
        arrived = player.heard(1, DELIVER)
        for number, (name, _) in enumerate(kinds[:-1], 1):
            player.send(publish(2, "", name, b"with a consumer"))
            player.wait(2, ACK, sent + number)
            player.wait(1, DELIVER, arrived + number)


def a_stream(port: int) -> None:
    with Player(port, channels=2) as player:
        declare(player, "log", exclusive=False, durable=True, arguments={"x-queue-type": "stream"})
        confirm(player, 2)
        for number in range(1, 6):
            player.send(publish(2, "", "log", b"%d" % number))
            player.wait(2, ACK, number)
        player.ask(1, basic.Qos(prefetch_count=10), QOS_OK)
        consume(player, "log", "reader", arguments={"x-stream-offset": "first"})
        player.wait(1, DELIVER, 5)
        player.send(ack(1, 5, multiple=True))
        for number in range(6, 12):
            player.send(publish(2, "", "log", b"%d" % number))
            player.wait(2, ACK, number)
            player.wait(1, DELIVER, number)
            player.send(ack(1, number))
        player.ask(1, queue.Delete(queue="log"), DELETE_OK)
        player.wait(1, CANCEL)


# -- consuming -------------------------------------------------------------------------------------


def acks_of_all_kinds(port: int) -> None:
    with Player(port, channels=2) as player:
        declare(player, "acks")
        confirm(player, 2)
        consume(player, "acks", "c")
        for number in range(1, 21):
            player.send(publish(2, "", "acks", b"%d" % number))
            player.wait(1, DELIVER, number)
        player.wait(2, ACK, 20)
        player.send(ack(1, 1), ack(1, 2), ack(1, 4, multiple=True), reject(1, 5, requeue=False))
        player.send(nack(1, 6, requeue=False), nack(1, 8, multiple=True, requeue=False))
        settled(player)
        player.send(reject(1, 10, requeue=True))
        player.wait(1, DELIVER, 21)
        player.send(nack(1, 9))
        player.wait(1, DELIVER, 22)
        player.send(nack(1, 12, multiple=True))
        player.wait(1, DELIVER, 24)
        player.send(*(ack(1, tag) for tag in (24, 20, 13, 19)), ack(1, 18, multiple=True))
        player.ask(1, basic.Recover(requeue=True), RECOVER_OK)
        player.wait(1, DELIVER, 27)
        player.send(ack(1, 0, multiple=True))
        settled(player)
        declare(player, "acks", passive=True)
        closed_with_error(player, 1, ack(1, 27))
        closed_with_error(player, 1, ack(1, 1))
        closed_with_error(player, 1, nack(1, 5, multiple=True))
        closed_with_error(player, 1, reject(1, 3, requeue=True))


def an_unknown_ack_amid_good_ones(port: int) -> None:
    for number, bad in enumerate((ack(1, 2), ack(1, 99), ack(1, 2, multiple=True), nack(1, 4))):
        amid = f"amid.{number}"  # the connection before, and its queue, may not be gone yet
        with Player(port, channels=2) as player:
            declare(player, amid)
            consume(player, amid, "c")
            player.send(*(publish(2, "", amid, b"%d" % n) for n in range(6)))
            player.wait(1, DELIVER, 6)
            if bad == nack(1, 4):
                player.send(ack(1, 4))
            closed_with_error(player, 1, ack(1, 1), ack(1, 2), bad, ack(1, 3))
            consume(player, amid, "again")
            player.wait(1, DELIVER, 6 + (3 if bad == nack(1, 4) else 4))


def prefetch(port: int) -> None:
    for count, shared in ((1, False), (3, False), (2, True)):
        few = f"few.{count}"
        with Player(port, channels=2) as player:
            declare(player, few)
            player.ask(1, basic.Qos(prefetch_count=count, global_=shared), QOS_OK)
            consume(player, few, "c")
            player.send(*(publish(2, "", few, b"%d" % n) for n in range(12)))
            for number in range(1, 13):
                player.wait(1, DELIVER, min(12, number + count - 1))
                player.send(ack(1, number))
            settled(player)
            for number in range(13, 19):
                player.send(publish(2, "", few, b"%d" % number))
                player.wait(1, DELIVER, number)
                player.send(ack(1, number) if number % 2 else nack(1, number, requeue=False))


def gets(port: int) -> None:
    with Player(port, channels=2) as player:
        declare(player, "got")
        confirm(player, 2)
        player.ask(1, basic.Get(queue="got"), GET_EMPTY)
        for number in range(1, 9):
            player.send(publish(2, "", "got", b"%d" % number))
            player.wait(2, ACK, number)
        for number in range(1, 6):
            player.ask(1, basic.Get(queue="got", no_ack=number % 2 == 0), GET_OK)
        player.send(ack(1, 1), nack(1, 3))
        settled(player)
        for _ in range(4):
            player.ask(1, basic.Get(queue="got"), GET_OK)
        player.ask(1, basic.Get(queue="got"), GET_EMPTY)
        player.ask(1, basic.Recover(requeue=True), RECOVER_OK)
        player.ask(1, basic.Get(queue="got"), GET_OK)
        declare(player, "got", passive=True)
        player.ask(1, queue.Purge(queue="got"), PURGE_OK)
        player.ask(1, queue.Delete(queue="got"), DELETE_OK)


def cancels(port: int) -> None:
    with warm(port, "cancelled", channels=3) as player:
        player.ask(1, basic.Cancel("warm"), CANCEL_OK)
        for number in range(4, 9):
            player.send(publish(2, "", "cancelled", b"%d" % number))
            player.wait(2, ACK, number)
        consume(player, "cancelled", "warm")
        player.wait(1, DELIVER, 8)
        player.ask(1, basic.Cancel("warm"), CANCEL_OK)
        player.send(nack(1, 8, multiple=True))
        settled(player)
        consume(player, "cancelled", "next", 3, no_ack=True)
        player.wait(3, DELIVER, 5)
        player.send(publish(2, "", "cancelled", b"last"))
        player.wait(3, DELIVER, 6)
        player.ask(1, queue.Delete(queue="cancelled"), DELETE_OK)
        player.wait(3, CANCEL, 1)
        closed_with_error(player, 1, method(1, basic.Consume(queue="cancelled", consumer_tag="c")))


def consumers_in_turn(port: int) -> None:
    """Two consumers of one queue get messages in turn when they come one at a time."""
    with Player(port, channels=3) as player:
        declare(player, "turns")
        confirm(player, 3)
        consume(player, "turns", "a")
        consume(player, "turns", "b", 2)
        for number in range(1, 13):
            player.send(publish(3, "", "turns", b"%d" % number))
            player.wait(3, ACK, number)
            player.wait(1, DELIVER, (number + 1) // 2)
            player.wait(2, DELIVER, number // 2)


def a_channel_closes_with_unacknowledged_messages(port: int) -> None:
    with Player(port, channels=3) as player:
        declare(player, "left")
        consume(player, "left", "first", 2)
        player.send(*(publish(1, "", "left", b"%d" % n) for n in range(10)))
        player.wait(2, DELIVER, 10)
        player.send(ack(2, 2), ack(2, 5))
        player.ask(2, commands.Channel.Close(200, "bye", 0, 0), CHANNEL_CLOSE_OK)
        consume(player, "left", "second", 3)
        player.wait(3, DELIVER, 8)
        player.ask(2, commands.Channel.Open(), CHANNEL_OPEN_OK)
        player.send(publish(2, "", "left", b"of a new life"))
        player.wait(3, DELIVER, 9)


def a_connection_dies_amid_a_message(port: int) -> None:
    """Die with an unfinished publish and a message that was not acknowledged."""
    with Player(port, channels=2) as witness:
        declare(witness, "mourned", exclusive=False)
        whole = publish(2, "", "mourned", b"unfinished" * 10)
        for cut in (3, 30, len(whole) - 40, len(whole) - 1):
            with Player(port, channels=2) as player:
                consume(player, "mourned", "c")
                player.send(publish(2, "", "mourned", b"whole"))
                player.wait(1, DELIVER, 1)
                player.send(whole[:cut])
            before = witness.heard(1, DELIVER)
            consume(witness, "mourned", "w", no_ack=True)
            witness.wait(1, DELIVER, before + 1)
            witness.ask(1, basic.Cancel("w"), CANCEL_OK)
        witness.ask(1, queue.Delete(queue="mourned"), DELETE_OK)


def requests_and_direct_replies(port: int) -> None:
    with Player(port, channels=2) as server, Player(port, channels=2) as client:
        declare(server, "calls", exclusive=False, auto_delete=True)
        consume(server, "calls", "server", no_ack=True)
        consume(client, "amq.rabbitmq.reply-to", "replies", no_ack=True)
        for number in range(1, 10):
            client.send(
                with_properties(
                    1, "", "calls", b"%d" % number, reply_to="amq.rabbitmq.reply-to",
                    correlation_id=str(number),
                )
            )  # fmt: skip
            server.wait(1, DELIVER, number)
        closed_with_error(client, 1, method(1, basic.Get(queue="amq.rabbitmq.reply-to")))


# -- transactions ----------------------------------------------------------------------------------


def transactions(port: int) -> None:
    with warm(port, "tx", channels=4) as player:
        player.ask(3, commands.Tx.Select(), TX_OK)
        player.send(publish(3, "", "tx", b"taken back") * 3)
        player.ask(3, commands.Tx.Rollback(), ROLLBACK_OK)
        player.send(publish(3, "", "tx", b"committed") * 3)
        player.ask(3, commands.Tx.Commit(), COMMIT_OK)
        player.wait(1, DELIVER, 6)
        player.ask(1, basic.Cancel("warm"), CANCEL_OK)
        player.send(publish(2, "", "tx", b"to acknowledge") * 4)
        player.wait(2, ACK, 7)
        player.ask(4, commands.Tx.Select(), TX_OK)
        consume(player, "tx", "c", 4)
        player.wait(4, DELIVER, 4)
        player.send(ack(4, 2, multiple=True))
        player.ask(4, commands.Tx.Rollback(), ROLLBACK_OK)
        player.send(ack(4, 1), nack(4, 4, requeue=False), publish(4, "", "tx", b"new"))
        player.ask(4, commands.Tx.Commit(), COMMIT_OK)
        player.wait(4, DELIVER, 5)
        closed_with_error(player, 4, method(4, commands.Confirm.Select()))


# -- channels and connections ----------------------------------------------------------------------


def many_channels(port: int) -> None:
    count = 60
    with Player(port, channels=count) as player:
        for channel in range(1, count, 2):
            declare(player, f"many.{channel}", channel)
            consume(player, f"many.{channel}", "c", channel)
            confirm(player, channel + 1)
        for turn in range(1, 4):
            player.send(
                *(
                    publish(channel + 1, "", f"many.{channel}", b"%d" % turn)
                    for channel in range(1, count, 2)
                )
            )
            for channel in range(1, count, 2):
                player.wait(channel, DELIVER, turn)
                player.wait(channel + 1, ACK, turn)
            player.send(*(ack(channel, turn) for channel in range(1, count, 2)))


def heartbeats(port: int) -> None:
    """Ask for heartbeats, and send some between the frames of messages."""
    with Player(port, channels=2, heartbeat=1) as player:
        declare(player, "beats")
        consume(player, "beats", "c", no_ack=True)
        said = method(2, basic.Publish(exchange="", routing_key="beats"))
        for number in range(1, 6):
            parts = (said, content_header(2, 4), raw_frame(3, 2, b"beat"))
            player.send(*(HEARTBEAT_FRAME + part for part in parts))
            player.wait(1, DELIVER, number)


def flow_and_recover(port: int) -> None:
    with warm(port, "flows") as player:
        player.ask(1, commands.Channel.Flow(True), FLOW_OK)
        player.ask(2, commands.Channel.Flow(True), FLOW_OK)
        player.send(publish(2, "", "flows", b"on"))
        player.wait(1, DELIVER, 4)
        player.wait(2, ACK, 4)


def refused_methods(port: int) -> None:
    """Make mistakes on one channel while others publish and consume."""
    mistakes: tuple[base.Frame, ...] = (
        queue.Declare(queue="no.such", passive=True),
        queue.Declare(queue="mistakes", durable=True),
        queue.Declare(queue="amq.mine"),
        queue.Bind(queue="mistakes", exchange="no.such", routing_key="k"),
        exchange.Declare(exchange="amq.direct", exchange_type="fanout"),
        basic.Consume(queue="no.such"),
        basic.Get(queue="no.such"),
        queue.Purge(queue="no.such"),
        commands.Tx.Commit(),
    )
    with warm(port, "mistakes", channels=3) as player:
        for number, mistake in enumerate(mistakes, 4):
            closed_with_error(player, 3, method(3, mistake))
            player.send(publish(2, "", "mistakes", b"%d" % number))
            player.wait(1, DELIVER, number)
            player.wait(2, ACK, number)


def _bad_inputs(name: str) -> tuple[tuple[bytes, ...], ...]:
    """Return what no client may send, each with something right for the queue `name` before it."""
    good = publish(2, "", name, b"right")
    said = method(2, basic.Publish(exchange="", routing_key=name))
    head, body = content_header(2, 4), raw_frame(3, 2, b"body")
    line = struct.pack(">HHHBB", 60, 40, 0, 0, len(name)) + name.encode()
    return (
        (good, raw_frame(1, 2, struct.pack(">HH", 60, 40))),
        (good, raw_frame(3, 2, b"no method")),
        (good, content_header(2, 3)),
        (good, said, body),
        (good, said, said),
        (good, said, head, said),
        (good, said, head, raw_frame(3, 2, b"too long")),
        (good, said, raw_frame(2, 2, struct.pack(">HHQH", 50, 0, 4, 0)), body),
        (good, said, raw_frame(2, 2, struct.pack(">HHQ", 60, 0, 4))),
        (good, said, raw_frame(2, 2, struct.pack(">HHQH", 60, 0, 4, 0x8000) + b"\x09ab")),
        (good, raw_frame(1, 2, line + b"\x02"), head, body),
        (good, raw_frame(1, 2, line + b"\0\0")),
        (good, raw_frame(1, 2, line[:-1])),
        (good, said[:-1] + b"\0"),
        (good, said, head[:-1] + b"\0"),
        (good, said, head, body[:-1] + b"\xcd"),
        (good, raw_frame(9, 2, b"")),
        (good, raw_frame(8, 2, b"")),
        (good, struct.pack(">BHI", 3, 2, 1 << 30)),
        (good, publish(9, "", name, b"on a channel that is not open")),
        (good, publish(0, "", name, b"on channel 0")),
        (good, raw_frame(1, 2, struct.pack(">HH", 60, 99))),
        (good, raw_frame(1, 2, struct.pack(">HH", 99, 1))),
        (good, raw_frame(1, 2, struct.pack(">HHQ", 60, 80, 1))),
        (good, raw_frame(1, 2, b"")),
        (good, method(2, basic.Deliver("c", 1, False, "", ""))),
        (good, method(2, commands.Channel.Open())),
        (good, HEADER),
    )


def bad_input(port: int) -> None:
    """For each mistake the broker says what it always says, and others do not notice."""
    with warm(port, "others") as others:
        for number in range(4, 4 + len(_bad_inputs(""))):
            bad = f"bad.{number}"  # the connection before, and its queue, may not be gone yet
            parts = _bad_inputs(bad)[number - 4]
            with Player(port, channels=2) as player:
                declare(player, bad)
                consume(player, bad, "c", no_ack=True)
                player.send(parts[0])
                player.wait(1, DELIVER, 1)
                player.send(*parts)
                player.wait(0, CONNECTION_CLOSE)
            others.send(publish(2, "", "others", b"%d" % number))
            others.wait(1, DELIVER, number)


def bad_beginnings(port: int) -> None:
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"AMQP\x01\x01\x00\x09",
        b"AMQP\x00\x00\x09\x00",
        b"\0" * 8,
    ):
        with Player(port, channels=0) as player:
            player.send(data)
            player.wait_for_header()


CONVERSATIONS: tuple[Conversation, ...] = (
    publishes_with_confirms_by_pika,
    one_at_a_time,
    persistent_one_at_a_time,
    bursts,
    large_and_empty_bodies,
    bodies_in_small_frames,
    interleaved_frames,
    mandatory_publishes,
    properties_of_all_kinds,
    publishes_that_are_refused,
    routes_that_change,
    exchanges_of_all_types,
    queues_of_all_kinds,
    a_stream,
    acks_of_all_kinds,
    an_unknown_ack_amid_good_ones,
    prefetch,
    gets,
    cancels,
    consumers_in_turn,
    a_channel_closes_with_unacknowledged_messages,
    a_connection_dies_amid_a_message,
    requests_and_direct_replies,
    transactions,
    many_channels,
    heartbeats,
    flow_and_recover,
    refused_methods,
    bad_input,
    bad_beginnings,
)
