"""Section G of the feature table, operating by HTTP: what an operator does to clients that are there."""

from __future__ import annotations

import urllib.error
from typing import Any
from urllib.parse import quote

import pytest
from pamqp.commands import Basic, Queue

from tests.features.conftest import Api
from tests.support.raw_client import RawClient, method, publish
from tests.support.real_broker import wait_until


@pytest.mark.row("G2.6")
def test_a_cancelled_consumer_is_told_and_its_client_goes_on(client: RawClient, api: Api, name: str) -> None:
    client.ask(1, Queue.Declare(queue=name), Queue.DeclareOk)
    client.ask(1, Basic.Consume(queue=name, consumer_tag="worker/1"), Basic.ConsumeOk)
    client.send(publish(1, "", name, b"first"))
    tag = client.expect(Basic.Deliver).delivery_tag
    found: list[dict[str, Any]] = []

    def is_listed() -> bool:
        found[:] = [row for row in api("/api/consumers/%2F") if row["queue"]["name"] == name]
        return bool(found)

    wait_until(is_listed, "the consumer is not listed", 10)
    (consumer,) = found
    connection = quote(consumer["channel_details"]["connection_name"], safe="")
    path = f"/api/consumers/%2F/{connection}/1/{quote('worker/1', safe='')}"
    api(path, method="DELETE")
    assert client.expect(Basic.Cancel).consumer_tag == "worker/1"
    client.send(publish(1, "", name, b"second"))
    client.send(method(1, Basic.Ack(tag)))  # what it was given is still its channel's
    counts = client.ask(1, Queue.Declare(queue=name, passive=True), Queue.DeclareOk)
    assert (counts.message_count, counts.consumer_count) == (1, 0)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        api(path, method="DELETE")
