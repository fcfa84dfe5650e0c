"""A broker with two shards and two front doors for each file of tests: what one leaves broken the next would find."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.support.kill_rounds import SETTINGS
from tests.support.real_broker import RealBroker

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    directory = tmp_path_factory.mktemp("crash")
    settings = directory / "broker.toml"
    settings.write_text(SETTINGS)
    made = RealBroker(directory / "data", front_doors=2, more=("--config", str(settings)))
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


@pytest.fixture
def name() -> str:
    """Return a name that no other test uses."""
    return f"crash-{next(_numbers)}"
