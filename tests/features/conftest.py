"""One broker for the table of features; each test makes its own names."""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.raw_client import RawClient
from tests.support.real_broker import RealBroker

_numbers = itertools.count(1)
CHANNELS = 3

Api = Callable[..., Any]


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """Its messages may have 1 MiB, its channels 5 consumers."""
    directory: Path = tmp_path_factory.mktemp("features")
    (directory / "broker.toml").write_text("[front_doors]\nmessage_bytes_max = 1048576\nchannel_consumers_max = 5\n")
    made = RealBroker(directory / "data", more=("--config", str(directory / "broker.toml")))
    try:
        yield made
        made.stop()
        assert "Traceback" not in made.log_path.read_text()
    finally:
        made.clean_up()


@pytest.fixture
def name() -> str:
    """Return a name that no other test uses."""
    return f"feature-{next(_numbers)}"


@pytest.fixture
def client(broker: RealBroker) -> Iterator[RawClient]:
    """Yield a connected client with the channels 1 to CHANNELS open."""
    with RawClient(broker.port) as made:
        yield made.shake_hands(channels=CHANNELS)


@pytest.fixture
def other(broker: RealBroker) -> Iterator[RawClient]:
    """Another connection."""
    with RawClient(broker.port) as made:
        yield made.shake_hands(channels=CHANNELS)


@pytest.fixture
def api(broker: RealBroker) -> Api:
    """GET a path of the HTTP API, or say how: api("/x", method="DELETE", headers={...})."""

    def call(path: str, *, method: str = "GET", body: Any = None, headers: dict[str, str] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{broker.http}{path}", data, headers or {}, method=method)
        request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")
        with urllib.request.urlopen(request, timeout=60) as answer:
            said = answer.read()
        return json.loads(said) if said else None

    return call
