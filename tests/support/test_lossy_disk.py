"""The disk of a host that loses power keeps what was synced, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.lossy_disk import LossyDisk, why_impossible

IMPOSSIBLE = why_impossible()


@pytest.mark.skipif(bool(IMPOSSIBLE), reason=IMPOSSIBLE)
def test_what_was_not_synced_is_gone_with_the_power(tmp_path: Path) -> None:
    with LossyDisk(tmp_path / "disk", mib=32) as disk:
        synced, unsynced = disk.directory / "synced", disk.directory / "unsynced"
        with synced.open("wb", buffering=0) as file:
            file.write(b"kept")
            os.fsync(file.fileno())
        directory = os.open(disk.directory, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        with synced.open("ab", buffering=0) as file:
            file.write(b"lost")
        unsynced.write_bytes(b"lost")
        disk.fail_power()
        assert synced.read_bytes() == b"kept"
        assert not unsynced.exists()
        disk.freeze()
        disk.thaw()
        unsynced.write_bytes(b"written again")
