"""Messages are moved between queues by HTTP unchanged and in order, and none is lost.

A message that cannot be moved stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel

from tests.support import vhosts
from tests.support.vhosts import Api

api, channel, vhost = vhosts.api, vhosts.channel, vhosts.vhost

pytestmark = pytest.mark.usefixtures("channel")
COUNT = 250  # more than are moved at once


def everything(queues: BlockingChannel, queue: str) -> Iterator[tuple[BasicProperties, bytes]]:
    while (got := queues.basic_get(queue, auto_ack=True))[0] is not None:
        yield got[1], got[2]


def move(api: Api, vhost: str, queue: str = "from", **body: Any) -> Any:
    return api("POST", f"queues/{vhost}/{queue}/move", {"destination": "to", **body})


@pytest.fixture
def queues(channel: BlockingChannel) -> BlockingChannel:
    channel.queue_declare("from", durable=True)
    channel.queue_declare("to", durable=True)
    channel.confirm_delivery()
    return channel


def test_messages_arrive_as_they_were_in_their_order(
    api: Api, vhost: str, queues: BlockingChannel
) -> None:
    bodies = [b"%d" % number * (number + 1) for number in range(COUNT)]
    headers = {
        "a": 1,
        "b": b"\x00\xff",
        "c": {"d": [True, None, -5]},
        "x-death": [{"reason": "expired"}],
    }
    properties = BasicProperties(
        content_type="t", headers=headers, delivery_mode=2, priority=3, correlation_id="c",
        reply_to="r", timestamp=7, message_id="ü", type="k", app_id="i",
    )  # fmt: skip
    for body in bodies:
        queues.basic_publish("", "from", body, properties)
    assert move(api, vhost, count=120) == {"moved": 120, "left": COUNT - 120}
    assert move(api, vhost) == {"moved": COUNT - 120, "left": 0}
    assert move(api, vhost) == {"moved": 0, "left": 0}
    moved = list(everything(queues, "to"))
    assert [body for _, body in moved] == bodies
    assert all(found == properties for found, _ in moved)
    assert list(everything(queues, "from")) == []


def test_what_the_other_queue_refuses_stays_in_its_place(
    api: Api, vhost: str, queues: BlockingChannel
) -> None:
    queues.queue_declare("small", arguments={"x-max-length": 7, "x-overflow": "reject-publish"})
    bodies = [b"%d" % number for number in range(20)]
    for body in bodies:
        queues.basic_publish("", "from", body)
    code, reason = api.refused("POST", f"queues/{vhost}/from/move", {"destination": "small"})
    assert code == 400 and "takes no more; 7 messages were moved before" in reason
    assert [body for _, body in everything(queues, "small")] == bodies[:7]
    assert [body for _, body in everything(queues, "from")] == bodies[7:]


def test_what_might_be_dropped_as_repeated_is_not_moved(
    api: Api, vhost: str, queues: BlockingChannel
) -> None:
    queues.queue_declare("once", arguments={"x-message-deduplication": True})
    producer = BasicProperties(headers={"x-producer-id": "p", "x-sequence": 9})
    queues.basic_publish(
        "", "to", b"later", BasicProperties(headers={"x-producer-id": "p", "x-sequence": 10})
    )
    queues.basic_publish("", "from", b"plain")
    queues.basic_publish("", "from", b"of a producer", producer)
    code, reason = api.refused("POST", f"queues/{vhost}/from/move", {"destination": "once"})
    assert code == 400 and "x-message-deduplication" in reason
    code, reason = api.refused("POST", f"queues/{vhost}/from/move", {"destination": "to"})
    assert code == 400 and "x-producer-id" in reason and "1 messages were moved before" in reason
    assert [body for _, body in everything(queues, "to")] == [b"later", b"plain"]
    assert [body for _, body in everything(queues, "from")] == [b"of a producer"]


@pytest.mark.parametrize(
    ("queue", "body", "answer"),
    [
        ("from", {"destination": "absent"}, 404),
        ("from", {"destination": "from"}, 400),
        ("from", {}, 400),
        ("from", {"destination": "to", "count": 0}, 400),
        ("from", {"destination": 7}, 400),
        ("from", {"destination": "to", "cuont": 1}, 400),
        ("absent", {"destination": "to"}, 404),
    ],
)
def test_what_makes_no_sense_moves_nothing(
    api: Api,
    vhost: str,
    queues: BlockingChannel,
    queue: str,
    body: Any,
    answer: int,
) -> None:
    queues.basic_publish("", "from", b"stays")
    assert api.refused("POST", f"queues/{vhost}/{queue}/move", body)[0] == answer
    assert [body for _, body in everything(queues, "from")] == [b"stays"]


def test_moving_needs_the_rights_to_read_and_to_write(
    api: Api, vhost: str, queues: BlockingChannel
) -> None:
    api("PUT", "users/mover", {"password": "m", "tags": "management"})
    queues.basic_publish("", "from", b"stays")
    for rights in ({"read": "", "write": ".*"}, {"read": ".*", "write": ""}):
        api("PUT", f"permissions/{vhost}/mover", {"configure": "", **rights})
        refused = api.refused("POST", f"queues/{vhost}/from/move", {"destination": "to"}, "mover:m")
        assert refused[0] == 401 and "refused for user 'mover'" in refused[1]
    api(
        "PUT",
        f"permissions/{vhost}/mover",
        {"configure": "", "read": "^from$", "write": "^amq.default$"},
    )
    assert api("POST", f"queues/{vhost}/from/move", {"destination": "to"}, "mover:m")["moved"] == 1
    api("DELETE", "users/mover")
