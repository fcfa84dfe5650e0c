"""A shard goes on beside its snapshot, and stops in its midst."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardmq.shardd import server, snapshotting
from shardmq.shardd.server import Server
from shardmq.shardd.snapshot_requests import SnapshotRequests
from shardmq.shardd.snapshotting import Snapshotting
from shardmq.shardd.wire import messages as m
from tests.support.readable import is_readable

PATIENCE_S = 60


def test_a_capture_that_fails_is_cleared_away_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone_in: list[threading.Thread] = []

    class Fails:
        def __init__(self, *_: object) -> None: ...
        def prepare(self, directories: object) -> None: ...
        def capture(self, *_: object) -> None:
            raise OSError("no room on purpose")

        def give_up(self) -> None:
            gone_in.append(threading.current_thread())

    monkeypatch.setattr(snapshotting, "Snapshot", Fails)
    watched: dict[int, Callable[[], None]] = {}
    told: list[object] = []
    shard: Any = SimpleNamespace(
        snapshots=SimpleNamespace(
            asked=(SimpleNamespace(tell=told.append), m.Snapshot(7, str(tmp_path / "target")))
        ),
        syncs=SimpleNamespace(are_held=False, are_idle=True),
        streams=SimpleNamespace(queues={}),
        stores={},
    )
    made = Snapshotting(shard, str(tmp_path), watched.__setitem__)
    for _ in range(2):
        made.turn()
        (fd,) = watched
        assert is_readable(fd, PATIENCE_S)
        watched[fd]()
    assert told == [m.Refused(7, snapshotting.SNAPSHOT_FAILED, "no room on purpose")]
    assert len(gone_in) == 1 and gone_in[0] is not threading.main_thread()
    assert not shard.syncs.are_held and shard.snapshots.asked is None


def test_a_stop_while_jobs_are_held_syncs_what_has_arrived() -> None:
    syncs = SimpleNamespace(are_held=True, want=lambda: None)
    held: list[bool] = []
    answered: list[int] = []
    stopped: Any = SimpleNamespace(
        shard=SimpleNamespace(syncs=syncs, answers=list, close=lambda: None),
        links=SimpleNamespace(receive_last=lambda *_: None, send=lambda _: None),
        _threads=SimpleNamespace(
            await_sync=lambda: None,
            begin_sync=lambda: held.append(syncs.are_held),
            answer_about_acks=lambda now: answered.append(len(held)),
        ),
    )
    Server.drain(stopped)
    assert held == [False, False] and answered == [2]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_merge_that_is_due_wakes_nobody_while_jobs_are_held(
    monkeypatch: pytest.MonkeyPatch, *, is_held: bool
) -> None:
    monkeypatch.setattr(server, "_now", lambda: 1000)
    waits: Any = SimpleNamespace(
        _next_tick=1500,
        shard=SimpleNamespace(
            has_work=False,
            upkeep=SimpleNamespace(due=900),
            syncs=SimpleNamespace(merges_are_held=is_held),
            next_due=lambda: None,
        ),
    )
    assert Server.wait_ms(waits) == (500 if is_held else 0)


def test_who_asks_again_for_the_same_snapshot_gets_its_answer() -> None:
    requests, first, again, other = SnapshotRequests(), *(Asking() for _ in range(3))
    requests.on_snapshot(first, m.Snapshot(1, "/monday"), 0)  # type: ignore[arg-type] # a fake
    requests.on_snapshot(again, m.Snapshot(2, "/monday"), 0)  # type: ignore[arg-type]
    requests.on_snapshot(other, m.Snapshot(3, "/tuesday"), 0)  # type: ignore[arg-type]
    assert requests.asked == (again, m.Snapshot(2, "/monday"))
    assert [type(said) for said in other.told] == [m.Refused] and not first.told + again.told


class Asking:
    def __init__(self) -> None:
        self.told: list[object] = []

    def tell(self, message: object) -> None:
        self.told.append(message)
