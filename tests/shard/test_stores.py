"""Directories of vhosts: those nobody names go, files that are not a store's stay."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from shardmq.shardd.config import ShardConfig
from shardmq.shardd.disk import Calls
from shardmq.shardd.disk_home import DiskHome


def test_only_stores_of_other_vhosts_go(tmp_path: Path) -> None:
    stores = DiskHome(
        str(tmp_path), ShardConfig(str(tmp_path), str(tmp_path), 0, segment_bytes=4096), Calls()
    )
    for vhost in ("kept", "gone"):
        store = stores.open(vhost)
        store.recover([])
        store.close({})
    kept, gone = (Path(stores.open(vhost).directory) for vhost in ("kept", "gone"))
    theirs = tmp_path / ("b" * 40)
    theirs.mkdir()
    (theirs / "notes").touch()
    (tmp_path / "lost+found").mkdir()
    stores.keep_only(["kept"])
    assert kept.exists()
    assert not gone.exists()
    assert (theirs / "notes").exists()
    assert (tmp_path / "lost+found").exists()


def test_a_vhost_never_opened_is_removed_or_was_never_there(tmp_path: Path) -> None:
    stores = DiskHome(
        str(tmp_path), ShardConfig(str(tmp_path), str(tmp_path), 0, segment_bytes=4096), Calls()
    )
    store = stores.open("old")
    store.recover([])
    store.close({})
    stores.remove("old")
    stores.remove("never")
    assert not list(tmp_path.iterdir())


def test_a_recovery_tells_how_far_it_is_at_most_twice_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stores = DiskHome(
        str(tmp_path), ShardConfig(str(tmp_path), str(tmp_path), 0, segment_bytes=4096), Calls()
    )
    with caplog.at_level(logging.INFO, "shardmq.shardd.disk_home"):
        for done in range(1, 21):
            stores.progress("/", done * 1_000_000, 20_000_000, done * 1000)
            clock[0] += 0.1
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "recovering 5 %: vhost /, 1.0 of 20.0 MB, 1,000 messages"
    assert 2 <= len(told) <= 4
