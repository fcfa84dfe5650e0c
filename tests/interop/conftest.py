"""One broker for all tests of other people's clients; each test makes its own names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from tests.support.real_broker import RealBroker

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    directory: Path = tmp_path_factory.mktemp("broker") / "data"
    made = RealBroker(directory)
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


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
