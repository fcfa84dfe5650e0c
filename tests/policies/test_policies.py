"""Policies, limits, rights, definitions and the HTTP API's own messages, over a whole broker and pika."""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pika
import pika.exceptions
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.support.real_broker import RealBroker, wait_until

EXPORT = Path(__file__).parents[1] / "definitions" / "rabbitmq_definitions.json"
Call = Callable[..., Any]


class Api:
    def __init__(self, broker: RealBroker) -> None:
        self._base = f"http://{broker.http.replace('0.0.0.0', '127.0.0.1')}/api/"

    def __call__(self, method: str, path: str, body: Any = None, user: str = "guest:guest") -> Any:
        """Return the decoded answer of a request. Raises HTTPError when the request fails."""
        headers = {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            raw = answer.read()
            return json.loads(raw) if raw else None

    def refused(self, method: str, path: str, body: Any = None, user: str = "guest:guest") -> tuple[int, str]:
        with pytest.raises(urllib.error.HTTPError) as error:
            self(method, path, body, user)
        return error.value.code, json.loads(error.value.read())["reason"]


@pytest.fixture
def api(broker: RealBroker) -> Api:
    return Api(broker)


@pytest.fixture
def vhost(api: Api, name: str) -> Iterator[str]:
    api("PUT", f"vhosts/{name}", {})
    yield name
    api("DELETE", f"vhosts/{name}")


@pytest.fixture
def user(api: Api, name: str, vhost: str) -> Iterator[str]:
    """Yield a user who may do everything in the vhost, with their own name as password."""
    api("PUT", f"users/{name}", {"password": name, "tags": "management"})
    api("PUT", f"permissions/{vhost}/{name}", {"configure": ".*", "write": ".*", "read": ".*"})
    yield name
    api("DELETE", f"users/{name}")


def connect(broker: RealBroker, vhost: str, user: str = "guest", password: str = "") -> pika.BlockingConnection:
    credentials = pika.PlainCredentials(user, password or user)
    return pika.BlockingConnection(pika.ConnectionParameters(broker.host, broker.port, vhost, credentials))


@pytest.fixture
def channel(broker: RealBroker, vhost: str) -> Iterator[BlockingChannel]:
    connection = connect(broker, vhost)
    yield connection.channel()
    if connection.is_open:
        connection.close()


def waiting(channel: BlockingChannel, queue: str) -> int:
    count: int = channel.queue_declare(queue, passive=True).method.message_count
    return count


def publish(channel: BlockingChannel, key: str, count: int, exchange: str = "") -> None:
    channel.confirm_delivery()
    for number in range(count):
        channel.basic_publish(exchange, key, str(number).encode())


# -- policies ----------------------------------------------------------------------------------------------


@pytest.mark.row("C3.1", "C3.7", "J1", "G1.23")
def test_a_policy_drops_the_surplus_at_once_and_limits_what_comes(
    api: Api, vhost: str, channel: BlockingChannel
) -> None:
    channel.queue_declare("q")
    publish(channel, "q", 10)
    api("PUT", f"policies/{vhost}/short", {"pattern": "^q$", "definition": {"max-length": 3}})
    assert waiting(channel, "q") == 3
    publish(channel, "q", 5)
    assert waiting(channel, "q") == 3
    assert channel.basic_get("q", True)[2] == b"2", "the oldest went"
    row = api("GET", f"queues/{vhost}/q")
    assert (row["policy"], row["effective_policy_definition"]) == ("short", {"max-length": 3})
    api("DELETE", f"policies/{vhost}/short")
    publish(channel, "q", 10)
    assert waiting(channel, "q") == 12


@pytest.mark.row("C3.4", "C3.5", "J2", "G1.24")
def test_the_lowest_of_argument_policy_and_operator_policy_holds(
    api: Api, vhost: str, channel: BlockingChannel
) -> None:
    channel.queue_declare("q", arguments={"x-max-length": 8})
    api("PUT", f"policies/{vhost}/p", {"pattern": "", "definition": {"max-length": 6}})
    publish(channel, "q", 10)
    assert waiting(channel, "q") == 6
    api("PUT", f"operator-policies/{vhost}/o", {"pattern": "", "definition": {"max-length": 4}})
    assert waiting(channel, "q") == 4
    row = api("GET", f"queues/{vhost}/q")
    assert (row["policy"], row["operator_policy"]) == ("p", "o")
    assert row["effective_policy_definition"] == {"max-length": 4}
    assert channel.queue_declare("q", arguments={"x-max-length": 8}).method.message_count == 4


@pytest.mark.row("C3.1", "C1.4", "C1.3")
def test_refusing_and_expiry_by_policy(api: Api, vhost: str, channel: BlockingChannel) -> None:
    definition = {"max-length": 1, "overflow": "reject-publish"}
    api("PUT", f"policies/{vhost}/full", {"pattern": "^full", "definition": definition})
    api("PUT", f"policies/{vhost}/brief", {"pattern": "^brief", "definition": {"message-ttl": 100}})
    channel.queue_declare("full")
    channel.queue_declare("brief")
    publish(channel, "brief", 5)
    publish(channel, "full", 1)
    with pytest.raises(pika.exceptions.NackError):
        publish(channel, "full", 1)
    refused = api.refused("POST", f"exchanges/{vhost}/amq.default/publish", message("full"))
    assert refused == (400, "rejected Unable to publish message. Check queue limits.")
    wait_until(lambda: waiting(channel, "brief") == 0, "messages to expire")


@pytest.mark.row("C3.1", "C1.2")
def test_an_unused_queue_expires_by_a_policy_that_comes_later(api: Api, vhost: str, channel: BlockingChannel) -> None:
    channel.queue_declare("gone")
    channel.queue_declare("stays")
    api("PUT", f"policies/{vhost}/p", {"pattern": "^gone$", "definition": {"expires": 200}})
    wait_until(lambda: [row["name"] for row in api("GET", f"queues/{vhost}")] == ["stays"], "the queue to go")


@pytest.mark.row("B1.14", "C3.1", "C3.6")
def test_an_alternate_exchange_by_policy(api: Api, vhost: str, channel: BlockingChannel) -> None:
    channel.exchange_declare("e", "direct")
    channel.queue_declare("q")
    channel.queue_bind("q", "amq.fanout")
    publish(channel, "nowhere", 1, "e")
    body = {"pattern": "^e$", "definition": {"alternate-exchange": "amq.fanout"}, "apply-to": "exchanges"}
    api("PUT", f"policies/{vhost}/a", body)
    publish(channel, "nowhere", 1, "e")
    assert waiting(channel, "q") == 1
    assert api("GET", f"exchanges/{vhost}/e")["policy"] == "a"


@pytest.mark.row("C3.7", "J1")
def test_policies_hold_after_every_process_was_killed(broker: RealBroker, api: Api, vhost: str) -> None:
    with connect(broker, vhost) as connection:
        channel = connection.channel()
        channel.queue_declare("q", durable=True)
        api("PUT", f"policies/{vhost}/p", {"pattern": "^q", "definition": {"max-length": 2}})
    for kind, index in (("shard", 0), ("shard", 1), ("controller", 0), ("front-door", 0)):
        broker.kill(kind, index)
    with connect(broker, vhost) as connection:
        channel = connection.channel()
        publish(channel, "q", 5)
        assert waiting(channel, "q") == 2


# -- rights and limits -----------------------------------------------------------------------------------------


@pytest.mark.row("I6", "I5", "G1.22")
def test_a_changed_permission_holds_for_the_next_publish(broker: RealBroker, api: Api, vhost: str, user: str) -> None:
    with connect(broker, vhost, user) as connection:
        channel = connection.channel()
        channel.queue_declare("q")
        publish(channel, "q", 3)
        api("PUT", f"permissions/{vhost}/{user}", {"configure": "", "write": "^other", "read": ""})
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
            publish(channel, "q", 1)
        text = f"ACCESS_REFUSED - write access to exchange 'amq.default' in vhost '{vhost}' refused for user '{user}'"
        assert (closed.value.reply_code, closed.value.reply_text) == (403, text)


@pytest.mark.row("I7", "G3.2")
def test_topic_permissions_say_which_keys(broker: RealBroker, api: Api, vhost: str, user: str) -> None:
    body = {"exchange": "amq.topic", "write": "^{username}\\.", "read": "^open\\."}
    api("PUT", f"topic-permissions/{vhost}/{user}", body)
    with connect(broker, vhost, user) as connection:
        channel = connection.channel()
        channel.queue_declare("q")
        channel.queue_bind("q", "amq.topic", "open.#")
        publish(channel, f"{user}.x", 2, "amq.topic")
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
            publish(channel, "other.x", 1, "amq.topic")
        text = f"ACCESS_REFUSED - write access to topic 'other.x' in exchange 'amq.topic' in vhost '{vhost}' refused"
        assert closed.value.reply_text.startswith(text)
        channel = connection.channel()
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
            channel.queue_bind("q", "amq.topic", "secret.#")
        assert closed.value.reply_text.startswith("ACCESS_REFUSED - read access to topic 'secret.#'")
        channel = connection.channel()
        publish(channel, "anything", 1, "amq.direct")
        api("DELETE", f"topic-permissions/{vhost}/{user}")
        publish(channel, "other.x", 1, "amq.topic")


@pytest.mark.row("I8", "A4.12", "G1.27")
def test_a_vhost_has_no_more_queues_and_connections_than_allowed(broker: RealBroker, api: Api, vhost: str) -> None:
    api("PUT", f"vhost-limits/{vhost}/max-queues", {"value": 1})
    api("PUT", f"vhost-limits/{vhost}/max-connections", {"value": 2})
    first = connect(broker, vhost)
    first.channel().queue_declare("one")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
        first.channel().queue_declare("two")
    text = f"PRECONDITION_FAILED - queue limit in vhost '{vhost}' (1) is reached"
    assert (closed.value.reply_code, closed.value.reply_text) == (406, text)
    second = connect(broker, vhost)
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError) as refused:
        connect(broker, vhost)
    text = f"NOT_ALLOWED - access to vhost '{vhost}' refused for user 'guest': connection limit (2) is reached"
    assert f'(530) "{text}"' in str(refused.value)
    second.close()
    wait_until(lambda: _opens(broker, vhost), "the closed connection to be counted no more")
    first.close()


