"""Fixtures for tests with a real broker that other tests use too; each test makes its own names."""

from __future__ import annotations

import itertools
import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pika
import pytest

from tests.support.elsewhere import ELSEWHERE, node_without_queues
from tests.support.kill_rounds import started
from tests.support.raw_client import RawClient
from tests.support.real_broker import RealBroker

CHANNELS = 3

Api = Callable[..., Any]

_numbers = itertools.count(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use a fixture called `broker`.

    Tests that start a broker in another way are marked by hand.
    """
    for item in items:
        if isinstance(item, pytest.Function) and "broker" in item.fixturenames:
            item.add_marker("broker")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    RealBroker.may_start = item.get_closest_marker("broker") is not None
    RealBroker.may_fork = item.get_closest_marker("torture") is None


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    if os.environ.get(ELSEWHERE):
        with node_without_queues(tmp_path_factory.mktemp("elsewhere")) as node:
            yield node
        return
    made = RealBroker(tmp_path_factory.mktemp("broker") / "data")
    try:
        yield made
        made.stop()
        assert "Traceback" not in made.log_path.read_text()
    finally:
        made.clean_up()


@pytest.fixture(scope="module")
def killable_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """Yield a broker whose processes may die often, one for each file: tests may leave it broken.

    A file of such tests imports this fixture under the name `broker`.
    """
    with started(tmp_path_factory.mktemp("killable")) as made:
        yield made


@pytest.fixture
def name() -> str:
    """Return a name that no other test uses."""
    return f"test-{next(_numbers)}"


@pytest.fixture
def connection(broker: RealBroker) -> Iterator[pika.BlockingConnection]:
    made = pika.BlockingConnection(pika.URLParameters(broker.url))
    yield made
    if made.is_open:
        made.close()


@pytest.fixture
def client(broker: RealBroker) -> Iterator[RawClient]:
    """Yield a connected client with the channels 1 to CHANNELS open."""
    with RawClient(broker.port) as made:
        yield made.shake_hands(channels=CHANNELS)


@pytest.fixture
def other(broker: RealBroker) -> Iterator[RawClient]:
    """Yield another connected client with the same channels open."""
    with RawClient(broker.port) as made:
        yield made.shake_hands(channels=CHANNELS)


@pytest.fixture
def api(broker: RealBroker) -> Api:
    """GET a path of the HTTP API, or another method: api("/x", method="DELETE", headers={...})."""

    def call(
        path: str, *, method: str = "GET", body: Any = None, headers: dict[str, str] | None = None
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://{broker.http}{path}"
        request = urllib.request.Request(url, data, headers or {}, method=method)
        request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")
        with urllib.request.urlopen(request, timeout=60) as answer:
            said = answer.read()
        return json.loads(said) if said else None

    return call
