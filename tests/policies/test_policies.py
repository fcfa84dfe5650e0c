"""Policies hold for all that exists, over a whole broker and pika."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pika
import pika.exceptions
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.http_api.test_messages import message
from tests.support import vhosts
from tests.support.real_broker import RealBroker, wait_until
from tests.support.vhosts import Api, connect, publish, waiting

Call = Callable[..., Any]

api, channel, vhost = vhosts.api, vhosts.channel, vhosts.vhost


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
def test_an_unused_queue_expires_by_a_policy_that_comes_later(
    api: Api, vhost: str, channel: BlockingChannel
) -> None:
    channel.queue_declare("gone")
    channel.queue_declare("stays")
    api("PUT", f"policies/{vhost}/p", {"pattern": "^gone$", "definition": {"expires": 200}})
    wait_until(
        lambda: [row["name"] for row in api("GET", f"queues/{vhost}")] == ["stays"],
        "the queue to go",
    )


@pytest.mark.row("B1.14", "C3.1", "C3.6")
def test_an_alternate_exchange_by_policy(api: Api, vhost: str, channel: BlockingChannel) -> None:
    channel.exchange_declare("e", "direct")
    channel.queue_declare("q")
    channel.queue_bind("q", "amq.fanout")
    publish(channel, "nowhere", 1, "e")
    body = {
        "pattern": "^e$",
        "definition": {"alternate-exchange": "amq.fanout"},
        "apply-to": "exchanges",
    }
    api("PUT", f"policies/{vhost}/a", body)
    publish(channel, "nowhere", 1, "e")
    assert waiting(channel, "q") == 1
    assert api("GET", f"exchanges/{vhost}/e")["policy"] == "a"


@pytest.mark.row("C3.7", "J1")
def test_policies_hold_after_every_process_was_killed(
    broker: RealBroker, api: Api, vhost: str
) -> None:
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