def _opens(broker: RealBroker, vhost: str) -> bool:
    try:
        connect(broker, vhost).close()
    except pika.exceptions.AMQPConnectionError:
        return False
    return True


@pytest.mark.row("I9", "G3.3", "A2.5")
def test_a_user_has_no_more_connections_and_channels_than_allowed(
    broker: RealBroker, api: Api, vhost: str, user: str
) -> None:
    api("PUT", f"user-limits/{user}/max-connections", {"value": 1})
    api("PUT", f"user-limits/{user}/max-channels", {"value": 2})
    only = connect(broker, vhost, user)
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError) as refused:
        connect(broker, vhost, user)
    text = f"NOT_ALLOWED - connection refused for user '{user}': user connection limit (1) is reached"
    assert f'(530) "{text}"' in str(refused.value)
    channels = [only.channel(), only.channel()]
    channels[0].close()
    only.channel()
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as refused:
        only.channel()
    text = (
        f"NOT_ALLOWED - number of channels opened for user '{user}' has reached the maximum allowed user limit of (2)"
    )
    assert (refused.value.reply_code, refused.value.reply_text) == (530, text)


@pytest.mark.broker
@pytest.mark.row("I9")
def test_limits_count_over_all_front_doors(tmp_path: Path) -> None:
    broker = RealBroker(tmp_path / "data", front_doors=3)
    try:
        Api(broker)("PUT", "user-limits/guest/max-connections", {"value": 4})
        held = [connect(broker, "/") for _ in range(4)]
        for _ in range(6):  # the kernel chooses the front door
            with pytest.raises(pika.exceptions.ProbableAccessDeniedError):
                connect(broker, "/")
        for connection in held:
            connection.close()
        broker.stop()
    finally:
        broker.clean_up()


