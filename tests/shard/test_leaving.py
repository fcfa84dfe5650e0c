"""A shard that is asked to end does so within a bound, whatever it waits for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shardmq.cluster.replicated_files import Deposed
from shardmq.shardd import process
from shardmq.supervisor import notify


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_who_begins_to_lead_is_not_held_by_the_syncs_of_nodes_that_are_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """Its first syncs are in the thread that would look at signals otherwise."""
    caplog.set_level("INFO")
    left, bounds = list[float](), list[float]()
    signals: Any = SimpleNamespace(stop=when == "before", fd=-1, stopping=lambda: None)
    seat: Any = SimpleNamespace(
        fd=-1, leave_within=left.append, stop=lambda: None, is_deposed=lambda error: True
    )

    def begin() -> None:
        if when == "meanwhile":
            signals.stop = True
            signals.stopping()
        bounds.extend(left)  # of the sync that would wait here
        raise Deposed("it was stopped")

    server = SimpleNamespace(watch=lambda fd, act: None, begin=begin, close=lambda: None)
    monkeypatch.setattr(process, "Server", lambda *given, **named: server)
    config: Any = None
    assert process._serve(config, signals, seat) == 0, "it was told to stop, and did"
    assert bounds == [process.LAST_SYNCS_S_MAX]
    assert caplog.messages[-1].endswith("Deposed('it was stopped')"), "a disk may have failed"


@pytest.mark.parametrize(
    ("is_told", "status", "level"),
    [
        pytest.param(False, notify.DEPOSED, "WARNING", id="it follows from now on"),
        pytest.param(True, 0, "INFO", id="it is told to stop"),
    ],
)
def test_who_leads_no_more_takes_another_role_unless_told_to_stop(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_told: bool,
    status: int,
    level: str,
) -> None:
    caplog.set_level("INFO")
    watched: list[Callable[[], None]] = []
    signals: Any = SimpleNamespace(stop=False, fd=-1)
    seat: Any = SimpleNamespace(
        fd=-1, over="", heir="", failure=None, look=lambda: None, stop=lambda: None
    )

    def turn(events: object) -> None:
        signals.stop, seat.over = is_told, "another node leads"
        watched[-1]()

    server = SimpleNamespace(
        watch=lambda fd, act: watched.append(act),
        begin=lambda: None,
        links=SimpleNamespace(wait=lambda ms: None),
        wait_ms=lambda: 0,
        turn=turn,
        close=lambda: None,
    )
    monkeypatch.setattr(process, "Server", lambda *given, **named: server)
    config: Any = None
    assert process._serve(config, signals, seat) == status
    assert [record.levelname for record in caplog.records] == [level]
