"""Test what a client sees of a transaction."""

from __future__ import annotations

import pytest
from pamqp import base
from pamqp.commands import Basic, Channel, Queue, Tx

from tests.support.raw_client import RawClient, declare, got, is_empty, method, publish


@pytest.mark.row("A7.4")
def test_a_committed_publish_whose_queue_is_gone_is_returned(client: RawClient, name: str) -> None:
    declare(client, name)
    declare(client, f"{name}-again")
    client.ask(1, Tx.Select(), Tx.SelectOk)
    client.send(publish(1, "", name, b"gone", mandatory=True))
    client.send(publish(1, "", f"{name}-again", b"new"))
    for queue in (name, f"{name}-again"):
        client.ask(1, Queue.Delete(queue=queue), Queue.DeleteOk)
    declare(client, f"{name}-again")
    client.send(method(1, Tx.Commit()))
    assert client.expect(Basic.Return).reply_code == 312
    assert client.message()[1] == b"gone"
    client.expect(Tx.CommitOk)
    client.ask(1, Basic.Get(queue=f"{name}-again", no_ack=True), Basic.GetOk)
    assert client.message()[1] == b"new"


@pytest.mark.row("A7.4")
@pytest.mark.parametrize("what", [Tx.Commit(), Tx.Rollback()])
def test_what_is_not_begun_cannot_end(client: RawClient, what: base.Frame) -> None:
    client.send(method(1, what))
    client.expect_channel_close(1, 406, "PRECONDITION_FAILED - channel is not transactional")


@pytest.mark.row("A7.4")
def test_nothing_of_a_transaction_is_seen_before_its_commit(client: RawClient, name: str) -> None:
    declare(client, name)
    client.send(publish(2, "", name, b"old"))
    client.ask(2, Basic.Qos(), Basic.QosOk)
    client.ask(1, Tx.Select(), Tx.SelectOk)
    client.ask(1, Basic.Get(queue=name), Basic.GetOk)
    client.send(method(1, Basic.Ack(1)) + publish(1, "", name, b"new"))
    client.ask(1, Basic.Qos(), Basic.QosOk)
    assert is_empty(client, name, 2)
    client.ask(1, Tx.Commit(), Tx.CommitOk)
    assert got(client, name, 2) == b"new"
    client.ask(1, Channel.Close(200, "", 0, 0), Channel.CloseOk)
    assert is_empty(client, name, 2)


@pytest.mark.row("A7.5")
def test_a_rollback_drops_publishes_and_takes_acks_back(client: RawClient, name: str) -> None:
    declare(client, name)
    client.send(publish(2, "", name, b"old"))
    client.ask(2, Basic.Qos(), Basic.QosOk)
    client.ask(1, Tx.Select(), Tx.SelectOk)
    client.ask(1, Basic.Get(queue=name), Basic.GetOk)
    client.send(method(1, Basic.Ack(1)) + publish(1, "", name, b"new"))
    client.ask(1, Tx.Rollback(), Tx.RollbackOk)
    assert is_empty(client, name, 2)  # unacknowledged again, not requeued
    client.send(method(1, Basic.Ack(1)))
    client.ask(1, Tx.Commit(), Tx.CommitOk)
    client.ask(1, Channel.Close(200, "", 0, 0), Channel.CloseOk)
    assert is_empty(client, name, 2)