@pytest.mark.row("I10")
def test_a_deleted_user_is_thrown_out_and_one_with_a_new_password_stays(
    broker: RealBroker, api: Api, vhost: str, name: str
) -> None:
    api("PUT", f"users/{name}-2", {"password": "a", "tags": ""})
    api("PUT", f"permissions/{vhost}/{name}-2", {"configure": ".*", "write": ".*", "read": ".*"})
    connection = connect(broker, vhost, f"{name}-2", "a")
    api("PUT", f"users/{name}-2", {"password": "b", "tags": ""})
    connection.process_data_events(0.1)
    assert connection.is_open
    with pytest.raises(pika.exceptions.ProbableAuthenticationError):
        connect(broker, vhost, f"{name}-2", "a")
    connect(broker, vhost, f"{name}-2", "b").close()
    api("DELETE", f"users/{name}-2")
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as closed:
        connection.process_data_events(10)
    assert closed.value.reply_code == 320


def test_no_password_is_in_the_log(broker: RealBroker, api: Api, vhost: str) -> None:
    with pytest.raises(pika.exceptions.ProbableAuthenticationError):
        connect(broker, vhost, "guest", "s3cret-guess")
    assert api.refused("GET", "whoami", user="guest:s3cret-guess") == (401, "Login failed")
    api("PUT", "users/logged", {"password": "s3cret-new", "tags": ""})
    api("DELETE", "users/logged")
    assert "s3cret" not in broker.log_path.read_text()


