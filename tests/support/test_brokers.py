"""Test that the marker `broker` is on every test that starts one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.real_broker import SOURCE, RealBroker

FILE = """
import pytest
def test_with_a_broker(broker): ...
def test_with_a_client(client): ...
@pytest.mark.broker
def test_with_its_own(tmp_path): ...
def test_without(name): ...
"""


def test_who_uses_a_broker_is_marked(tmp_path: Path) -> None:
    (tmp_path / "test_file.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = broker\n")
    selected = ["--collect-only", "-q", "-p", "tests.support.brokers", "-m", "not broker"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "pytest", *selected]
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout
    assert [line for line in said.stdout.splitlines() if "::" in line] == [
        "test_file.py::test_without"
    ]


def test_a_test_without_the_marker_cannot_start_one(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="mark the test"):
        RealBroker(tmp_path / "data")
