"""A pass syncs where that is quickest, and sends what it hands out and confirms at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardmq.shardd import server
from shardmq.shardd.server import FEW_MESSAGES, Server
from shardmq.shardd.sync_threads import QUICK_COPIED_S, QUICK_SYNC_S, SyncThreads
from tests.shard.test_copied_syncs import Copies, Syncs

NOW = 1000


def passed(
    monkeypatch: pytest.MonkeyPatch,
    taken: int,
    *,
    are_quick: bool,
    alone: bool,
    has_copies: bool = True,
) -> Any:
    """Return in which order a pass syncs and sends, after so many messages were taken in."""
    order: list[str] = []
    threads = SimpleNamespace(
        are_quick=are_quick,
        has_copies=has_copies,
        sync_here=lambda: order.append("sync"),
        begin_sync=lambda: order.append("begin"),
        begin_settled_sync=lambda: None,
    )
    shard = SimpleNamespace(
        syncs=SimpleNamespace(may_begin=True, has_answered=False),
        snapshots=SimpleNamespace(asked=None),
        upkeep=SimpleNamespace(due=NOW + 1),
        turn_end=lambda now: ["deliveries and confirms"],
    )
    links = SimpleNamespace(receive=lambda now: taken, send=order.extend)
    loop: Any = SimpleNamespace(
        shard=shard, links=links, _threads=threads, _alone=alone, _next_tick=NOW + 1, _is_ready=True
    )
    monkeypatch.setattr(server, "_now", lambda: NOW)
    Server.turn(loop, [])
    return order


def test_with_copies_deliveries_leave_with_the_confirms_of_a_quick_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = passed(monkeypatch, FEW_MESSAGES, are_quick=True, alone=True)
    assert order == ["sync", "deliveries and confirms"]


def test_with_one_copy_consumers_work_while_the_disk_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = passed(monkeypatch, FEW_MESSAGES, are_quick=True, alone=True, has_copies=False)
    assert order == ["deliveries and confirms", "sync", "deliveries and confirms"]


@pytest.mark.parametrize(
    ("taken", "are_quick", "alone"),
    [
        pytest.param(1, False, True, id="slow"),
        pytest.param(1, True, False, id="with others in its process"),
        pytest.param(FEW_MESSAGES + 1, True, True, id="many messages"),
        pytest.param(0, True, True, id="no message"),
    ],
)
def test_deliveries_wait_for_no_other_sync(
    monkeypatch: pytest.MonkeyPatch, taken: int, are_quick: bool, alone: bool
) -> None:
    order = passed(monkeypatch, taken, are_quick=are_quick, alone=alone)
    assert order == ["begin", "deliveries and confirms"]


@pytest.mark.parametrize("copies", [None, Copies()], ids=["one copy", "more copies"])
def test_nodes_with_copies_may_take_longer(copies: Copies | None) -> None:
    threads = SyncThreads(Syncs(), copies)  # type: ignore[arg-type] # begin and end
    assert not threads.are_quick  # nothing is known yet
    threads.messages.usual_s = (QUICK_SYNC_S + QUICK_COPIED_S) / 2
    assert threads.are_quick == (copies is not None)
    threads.messages.usual_s = QUICK_SYNC_S / 2
    assert threads.are_quick