# -- messages by HTTP --------------------------------------------------------------------------------------------


def message(key: str = "q", payload: str = "hi", encoding: str = "string", **properties: Any) -> dict[str, Any]:
    return {"properties": properties, "routing_key": key, "payload": payload, "payload_encoding": encoding}


def wanted(mode: str = "ack_requeue_true", count: int = 1, **more: Any) -> dict[str, Any]:
    return {"count": count, "ackmode": mode, "encoding": "auto", **more}


@pytest.mark.row("G1.9", "L9")
def test_what_is_published_by_http_is_a_message_like_any_other(api: Api, vhost: str, channel: BlockingChannel) -> None:
    channel.queue_declare("q")
    path = f"exchanges/{vhost}/amq.default/publish"
    headers = {"text": "t", "number": 2**40, "yes": True, "list": [1, "a"], "table": {"x": "y"}, "none": None}
    properties = {"delivery_mode": 2, "content_type": "text/plain", "headers": headers, "timestamp": 5, "priority": 3}
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
        ("amq.default", {}, (400, "[{{key_missing,routing_key}},{{key_missing,properties}},{{key_missing,payload}},"
                                  "{{key_missing,payload_encoding}}]")),
        ("amq.default", message() | {"payload": 3}, (400, "payload_not_string")),
        ("amq.default", message(payload="!!", encoding="base64"), (400, "not_base64: !!")),
        ("amq.default", message(encoding="z"), (400, "unsupported_encoding: z")),
        ("amq.default", message(user_id="x"),
         (400, "406 PRECONDITION_FAILED - user_id property set to 'x' but authenticated user was 'guest'")),
        ("amq.default", message(priority="x"), (400, "priority: not a number from 0 to 255")),
        ("amq.default", message(expiration=5), (400, "expiration: not a string of at most 255 bytes")),
        ("amq.default", message(headers=[]), (400, "headers: not an object")),
    ],
)  # fmt: skip
def test_what_cannot_be_published_is_refused_with_a_reason(
    api: Api, vhost: str, exchange: str, body: Any, answer: tuple[int, str]
) -> None:
    found = api.refused("POST", f"exchanges/{vhost}/{exchange}/publish", body)
    assert found == (answer[0], answer[1].format(v=vhost))


