"""A shard with copies on other nodes begins without what its former process has shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardmq.shardd import process, seat
from shardmq.shardd.config import ShardConfig
from shardmq.shardd.wire.board import Board, path_of


class Begun(Exception):
    pass


def test_ranges_of_a_former_life_are_gone_before_the_shard_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Board(path := path_of(str(tmp_path), 3)).show()

    def begin(*_: Any) -> None:
        assert not Path(path).exists()
        raise Begun

    monkeypatch.setattr(seat, "Seat", begin)
    monkeypatch.setattr(process, "Signals", lambda: None)
    monkeypatch.setattr(process, "keep_warm", lambda: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    copies: Any = object()
    config = msgspec.structs.replace(ShardConfig(str(tmp_path), str(tmp_path), 3), copies=copies)
    for _ in range(2):  # the second time there is none
        with pytest.raises(Begun):
            process.run(config)
