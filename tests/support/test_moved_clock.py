"""A moved clock changes the time of day of its processes, and no other clock."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.moved_clock import MovedClock, why_impossible

IMPOSSIBLE = why_impossible()
TELL = """\
import time
for line in open(0):
    print(time.time(), time.monotonic(), flush=True)
"""


@pytest.mark.skipif(bool(IMPOSSIBLE), reason=IMPOSSIBLE)
def test_a_clock_is_moved_while_its_process_runs(tmp_path: Path) -> None:
    clock = MovedClock(tmp_path, "host")
    with subprocess.Popen(
        [sys.executable, "-S", "-c", TELL],
        env={**os.environ, **clock.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for moved in (0, 3600, -3600):
            clock.move(moved)
            before = time.time(), time.monotonic()
            process.stdin.write("\n")
            process.stdin.flush()
            day, monotonic = map(float, process.stdout.readline().split())
            after = time.time(), time.monotonic()
            assert before[0] - 1 <= day - moved <= after[0] + 1
            assert before[1] <= monotonic <= after[1]