@pytest.mark.row("G1.14")
def test_get_shows_messages_and_does_with_them_what_was_asked(api: Api, vhost: str, channel: BlockingChannel) -> None:
    channel.queue_declare("q")
    path = f"queues/{vhost}/q/get"
    assert api("POST", path, wanted()) == []
    for body in (b"one", b"\x00\x01\xff", b"three"):
        channel.basic_publish("", "q", body, pika.BasicProperties(message_id="m"))
    wait_until(lambda: waiting(channel, "q") == 3, "the messages")
    first = {
        "payload_bytes": 3, "redelivered": False, "exchange": "", "routing_key": "q", "message_count": 2,
        "properties": {"message_id": "m"}, "payload": "one", "payload_encoding": "string",
    }  # fmt: skip
    assert api("POST", path, wanted()) == [first]
    again = api("POST", path, wanted(count=5))
    assert again[0] == first | {"redelivered": True}
    assert [row["payload"] for row in again] == ["one", "AAH/", "three"]
    assert [row["payload_encoding"] for row in again] == ["string", "base64", "string"]
    assert api("POST", path, wanted(truncate=2))[0] | {"payload": "on"} == again[0] | {"payload": "on"}
    assert api("POST", path, wanted("reject_requeue_true"))[0]["payload"] == "one"
    assert api("POST", path, wanted("reject_requeue_false"))[0]["payload"] == "one"
    assert api("POST", path, wanted("ack_requeue_false", count=-1))[0]["payload"] == "AAH/"
    assert api("POST", path, wanted()) == []


@pytest.mark.row("G1.14")
@pytest.mark.parametrize(
    ("queue", "body", "answer"),
    [
        ("absent", wanted(), (404, "NOT_FOUND - no queue 'absent' in vhost '{v}'")),
        ("absent", {}, (400, "[{{key_missing,ackmode}},{{key_missing,count}},{{key_missing,encoding}}]")),
        ("absent", wanted(encoding="z"), (400, "Unsupported encoding. Please use auto or base64.")),
        ("absent", wanted(truncate=-1), (400, "truncate: not a number from 0 to 9223372036854775807")),
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
    assert api.refused("POST", "exchanges/%2F/amq.topic/publish", message(), login) == (401, "Access refused.")
    assert api("GET", "connections") is not None and not [c for c in api("GET", "connections") if c["user"] == user]


@pytest.mark.row("G1.2")
def test_aliveness_is_a_message_that_goes_in_and_comes_out(api: Api, vhost: str) -> None:
    assert api("GET", f"aliveness-test/{vhost}") == {"status": "ok"}
    assert api("GET", f"aliveness-test/{vhost}") == {"status": "ok"}


# -- definitions -------------------------------------------------------------------------------------------------


@pytest.mark.broker
@pytest.mark.row("G1.28", "J14")
def test_rabbitmqs_definitions_at_start_and_by_http(tmp_path: Path) -> None:
    broker = RealBroker(tmp_path / "data", more=("--load-definitions", str(EXPORT)))
    try:
        api = Api(broker)
        first = api("GET", "definitions")
        assert {queue["name"] for queue in first["queues"]} >= {"orders.new", "orders.dead", "quorum"}
        with connect(broker, "orders", "olga", "olga secret") as connection:
            channel = connection.channel()
            publish(channel, "olga.1", 1, "events")
            assert waiting(channel, "orders/slash ü") == 1, "by the policy's alternate exchange"
        api("DELETE", "vhosts/orders")
        api("POST", "definitions", json.loads(EXPORT.read_bytes()))
        again = api("GET", "definitions")
        for kind in ("queues", "exchanges", "bindings", "policies", "parameters", "permissions", "topic_permissions"):
            assert sorted(map(_key, again[kind])) == sorted(map(_key, first[kind])), kind
        api("PUT", "vhosts/copy", {})
        api("POST", "definitions/copy", api("GET", "definitions/orders"))
        assert len(api("GET", "queues/copy")) == len(api("GET", "queues/orders"))
        assert api("GET", f"queues/copy/{quote('orders.new')}")["policy"] == "short"
        broker.stop()
    finally:
        broker.clean_up()


def _key(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True)


def test_definitions_with_many_queues_come_in_within_seconds(api: Api, vhost: str) -> None:
    queues = [{"name": f"q{n}", "vhost": vhost, "durable": False} for n in range(3000)]
    began = time.monotonic()
    api("POST", "definitions", {"queues": queues})
    assert time.monotonic() - began < 60
    assert len(api("GET", f"queues/{vhost}?columns=name")) == 3000
