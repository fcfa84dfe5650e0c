"""What a bind-ok promises holds at once: for publishes, for listings, and when processes die."""

from __future__ import annotations

import pytest
from pamqp.commands import Basic, Confirm, Exchange, Queue

from tests.support.brokers import Api
from tests.support.brokers import killable_broker as broker  # noqa: F401
from tests.support.raw_client import RawClient, publish
from tests.support.real_broker import RealBroker, wait_until

ROUNDS = 30
GUEST = {"Authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="}


def make(client: RawClient, name: str) -> None:
    client.ask(1, Exchange.Declare(exchange=name, exchange_type="direct"), Exchange.DeclareOk)
    client.ask(1, Queue.Declare(queue=name), Queue.DeclareOk)


def bind(client: RawClient, name: str, key: str) -> None:
    client.ask(1, Queue.Bind(queue=name, exchange=name, routing_key=key), Queue.BindOk)


def listed(api: Api, name: str) -> set[str]:
    rows = api(f"/api/bindings/%2F/e/{name}/q/{name}", headers=GUEST)
    return {row["routing_key"] for row in rows}


def test_publishes_of_others_are_routed_by_it(broker: RealBroker, name: str) -> None:  # noqa: F811
    with RawClient(broker.port) as one, RawClient(broker.port) as other:
        make(one.shake_hands(), name)
        other.shake_hands().ask(1, Confirm.Select(), Confirm.SelectOk)
        for at in range(ROUNDS):
            bind(one, name, str(at))
            other.send(publish(1, name, str(at), b"x", mandatory=True))
            other.expect(Basic.Ack)  # a message that is not routed is returned before its ack
        count = one.ask(1, Queue.Declare(queue=name, passive=True), Queue.DeclareOk)
        assert count.message_count == ROUNDS


def test_the_http_api_lists_it(broker: RealBroker, name: str, api: Api) -> None:  # noqa: F811
    with RawClient(broker.port) as client:
        make(client.shake_hands(), name)
        for at in range(ROUNDS):
            bind(client, name, str(at))
            assert str(at) in listed(api, name)


@pytest.mark.crash
@pytest.mark.parametrize("kind", ["front-door", "controller"])
def test_it_outlives_the_front_door_and_the_controller(
    broker: RealBroker,  # noqa: F811
    name: str,
    api: Api,
    kind: str,
) -> None:
    keys = {str(at) for at in range(ROUNDS)}
    with RawClient(broker.port) as client:
        make(client.shake_hands(), name)
        for key in keys:
            bind(client, name, key)
        broker.kill(kind)
        wait_until(lambda: keys <= listed(api, name), "the bindings are listed")
