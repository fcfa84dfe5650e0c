"""A full queue refuses a transaction with 406 for its commit.

Nothing of it was done then, at any shard.
"""

from __future__ import annotations

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker

from tests.support.real_broker import RealBroker
from tests.support.vhosts import Api

FULL = {"x-max-length": 2, "x-overflow": "reject-publish"}
QUEUES = 8  # enough that they lie in both shards
Channel = pika.adapters.blocking_connection.BlockingChannel


def counts(connection: pika.BlockingConnection, names: list[str]) -> list[int]:
    channel = connection.channel()
    return [channel.queue_declare(name, passive=True).method.message_count for name in names]


@pytest.fixture
def second(broker: RealBroker) -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.URLParameters(broker.url))


@pytest.mark.parametrize(
    "arguments", [FULL, {"x-max-length-bytes": 2, "x-overflow": "reject-publish-dlx"}]
)
def test_a_commit_that_a_full_queue_refuses_does_nothing_at_all(
    connection: pika.BlockingConnection, name: str, arguments: dict[str, object]
) -> None:
    channel = connection.channel()
    full, others = f"{name}-full", [f"{name}-{i}" for i in range(QUEUES)]
    channel.queue_declare(full, arguments=arguments)
    for other in others:
        channel.queue_declare(other)
    channel.basic_publish("", others[0], b"held")
    channel.tx_select()
    held = channel.basic_get(others[0])[0]
    assert held is not None
    channel.basic_ack(held.delivery_tag)
    for other in (*others, full, full, full):
        channel.basic_publish("", other, b"x")
    with pytest.raises(ChannelClosedByBroker) as closed:
        channel.tx_commit()
    assert closed.value.reply_code == 406
    assert (
        closed.value.reply_text
        == "PRECONDITION_FAILED - a queue is full: nothing of the transaction was done"
    )
    assert counts(connection, [full, *others]) == [0, 1, *([0] * (QUEUES - 1))]
    again = connection.channel().basic_get(others[0])
    assert again[0] is not None and again[0].redelivered and again[2] == b"held"


def test_a_commit_that_fits_fills_the_queue_to_its_limit(
    connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.queue_declare(name, arguments=FULL)
    channel.tx_select()
    for _ in range(2):
        channel.basic_publish("", name, b"x")
    channel.tx_commit()
    channel.basic_publish("", name, b"one too many")
    with pytest.raises(ChannelClosedByBroker):
        channel.tx_commit()
    assert counts(connection, [name]) == [2]


def test_a_queue_that_a_policy_bounds_refuses_a_transaction_too(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.queue_declare(name)
    definition = {"max-length": 1, "overflow": "reject-publish"}
    Api(broker)("PUT", f"policies/%2F/{name}", {"pattern": f"^{name}$", "definition": definition})
    channel.tx_select()
    for _ in range(2):
        channel.basic_publish("", name, b"x")
    with pytest.raises(ChannelClosedByBroker):
        channel.tx_commit()
    assert counts(connection, [name]) == [0]


def test_transactions_beside_each_other_never_fill_a_queue_beyond_its_limit(
    connection: pika.BlockingConnection, second: pika.BlockingConnection, name: str
) -> None:
    """What one has set aside and not used is free for the other at once."""
    connection.channel().queue_declare(
        name, arguments={"x-max-length": 30, "x-overflow": "reject-publish"}
    )
    done = 0
    for turn in range(20):
        channel = (connection, second)[turn % 2].channel()
        channel.tx_select()
        for _ in range(4):
            channel.basic_publish("", name, b"x")
        try:
            channel.tx_commit()
            done += 1
        except ChannelClosedByBroker:
            pass
    assert done == 7
    assert counts(connection, [name]) == [28]
    second.close()
