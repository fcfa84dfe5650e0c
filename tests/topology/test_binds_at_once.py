"""What a bind-ok promises holds at once: for publishes, for listings, and when processes die."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from pamqp.body import ContentBody
from pamqp.commands import Basic, Channel, Confirm, Exchange, Queue
from pamqp.header import ContentHeader

from tests.support.brokers import Api
from tests.support.kill_rounds import started
from tests.support.raw_client import RawClient, method, publish
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


@pytest.fixture(params=[False, True], ids=["transient", "durable"])
def durable(request: pytest.FixtureRequest) -> bool:
    """Return whether the bindings outlive the broker: then it records them before it answers."""
    return bool(request.param)


def make(client: RawClient, name: str, durable: bool) -> None:
    exchange = Exchange.Declare(exchange=name, exchange_type="direct", durable=durable)
    client.ask(1, exchange, Exchange.DeclareOk)
    client.ask(1, Queue.Declare(queue=name, durable=durable), Queue.DeclareOk)


def bind(client: RawClient, name: str, key: str) -> None:
    client.ask(1, Queue.Bind(queue=name, exchange=name, routing_key=key), Queue.BindOk)


def answer(client: RawClient, kind: type) -> None:
    """Expect an answer; confirms may come before it."""
    while True:
        found = client.read()
        assert found is not None
        if not isinstance(found[1], (Basic.Ack, ContentHeader, ContentBody)):
            assert isinstance(found[1], kind), f"{kind.__name__}, not {found[1]!r}"
            return


def listed(api: Api, name: str) -> set[str]:
    rows = api(f"/api/bindings/%2F/e/{name}/q/{name}", headers=GUEST)
    return {row["routing_key"] for row in rows}


def test_publishes_of_others_are_routed_by_it(broker: RealBroker, name: str, durable: bool) -> None:
    with RawClient(broker.port) as one, RawClient(broker.port) as other:
        make(one.shake_hands(), name, durable)
        other.shake_hands().ask(1, Confirm.Select(), Confirm.SelectOk)
        for at in range(ROUNDS):
            bind(one, name, str(at))
            other.send(publish(1, name, str(at), b"x", mandatory=True))
            other.expect(Basic.Ack)  # a message that is not routed is returned before its ack
        count = one.ask(1, Queue.Declare(queue=name, passive=True), Queue.DeclareOk)
        assert count.message_count == ROUNDS


def test_what_comes_behind_it_on_its_channel_waits_for_it(broker: RealBroker, name: str) -> None:
    with RawClient(broker.port) as client:
        make(client.shake_hands(), name, durable=True)
        client.ask(1, Confirm.Select(), Confirm.SelectOk)
        for at in range(ROUNDS):
            said = [
                method(1, Queue.Bind(queue=name, exchange=name, routing_key=f"{at}")),
                method(1, Queue.Bind(queue=name, exchange=name, routing_key=f"{at}.more")),
                publish(1, name, f"{at}", b"x", mandatory=True),
                method(1, Queue.Unbind(queue=name, exchange=name, routing_key=f"{at}")),
                method(1, Queue.Declare(queue=name, durable=True, passive=True)),
                method(1, Queue.Bind(queue=name, exchange=name, routing_key=f"{at}.last")),
                publish(1, name, f"{at}", b"returned", mandatory=True),
            ]
            if at % 2:
                client.send(b"".join(said))
            else:
                for each in said:
                    client.send(each)
            oks = Queue.BindOk, Queue.BindOk, Queue.UnbindOk, Queue.DeclareOk, Queue.BindOk
            for kind in (*oks, Basic.Return):
                answer(client, kind)
        client.send(method(1, Queue.Bind(queue=name, exchange=name, routing_key="a")))
        client.send(method(1, Queue.Bind(queue=name, exchange="missing", routing_key="b")))
        client.send(method(1, Queue.Bind(queue=name, exchange=name, routing_key="c")))
        answer(client, Queue.BindOk)
        answer(client, Channel.Close)
        # The next channel of its number begins anew.
        client.send(method(1, Channel.CloseOk()))
        client.ask(1, Channel.Open(), Channel.OpenOk)
        for at in range(ROUNDS):
            bind(client, name, f"anew {at}")


def test_the_http_api_lists_it(broker: RealBroker, name: str, api: Api, durable: bool) -> None:
    with RawClient(broker.port) as client:
        make(client.shake_hands(), name, durable)
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
    durable: bool,
) -> None:
    keys = {str(at) for at in range(ROUNDS)}
    with RawClient(broker.port) as client:
        make(client.shake_hands(), name, durable)
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
        make(client.shake_hands(), name, durable=False)
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


@pytest.mark.crash
def test_what_must_last_is_not_answered_while_the_controller_stands_still(
    broker: RealBroker, name: str, api: Api
) -> None:
    controller = broker.pid("controller")
    with RawClient(broker.port) as client:
        make(client.shake_hands(), name, durable=True)
        bind(client, name, "before")
        client.sock.settimeout(0.5)
        os.kill(controller, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                bind(client, name, "late")
        finally:
            os.kill(controller, signal.SIGCONT)
        client.sock.settimeout(60)
        client.expect(Queue.BindOk)
        assert listed(api, name) == {"before", "late"}


@pytest.mark.crash
@pytest.mark.parametrize("kind", ["controller", "all"])
def test_each_that_is_answered_outlives_kills_at_any_moment(
    broker: RealBroker, name: str, api: Api, kind: str
) -> None:
    answered: list[set[str]] = [set() for _ in range(3)]
    over = threading.Event()

    def go_on(at: int) -> None:
        with suppress(OSError, EOFError, AssertionError), RawClient(broker.port) as client:
            client.shake_hands()
            while not over.is_set():
                key = f"{at}.{len(answered[at])}"
                bind(client, name, key)
                answered[at].add(key)

    with RawClient(broker.port) as client:
        make(client.shake_hands(), name, durable=True)
    threads = [threading.Thread(target=go_on, args=(at,)) for at in range(len(answered))]
    for thread in threads:
        thread.start()
    try:
        for count in (20, 40, 60):
            wait_until(lambda: min(map(len, answered)) >= count, "binds are answered")  # noqa: B023
            if kind == "controller":
                broker.kill("controller")
        if kind == "all":
            broker.kill_all()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if kind == "all":
        broker.restart()
    wait_until(lambda: set().union(*answered) <= listed(api, name), "all are there")
