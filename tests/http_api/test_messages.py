"""Messages go in and out by HTTP as they do by AMQP."""

from __future__ import annotations

from typing import Any

import pika
import pika.exceptions
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.support import vhosts
from tests.support.real_broker import wait_until
from tests.support.vhosts import Api, waiting

api, channel, user, vhost = vhosts.api, vhosts.channel, vhosts.user, vhosts.vhost


def message(
    key: str = "q", payload: str = "hi", encoding: str = "string", **properties: Any
) -> dict[str, Any]:
    return {
        "properties": properties,
        "routing_key": key,
        "payload": payload,
        "payload_encoding": encoding,
    }


def wanted(mode: str = "ack_requeue_true", count: int = 1, **more: Any) -> dict[str, Any]:
    return {"count": count, "ackmode": mode, "encoding": "auto", **more}


@pytest.mark.row("G1.9", "L9")
def test_what_is_published_by_http_is_a_message_like_any_other(
    api: Api, vhost: str, channel: BlockingChannel
) -> None:
    channel.queue_declare("q")
    path = f"exchanges/{vhost}/amq.default/publish"
    headers = {
        "text": "t",
        "number": 2**40,
        "yes": True,
        "list": [1, "a"],
        "table": {"x": "y"},
        "none": None,
    }
    properties = {
        "delivery_mode": 2,
        "content_type": "text/plain",
        "headers": headers,
        "timestamp": 5,
        "priority": 3,
    }
    assert api("POST", path, message(payload="ü€", **properties)) == {"routed": True}
    assert api("POST", path, message(payload="AAH/", encoding="base64")) == {"routed": True}
    assert api("POST", path, message("nowhere")) == {"routed": False}
    _, props, body = channel.basic_get("q", True)
    assert body.decode() == "ü€"
    assert (props.delivery_mode, props.content_type, props.headers) == (2, "text/plain", headers)
    assert (props.timestamp, props.priority) == (5, 3)
    assert channel.basic_get("q", True)[2] == b"\x00\x01\xff"
    big = "x" * 3_000_000
    assert api("POST", path, message(payload=big)) == {"routed": True}
    assert channel.basic_get("q", True)[2] == big.encode()


@pytest.mark.row("G1.9")
@pytest.mark.parametrize(
    ("exchange", "body", "answer"),
    [
        ("absent", message(), (400, "404 NOT_FOUND - no exchange 'absent' in vhost '{v}'")),
        ("amq.default", {},
         (400, "[{{key_missing,routing_key}},{{key_missing,properties}},{{key_missing,payload}},"
                                  "{{key_missing,payload_encoding}}]")),
        ("amq.default", message() | {"payload": 3}, (400, "payload_not_string")),
        ("amq.default", message(payload="!!", encoding="base64"), (400, "not_base64: !!")),
        ("amq.default", message(encoding="z"), (400, "unsupported_encoding: z")),
        ("amq.default", message(user_id="x"),
         (400,
          "406 PRECONDITION_FAILED - user_id property set to 'x' but authenticated user was "
          "'guest'")),
        ("amq.default", message(priority="x"), (400, "priority: not a number from 0 to 255")),
        ("amq.default", message(expiration=5),
         (400, "expiration: not a string of at most 255 bytes")),
        ("amq.default", message(headers=[]), (400, "headers: not an object")),
    ],
)  # fmt: skip
def test_what_cannot_be_published_is_refused_with_a_reason(
    api: Api, vhost: str, exchange: str, body: Any, answer: tuple[int, str]
) -> None:
    found = api.refused("POST", f"exchanges/{vhost}/{exchange}/publish", body)
    assert found == (answer[0], answer[1].format(v=vhost))


@pytest.mark.row("G1.14")
def test_get_shows_messages_and_does_with_them_what_was_asked(
    api: Api, vhost: str, channel: BlockingChannel
) -> None:
    channel.queue_declare("q")
    path = f"queues/{vhost}/q/get"
    assert api("POST", path, wanted()) == []
    for body in (b"one", b"\x00\x01\xff", b"three"):
        channel.basic_publish("", "q", body, pika.BasicProperties(message_id="m"))
    wait_until(lambda: waiting(channel, "q") == 3, "the messages")
    first = {
        "payload_bytes": 3, "redelivered": False, "exchange": "", "routing_key": "q",
        "message_count": 2, "properties": {"message_id": "m"}, "payload": "one",
        "payload_encoding": "string",
    }  # fmt: skip
    assert api("POST", path, wanted()) == [first]
    again = api("POST", path, wanted(count=5))
    assert again[0] == first | {"redelivered": True}
    assert [row["payload"] for row in again] == ["one", "AAH/", "three"]
    assert [row["payload_encoding"] for row in again] == ["string", "base64", "string"]
    assert api("POST", path, wanted(truncate=2))[0] | {"payload": "on"} == again[0] | {
        "payload": "on"
    }
    assert api("POST", path, wanted("reject_requeue_true"))[0]["payload"] == "one"
    assert api("POST", path, wanted("reject_requeue_false"))[0]["payload"] == "one"
    assert api("POST", path, wanted("ack_requeue_false", count=-1))[0]["payload"] == "AAH/"
    assert api("POST", path, wanted()) == []


@pytest.mark.row("G1.14")
@pytest.mark.parametrize(
    ("queue", "body", "answer"),
    [
        ("absent", wanted(), (404, "NOT_FOUND - no queue 'absent' in vhost '{v}'")),
        (
            "absent",
            {},
            (400, "[{{key_missing,ackmode}},{{key_missing,count}},{{key_missing,encoding}}]"),
        ),
        ("absent", wanted(encoding="z"), (400, "Unsupported encoding. Please use auto or base64.")),
        (
            "absent",
            wanted(truncate=-1),
            (400, "truncate: not a number from 0 to 9223372036854775807"),
        ),
    ],
)
def test_what_cannot_be_got_is_refused_with_a_reason(
    api: Api, vhost: str, queue: str, body: Any, answer: tuple[int, str]
) -> None:
    found = api.refused("POST", f"queues/{vhost}/{queue}/get", body)
    assert found == (answer[0], answer[1].format(v=vhost))


@pytest.mark.row("G1.9", "G1.14", "I5")
def test_messages_by_http_need_the_rights_of_their_user(
    api: Api, vhost: str, user: str, channel: BlockingChannel
) -> None:
    channel.queue_declare("q")
    api("PUT", f"permissions/{vhost}/{user}", {"configure": "", "write": "", "read": ""})
    login = f"{user}:{user}"
    thing = f"in vhost '{vhost}' refused for user '{user}'"
    refused = api.refused("POST", f"exchanges/{vhost}/amq.topic/publish", message(), login)
    assert refused == (400, f"403 ACCESS_REFUSED - write access to exchange 'amq.topic' {thing}")
    refused = api.refused("POST", f"queues/{vhost}/q/get", wanted(), login)
    assert refused == (401, f"ACCESS_REFUSED - read access to queue 'q' {thing}")
    assert api.refused("POST", "exchanges/%2F/amq.topic/publish", message(), login) == (
        401,
        "Access refused.",
    )
    assert api("GET", "connections") is not None and not [
        c for c in api("GET", "connections") if c["user"] == user
    ]


@pytest.mark.row("G1.2")
def test_aliveness_is_a_message_that_goes_in_and_comes_out(api: Api, vhost: str) -> None:
    assert api("GET", f"aliveness-test/{vhost}") == {"status": "ok"}
    assert api("GET", f"aliveness-test/{vhost}") == {"status": "ok"}
