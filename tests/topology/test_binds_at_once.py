"""What a bind-ok promises holds at once: for publishes, for listings, and when processes die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from pamqp.commands import Basic, Confirm, Exchange, Queue

from tests.support.brokers import Api
from tests.support.kill_rounds import started
from tests.support.raw_client import RawClient, publish
from tests.support.real_broker import RealBroker, wait_until

ROUNDS = 30
GUEST = {"Authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="}


@pytest.fixture(scope="module", params=[1, 2], ids=["one front door", "two front doors"])
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealBroker]:
    """Yield a broker that answers binds ahead, then one that does not."""
    with started(tmp_path_factory.mktemp("broker"), front_doors=request.param) as made:
        yield made


def make(client: RawClient, name: str) -> None:
    client.ask(1, Exchange.Declare(exchange=name, exchange_type="direct"), Exchange.DeclareOk)
    client.ask(1, Queue.Declare(queue=name), Queue.DeclareOk)


def bind(client: RawClient, name: str, key: str) -> None:
    client.ask(1, Queue.Bind(queue=name, exchange=name, routing_key=key), Queue.BindOk)


def listed(api: Api, name: str) -> set[str]:
    rows = api(f"/api/bindings/%2F/e/{name}/q/{name}", headers=GUEST)
    return {row["routing_key"] for row in rows}


def test_publishes_of_others_are_routed_by_it(broker: RealBroker, name: str) -> None:
    with RawClient(broker.port) as one, RawClient(broker.port) as other:
        make(one.shake_hands(), name)
        other.shake_hands().ask(1, Confirm.Select(), Confirm.SelectOk)
        for at in range(ROUNDS):
            bind(one, name, str(at))
            other.send(publish(1, name, str(at), b"x", mandatory=True))
            other.expect(Basic.Ack)  # a message that is not routed is returned before its ack
        count = one.ask(1, Queue.Declare(queue=name, passive=True), Queue.DeclareOk)
        assert count.message_count == ROUNDS


def test_the_http_api_lists_it(broker: RealBroker, name: str, api: Api) -> None:
    with RawClient(broker.port) as client:
        make(client.shake_hands(), name)
        for at in range(ROUNDS):
            bind(client, name, str(at))
            assert str(at) in listed(api, name)


@pytest.mark.crash
@pytest.mark.parametrize("kind", ["front-door", "controller"])
def test_it_outlives_the_front_door_and_the_controller(
    broker: RealBroker,
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


@pytest.mark.crash
def test_what_is_answered_while_the_controller_stands_still_outlives_the_front_door(
    broker: RealBroker, name: str, api: Api
) -> None:
    answered: set[str] = set()
    controller = broker.pid("controller")
    with RawClient(broker.port) as client:
        make(client.shake_hands(), name)
        client.sock.settimeout(1.0)
        os.kill(controller, signal.SIGSTOP)
        try:
            while True:
                key = f"{len(answered)} {'x' * 240}"
                bind(client, name, key)
                answered.add(key)
        except TimeoutError:
            os.kill(broker.pid("front-door"), signal.SIGKILL)
        finally:
            os.kill(controller, signal.SIGCONT)
    doors = [each for each in broker.status()["children"] if each["kind"] == "front-door"]
    assert bool(answered) == (len(doors) == 1)
    wait_until(lambda: answered <= listed(api, name), "the bindings are listed")
