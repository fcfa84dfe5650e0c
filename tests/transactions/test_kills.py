"""A shard is killed right after commit-ok: what the transaction said is so in its next process."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
from pamqp.commands import Basic, Confirm, Queue, Tx

from tests.support.brokers import killable_broker
from tests.support.raw_client import RawClient, declare, delivered, got, method, with_properties
from tests.support.real_broker import RealBroker, wait_until

pytestmark = pytest.mark.crash
broker = killable_broker

MESSAGES, ACKED, REJECTED = 20, 8, 3
SHARDS = 2


def kill_shards(broker: RealBroker) -> None:
    """Kill all shards at once, and wait for their next processes."""
    before = [broker.pid("shard", shard) for shard in range(SHARDS)]
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    for shard, pid in enumerate(before):
        wait_until(partial(broker.is_replaced, "shard", shard, pid), "the next process of a shard")


def fill(client: RawClient, name: str) -> None:
    declare(client, name, durable=True, exclusive=False)
    client.ask(3, Confirm.Select(), Confirm.SelectOk)
    for number in range(MESSAGES):
        client.send(with_properties(3, "", name, b"%d" % number, delivery_mode=2))
    while client.expect(Basic.Ack).delivery_tag < MESSAGES:
        pass


def left(client: RawClient, name: str) -> int:
    answer = client.ask(2, Queue.Declare(queue=name, passive=True), Queue.DeclareOk)
    return int(answer.message_count)


@pytest.mark.parametrize("way", ["consume", "get"])
def test_what_a_transaction_has_settled_does_not_come_back(
    broker: RealBroker, client: RawClient, name: str, way: str
) -> None:
    fill(client, name)
    client.ask(1, Tx.Select(), Tx.SelectOk)
    taken = []
    if way == "consume":
        client.ask(1, Basic.Qos(prefetch_count=MESSAGES), Basic.QosOk)
        client.ask(1, Basic.Consume(queue=name, consumer_tag="one"), Basic.ConsumeOk)
        taken += [delivered(client)[1] for _ in range(MESSAGES)]
    else:
        for _ in range(ACKED + REJECTED):
            client.ask(1, Basic.Get(queue=name), Basic.GetOk)
            taken.append(client.content())
    client.send(method(1, Basic.Ack(ACKED, multiple=True)))
    for tag in range(ACKED + 1, ACKED + REJECTED + 1):
        client.send(method(1, Basic.Reject(tag, requeue=False)))
    client.ask(1, Tx.Commit(), Tx.CommitOk)
    kill_shards(broker)
    client.sock.close()
    with RawClient(broker.port) as other:
        other.shake_hands(channels=3)
        settled = ACKED + REJECTED
        assert taken[:settled] == [b"%d" % number for number in range(settled)]
        wait_until(lambda: left(other, name) == MESSAGES - settled, "the other messages")
        assert [got(other, name) for _ in range(MESSAGES - settled)] == [
            b"%d" % number for number in range(settled, MESSAGES)
        ]


def test_a_commit_of_what_a_killed_shard_has_requeued_does_nothing(
    broker: RealBroker, client: RawClient, name: str
) -> None:
    fill(client, name)
    declare(client, f"{name}-out", durable=True, exclusive=False)
    client.ask(1, Tx.Select(), Tx.SelectOk)
    client.ask(1, Basic.Get(queue=name), Basic.GetOk)
    assert client.content() == b"0"
    kill_shards(broker)
    wait_until(lambda: left(client, name) == MESSAGES, "the messages, of which none is settled")
    client.send(method(1, Basic.Ack(1)))
    client.send(with_properties(1, "", f"{name}-out", b"made of 0", delivery_mode=2))
    client.send(method(1, Tx.Commit()))
    text = (
        "PRECONDITION_FAILED - a shard has requeued what was delivered: nothing of the transaction"
    )
    client.expect_channel_close(1, 406, text)
    assert left(client, f"{name}-out") == 0
    assert left(client, name) == MESSAGES
