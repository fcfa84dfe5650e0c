"""Fixtures for front doors that are compared."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock that publishes are stamped with, so that two front doors stamp alike."""
    clock = SimpleNamespace(time_ns=lambda: 1_700_000_000_000_000_000)
    monkeypatch.setattr("shardmq.broker.front_door.connection.connection.time", clock)
