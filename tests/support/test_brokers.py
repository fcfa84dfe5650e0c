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


@pytest.mark.parametrize(
    ("marker", "selected"),
    [("broker", ["with_a_broker", "with_a_client", "with_its_own"]), ("not broker", ["without"])],
)
def test_who_uses_a_broker_is_marked(tmp_path: Path, marker: str, selected: list[str]) -> None:
    (tmp_path / "test_file.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = broker\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "tests.support.brokers", "-m", marker]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    found = [line.partition("::test_")[2] for line in said.splitlines() if "::" in line]
    assert found == selected


def test_a_test_without_the_marker_cannot_start_one(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="mark the test"):
        RealBroker(tmp_path / "data")
