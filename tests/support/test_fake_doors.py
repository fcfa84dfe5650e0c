"""The fakes of what the controller talks to have the methods of the real ones."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from shardmq.broker.controller import authority
from shardmq.broker.controller.peers.links import DoorLinks, FrontDoorLink
from shardmq.broker.controller.peers.shard_links import ShardLinks
from tests.http_api import conftest
from tests.support import fake_controller_peers
from tests.support.fake_doors import FakeDoor, FakeDoors

PAIRS = [
    pytest.param(FakeDoor, FrontDoorLink, id="a front door"),
    pytest.param(FakeDoors, DoorLinks, id="front doors"),
    pytest.param(conftest.ReportingDoors, DoorLinks, id="front doors of the HTTP API"),
    pytest.param(fake_controller_peers.FakeShards, ShardLinks, id="shards"),
    pytest.param(conftest.FakeShards, ShardLinks, id="shards of the HTTP API"),
]


def taken_by(method: Any) -> list[tuple[str, Any, Any]]:
    """Return the parameters of a method, with their kinds and defaults."""
    found = inspect.signature(method).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


def differences(fake: type, real: type) -> list[str]:
    """Return the methods that both have, and that do not take the same."""
    return [
        name
        for name, method in inspect.getmembers(fake, inspect.isfunction)
        if not name.startswith("_")
        and inspect.isfunction(found := getattr(real, name, None))
        and taken_by(method) != taken_by(found)
    ]


@pytest.mark.parametrize(("fake", "real"), PAIRS)
def test_a_fake_takes_what_the_real_one_takes(fake: type, real: type) -> None:
    assert differences(fake, real) == []


def test_front_doors_have_what_the_authority_calls() -> None:
    called = set(re.findall(r"self\._front_doors\.(\w+)\(", inspect.getsource(authority)))
    assert "hand_out" in called
    assert [name for name in sorted(called) if not hasattr(FakeDoors, name)] == []


def test_a_change_of_the_real_one_would_be_noticed() -> None:
    class Changed:
        def hand_out(self, version: int, changes: list[Any], more: bool) -> None: ...

    assert differences(FakeDoors, Changed) == ["hand_out"]
