"""Errors have RabbitMQ's codes and its texts to the letter, because people search for them."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable

import pika
import pika.exceptions
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.support.real_broker import RealBroker

Act = Callable[[BlockingChannel, str], object]

LOCKED = (
    "RESOURCE_LOCKED - cannot obtain exclusive access to locked queue '{n}' in vhost '/'. It could "
    "be originally declared on another connection or the exclusive property value does not match "
    "that of the original declaration."
)


def _twice(first: Act, second: Act) -> Act:
    def act(channel: BlockingChannel, name: str) -> object:
        first(channel, name)
        return second(channel, name)

    return act


def _declare(**how: object) -> Act:
    return lambda channel, name: channel.queue_declare(name, **how)  # type: ignore[arg-type]


def _exchange(kind: str, **how: object) -> Act:
    return lambda channel, name: channel.exchange_declare(name, kind, **how)  # type: ignore[arg-type]


def _publish(channel: BlockingChannel, name: str) -> None:
    channel.confirm_delivery()  # so that pika waits for what becomes of it
    channel.basic_publish(name, "k", b"x")


CHANNEL_ERRORS: list[tuple[str, Act, int, str]] = [
    ("passive queue", _declare(passive=True), 404, "NOT_FOUND - no queue '{n}' in vhost '/'"),
    ("passive exchange", _exchange("direct", passive=True), 404,
     "NOT_FOUND - no exchange '{n}' in vhost '/'"),
    ("publish nowhere", _publish, 404, "NOT_FOUND - no exchange '{n}' in vhost '/'"),
    ("bind nowhere", lambda c, n: c.queue_bind(n, "amq.direct", "k"), 404,
     "NOT_FOUND - no queue '{n}' in vhost '/'"),
    ("purge nothing", lambda c, n: c.queue_purge(n), 404,
     "NOT_FOUND - no queue '{n}' in vhost '/'"),
    ("consume nothing", lambda c, n: c.basic_consume(n, lambda *_: None), 404,
     "NOT_FOUND - no queue '{n}' in vhost '/'"),
    ("get nothing", lambda c, n: c.basic_get(n), 404, "NOT_FOUND - no queue '{n}' in vhost '/'"),
    ("no last queue", lambda c, n: c.queue_purge(""), 404,
     "NOT_FOUND - no previously declared queue"),
    ("reserved exchange", lambda c, n: c.exchange_declare(f"amq.{n}"), 403,
     "ACCESS_REFUSED - exchange name 'amq.{n}' contains reserved prefix 'amq.*'"),
    ("reserved queue", lambda c, n: c.queue_declare(f"amq.{n}"), 403,
     "ACCESS_REFUSED - queue name 'amq.{n}' contains reserved prefix 'amq.*'"),
    ("default exchange", lambda c, n: c.exchange_declare(""), 403,
     "ACCESS_REFUSED - operation not permitted on the default exchange"),
    ("system exchange", lambda c, n: c.exchange_delete("amq.direct"), 403,
     "ACCESS_REFUSED - deletion of system exchange 'amq.direct' in vhost '/' not allowed"),
    ("other durable queue", _twice(_declare(durable=True), _declare(durable=False)), 406,
     "PRECONDITION_FAILED - inequivalent arg 'durable' for queue '{n}' in vhost '/': received "
     "'false' but current is 'true'"),
    ("other durable exchange",
     _twice(_exchange("direct", durable=True), _exchange("direct", durable=False)), 406,
     "PRECONDITION_FAILED - inequivalent arg 'durable' for exchange '{n}' in vhost '/': received "
     "'false' but current is 'true'"),
    ("other type", _twice(_exchange("direct"), _exchange("fanout")), 406,
     "PRECONDITION_FAILED - inequivalent arg 'type' for exchange '{n}' in vhost '/': received "
     "'fanout' but current is 'direct'"),
    ("negative ttl", _declare(arguments={"x-message-ttl": -1}), 406,
     "PRECONDITION_FAILED - invalid arg 'x-message-ttl' for queue '{n}' in vhost '/': "
     "{{value_negative,-1}}"),
    ("publish internal", _twice(_exchange("direct", internal=True), _publish), 403,
     "ACCESS_REFUSED - cannot publish to internal exchange '{n}' in vhost '/'"),
    ("unknown tag", lambda c, n: (c.basic_ack(99), c.queue_declare("", exclusive=True)), 406,
     "PRECONDITION_FAILED - unknown delivery tag 99"),
    ("commit without select", lambda c, n: c.tx_commit(), 406,
     "PRECONDITION_FAILED - channel is not transactional"),
    ("confirm to tx", _twice(lambda c, n: c.confirm_delivery(), lambda c, n: c.tx_select()), 406,
     "PRECONDITION_FAILED - cannot switch from confirm to tx mode"),
    ("tx to confirm", _twice(lambda c, n: c.tx_select(), lambda c, n: c.confirm_delivery()), 406,
     "PRECONDITION_FAILED - cannot switch from tx to confirm mode"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("act", "code", "text"), [row[1:] for row in CHANNEL_ERRORS], ids=[r[0] for r in CHANNEL_ERRORS]
)
def test_a_channel_error_closes_the_channel_with_rabbitmqs_text_and_the_connection_lives(
    connection: pika.BlockingConnection, name: str, act: Act, code: int, text: str
) -> None:
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
        act(connection.channel(), name)
    assert (closed.value.reply_code, closed.value.reply_text) == (code, text.format(n=name)[:255])
    assert connection.channel().is_open


@pytest.mark.parametrize("act", [_declare(passive=True), _declare(), lambda c, n: c.queue_purge(n),
                                 lambda c, n: c.basic_get(n),
                                 lambda c, n: c.queue_delete(n)])  # fmt: skip
def test_an_exclusive_queue_is_locked_for_every_other_connection(
    broker: RealBroker, connection: pika.BlockingConnection, name: str, act: Act
) -> None:
    connection.channel().queue_declare(name, exclusive=True)
    with (
        pika.BlockingConnection(pika.URLParameters(broker.url)) as other,
        pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed,
    ):
        act(other.channel(), name)
    assert (closed.value.reply_code, closed.value.reply_text) == (405, LOCKED.format(n=name)[:255])


CONNECTION_ERRORS: list[tuple[str, Act, int, str]] = [
    (
        "prefetch size",
        lambda c, n: c.basic_qos(prefetch_size=10),
        540,
        "NOT_IMPLEMENTED - prefetch_size!=0 (10)",
    ),
    ("unknown type", _exchange("odd"), 503, "COMMAND_INVALID - unknown exchange type 'odd'"),
]


@pytest.mark.parametrize(("act", "code", "text"), [row[1:] for row in CONNECTION_ERRORS])
def test_a_hard_error_closes_the_connection(
    connection: pika.BlockingConnection, name: str, act: Act, code: int, text: str
) -> None:
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as closed:
        act(connection.channel(), name)
    assert (closed.value.reply_code, closed.value.reply_text) == (code, text)


def test_a_wrong_password_is_refused_in_words(broker: RealBroker) -> None:
    with pytest.raises(pika.exceptions.ProbableAuthenticationError) as refused:
        pika.BlockingConnection(
            pika.URLParameters(f"amqp://guest:wrong@{broker.host}:{broker.port}/")
        )
    assert "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN" in str(
        refused.value
    )


def test_a_missing_vhost_is_refused_in_words(broker: RealBroker) -> None:
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError) as refused:
        pika.BlockingConnection(
            pika.URLParameters(f"amqp://guest:guest@{broker.host}:{broker.port}/missing")
        )
    assert "NOT_ALLOWED - vhost missing not found" in str(refused.value)


# -- below the client libraries --------------------------------------------------------------------


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (part := sock.recv(count - len(data))):
        data += part
    return data


def raw(broker: RealBroker) -> socket.socket:
    sock = socket.create_connection((broker.host, broker.port), 5)
    sock.settimeout(60)  # the broker waits 5 s for a close-ok
    return sock


@pytest.mark.parametrize(
    "hello", [b"AMQP\x00\x01\x00\x00", b"AMQP\x03\x01\x00\x00", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_a_wrong_protocol_header_is_answered_by_the_right_one_and_the_end(
    broker: RealBroker, hello: bytes
) -> None:
    with raw(broker) as sock:
        sock.sendall(hello)
        assert receive_exactly(sock, 8) == b"AMQP\x00\x00\x09\x01"
        with_end = sock.recv(1) if len(hello) == 8 else b""
        assert with_end == b""


def test_connection_start_offers_both_mechanisms(broker: RealBroker) -> None:
    with raw(broker) as sock:
        sock.sendall(b"AMQP\x00\x00\x09\x01")
        kind, channel, length = struct.unpack(">BHI", receive_exactly(sock, 7))
        payload = receive_exactly(sock, length + 1)
    assert (kind, channel, payload[:6]) == (1, 0, b"\x00\x0a\x00\x0a\x00\x09")
    assert b"AMQPLAIN PLAIN" in payload
    assert payload.endswith(b"en_US\xce")


def test_garbage_after_the_header_ends_that_connection_and_no_other(
    broker: RealBroker, connection: pika.BlockingConnection
) -> None:
    """Each of them is waited for at once: none of them answers connection.close."""
    garbage = (b"\xff" * 64, bytes(64), b"\x01\x00\x00\x7f\xff\xff\xff" + b"x" * 64)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(raw(broker)) for _ in garbage]
        for sock, sent in zip(socks, garbage, strict=True):
            sock.sendall(b"AMQP\x00\x00\x09\x01" + sent)
        for sock in socks:
            try:
                while sock.recv(65536):
                    pass
            except ConnectionResetError:
                pass
    assert connection.channel().is_open
