"""Publishers are held back while the broker holds too much memory."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.controller import memory
from shardmq.broker.controller.memory import LOW_ON_MEMORY, MemoryWatch, alarm, pids
from shardmq.supervisor.directories import replace_file


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 41), st.sampled_from(["", LOW_ON_MEMORY]))
def test_an_alarm_begins_above_the_limit_and_ends_clearly_below_it(
    limit: int, used: int, before: str
) -> None:
    now = alarm(used, limit, before)
    if used > limit:
        assert now == LOW_ON_MEMORY
    elif used <= limit * memory.OVER_BELOW:
        assert now == ""
    else:
        assert now == before


def test_without_a_limit_there_is_no_alarm() -> None:
    assert alarm(1 << 60, 0, LOW_ON_MEMORY) == "" == alarm(1 << 60, 0, "")
    assert memory.limit_bytes(0.0, 0) == 0


def test_a_limit_in_bytes_wins_over_a_part_of_what_there_is() -> None:
    assert memory.limit_bytes(0.5, 7) == 7
    assert memory.limit_bytes(0.5, 0) == memory.total_bytes() // 2 > 1 << 20


def test_what_processes_hold_is_counted_and_pages_of_files_are_not() -> None:
    before = memory.used_bytes([os.getpid()])
    # new pages, whatever lies free in this process
    held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE)
    # written where they lie: nothing else grows with them
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    assert 60 << 20 < memory.used_bytes([os.getpid()]) - before < 80 << 20
    assert memory.used_bytes([os.getpid(), os.getpid()]) > before * 2
    assert memory.used_bytes([1 << 30]) == 0 and len(held)


def test_a_change_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = MemoryWatch()
    with caplog.at_level(logging.WARNING):
        for limit in (1, 1, 1 << 50, 1 << 50):
            watch.look([os.getpid()], 0.0, limit)
            assert watch.alarm == ("" if limit > 1 else LOW_ON_MEMORY)
    assert len(caplog.records) == 2


def test_the_processes_are_those_of_the_present_status(tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    assert pids(str(tmp_path)) == [os.getpid()]
    for child in (7, 8, 0):
        replace_file(status, {"pid": 5, "children": [{"pid": child}]})
        os.utime(status, ns=(child, child))  # the clock of the kernel has ticked
        assert pids(str(tmp_path)) == pids(str(tmp_path)) == ([5, child] if child else [5])
    status.write_text("no JSON")
    assert pids(str(tmp_path)) == [os.getpid()]
    status.unlink()
    assert pids(str(tmp_path)) == [os.getpid()]
