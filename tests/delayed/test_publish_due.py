"""Messages that shards hand back are routed anew.

They are messages that are due, and copies for the firehose.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardmq.broker.amqp import contents, properties
from shardmq.broker.front_door.publish.dead_letters import DUE, DeadLettering
from shardmq.broker.front_door.publish.tracing import TRACE_EXCHANGE, Tracing
from shardmq.broker.model.changes import BindingPut, ExchangePut, QueuePut, VhostPut
from shardmq.shardd.wire import messages as wire
from tests.publishing.test_publish import HEADERS, ONE, SHARD_0, SHARD_1, A, Door
from tests.support.fake_publishing import catalog


class Delaying(Door):
    """A front door that is handed what was delayed by an exchange of some type."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            catalog(
                [
                    ExchangePut(
                        "/", "late", "x-delayed-message", arguments={"x-delayed-type": kind}
                    ),
                    QueuePut("/", "amq.delayed.late", 5, 0),
                    BindingPut(
                        "/",
                        "late",
                        "queue",
                        "a",
                        "k",
                        {"x-match": "any", "one": 1} if kind == "headers" else {},
                    ),
                    BindingPut("/", "late", "queue", "b", "more"),
                ]
            )
        )
        self.lettering = DeadLettering(self.publishing._source, self.links)  # type: ignore[arg-type]

    def due(self, *messages: tuple[str, dict[str, Any]], exchange: str = "late") -> None:
        """Delay messages with these keys and headers, and hand them back as due."""
        data = b""
        for key, headers in messages:
            self.publish((1, ("late", key), {"headers": {"x-delay": 5, **headers}}, False))
            ((_, _, stored),) = self.links.stored()
            data += stored
        batch = wire.DeadLetters(
            number=1, vhost="/", queue=5, reason=DUE, exchange=exchange, routing_key=None,
            count=len(messages), messages=data, insist=False,
        )  # fmt: skip
        self.lettering.receive(0, batch)
        while self.lettering.publish_next():
            pass


def test_messages_that_are_due_go_where_the_inner_type_says_with_their_delay_negated() -> None:
    door = Delaying("direct")
    door.due(("k", {}), ("k", {}), ("none", {}))
    found = door.links.stored()
    assert [(queues, contents.read_stored(stored)[3]) for _, queues, stored in found] == [
        ((1,), b"0"),
        ((1,), b"0"),
    ]
    headers = properties.read(contents.read_stored(found[0][2])[2]).headers
    assert headers == {"x-delay": -5}
    assert (door.lettering.released, door.lettering.unroutable) == (3, 1)


def test_a_due_message_with_more_keys_or_routed_by_headers_is_looked_at_alone() -> None:
    door = Delaying("direct")
    door.due(("k", {"BCC": ["more"]}), ("k", {}))
    assert sorted(door.stored()) == [((1,), b"0"), ((1,), b"0"), ((2,), b"0")]
    door = Delaying("headers")
    door.due(("", {"one": 1}), ("", {"one": 2}))
    assert door.stored()[0] == ((1,), b"0")


@pytest.mark.parametrize("exchange", ["gone", "late"])
def test_the_shard_is_answered_when_all_copies_are_stored_or_none_was_made(exchange: str) -> None:
    door = Delaying("direct")
    door.due(("k", {}), exchange=exchange)
    for waiting in door.links.waiting:
        assert not door.links.told
        waiting.confirmed()
    assert door.links.told == [(0, wire.DeadLettersPublished(1, []))]
    assert door.lettering.dropped == (exchange == "gone")


# -- the firehose ----------------------------------------------------------------------------------


class Traced(Door):
    """A front door whose vhost is traced."""

    def __init__(self) -> None:
        super().__init__(
            catalog(
                [
                    VhostPut("/", is_traced=True),
                    ExchangePut("/", TRACE_EXCHANGE, "topic", internal=True),
                    QueuePut("/", "trace", 9, 1),
                    BindingPut("/", TRACE_EXCHANGE, "queue", "trace", "publish.#"),
                ]
            )
        )
        self.tracing = Tracing(self.publishing._source, self.links)  # type: ignore[arg-type]
        self.publishing.trace(self.tracing.catalog_changed())


def test_each_publish_of_a_traced_vhost_is_copied_and_the_copy_feeds_its_shard() -> None:
    door = Traced()
    for end, props in ((A, {}), (HEADERS, ONE)):
        assert door.publish((1, end, props, False)).fed == SHARD_0 | SHARD_1
        by_queue = {queues: stored for _, queues, stored in door.links.stored()}
        message, copy = by_queue[1,], by_queue[9,]
    exchange, key, props_bytes, body = contents.read_stored(copy)
    assert (exchange, key, body) == (
        TRACE_EXCHANGE.encode(),
        b"publish.headers",
        contents.read_stored(message)[3],
    )
    headers = properties.read(props_bytes).headers or {}
    assert headers["routed_queues"] == ["a"] and headers["user"] == "guest"


def test_a_vhost_that_is_not_traced_any_more_has_no_copies() -> None:
    door = Traced()
    door.change(VhostPut("/"))
    assert door.tracing.catalog_changed() is None
    door.publishing.trace(None)
    assert door.publish(A).fed == SHARD_0


def test_deliveries_are_copied_but_for_copies_themselves() -> None:
    door = Traced()
    door.catalog.apply(BindingPut("/", TRACE_EXCHANGE, "queue", "trace", "deliver.#"))
    door.publish(A)
    (stored,) = [stored for _, queues, stored in door.links.stored() if queues == (1,)]
    assert door.tracing.delivered(door.client, 1, "a", False, 1, stored) == SHARD_1
    ((_, _, copy),) = door.links.stored()
    assert door.tracing.delivered(door.client, 1, "trace", False, 1, copy) == 0
