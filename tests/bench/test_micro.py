"""What measures one part by itself still runs; a second of each is not a measurement."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command",
    [
        ["path.py", "--seconds", "0.005"],
        ["queues.py", "--sizes", "500"],
        ["topic.py", "--bindings", "50", "--messages", "500"],
        ["limits.py", "--seconds", "0.005"],
        ["store.py", "--seconds", "0.005"],
        ["stream.py", "--messages", "1000"],
    ],
    ids=lambda command: command[0],
)
def test_each_prints_its_table(command: list[str], tmp_path: Path) -> None:
    script, *options = command
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "micro" / script, *options],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert any(character.isdigit() for character in done.stdout)
