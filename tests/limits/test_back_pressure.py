"""A publisher is held back while its messages cannot be handled."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from pamqp.commands import Basic, Confirm, Queue

from tests.support.brokers import Api
from tests.support.raw_client import RawClient, declare, publish
from tests.support.real_broker import RealBroker, wait_until


@pytest.mark.row("A6.16", "N15")
def test_a_publisher_is_held_back_while_a_shard_is_behind_and_nothing_is_lost(
    broker: RealBroker, client: RawClient, name: str, api: Api
) -> None:
    """The shard sleeps, and the bytes for it are bounded.

    So the client's writes come to a stop, and its state is `flow`.
    """
    declare(client, name)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    port = client.sock.getsockname()[1]
    flood = publish(1, "", name, bytes(50_000)) * 1000
    sending = threading.Thread(target=client.send, args=(flood,), daemon=True)
    shards = [broker.pid("shard", index) for index in range(2)]
    for pid in shards:
        os.kill(pid, signal.SIGSTOP)
    try:
        sending.start()
        wait_until(lambda: _state(api, port) == "flow", "the publisher to be held back")
        assert sending.is_alive()
    finally:
        for pid in shards:
            os.kill(pid, signal.SIGCONT)
    acked = 0
    while acked < 1000:
        acked = client.expect(Basic.Ack).delivery_tag
    sending.join()
    assert client.ask(1, Queue.Purge(queue=name), Queue.PurgeOk).message_count == 1000


def _state(api: Api, port: int) -> str:
    """Nothing while the list is older than the connection."""
    return next(
        (str(one["state"]) for one in api("/api/connections") if one["peer_port"] == port), ""
    )
