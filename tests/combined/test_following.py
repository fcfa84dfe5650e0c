"""Clients that follow each other use the same exclusive queue, at whichever front door they are."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from pamqp import commands

from tests.support.raw_client import RawClient, method
from tests.support.real_broker import RealBroker

pytestmark = pytest.mark.broker

CLIENTS = 100
GONE_S = 30.0  # on a crowded machine
RESOURCE_LOCKED = 405
DECLARE = commands.Queue.Declare(queue="followed", exclusive=True)


@pytest.fixture(scope="module")
def broker(combined: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """Yield a broker of two processes, to which the kernel spreads the clients."""
    made = RealBroker(tmp_path_factory.mktemp("following") / "data")
    try:
        yield made
        made.stop()
        assert "Traceback" not in made.log_path.read_text()
    finally:
        made.clean_up()


def test_behind_close_ok_the_queue_is_free_at_every_front_door(broker: RealBroker) -> None:
    for _ in range(CLIENTS):
        with RawClient(broker.port).shake_hands() as client:
            client.ask(1, DECLARE, commands.Queue.DeclareOk)
            client.ask(0, commands.Connection.Close(200, "", 0, 0), commands.Connection.CloseOk)


def test_behind_a_dropped_connection_the_queue_is_locked_for_a_moment(broker: RealBroker) -> None:
    """The front door that has seen the end is not the one that is asked, so no order is promised.

    The client is told so at once, and gets the queue soon.
    """
    for _ in range(CLIENTS):
        with RawClient(broker.port).shake_hands() as client:
            until = time.monotonic() + GONE_S
            while not declared(client):
                assert time.monotonic() < until


def declared(client: RawClient) -> bool:
    """Declare the queue; if it is another's, open the channel again."""
    client.send(method(1, DECLARE))
    _, answer = client.read() or (0, None)
    if isinstance(answer, commands.Queue.DeclareOk):
        return True
    assert isinstance(answer, commands.Channel.Close) and answer.reply_code == RESOURCE_LOCKED
    client.send(method(1, commands.Channel.CloseOk()))
    client.ask(1, commands.Channel.Open(), commands.Channel.OpenOk)
    return False
