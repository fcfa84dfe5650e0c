"""The commands in blocks marked `sh` of the pages of deploy/ do what they say, on a real broker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.real_broker import RealBroker

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "deploy").glob("*.md"))
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Written by RabbitMQ 3.10.8. LavinMQ's files have the same format.
EXPORT = ROOT / "tests" / "definitions" / "rabbitmq_definitions.json"
OF_PAGES = {
    page.name: blocks for page in PAGES if (blocks := "".join(BLOCK.findall(page.read_text())))
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    made = RealBroker(tmp_path_factory.mktemp("pages") / "data")
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


# In this order: the one that deletes the user guest comes last.
@pytest.mark.parametrize("page", sorted(OF_PAGES, key=lambda name: (name == "INSTALL.md", name)))
def test_the_commands_of_a_page_work(broker: RealBroker, page: str, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "shardctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardmq.supervisor.cli "$@"\n')
    program.chmod(0o755)
    for name in ("rabbitmq.json", "lavinmq.json"):
        (tmp_path / name).symlink_to(EXPORT)
    environment = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SHARDMQ_DATA_DIR": str(broker.data_dir),
    }
    (tmp_path / "snapshots").mkdir()
    commands = OF_PAGES[page].replace("/tmp/", f"{tmp_path}/")
    commands = commands.replace("/var/lib/shardmq/snapshots", f"{tmp_path}/snapshots")
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_all_pages_with_commands_that_can_be_tried_are_tried() -> None:
    assert {"ALARMS.md", "BACKUP.md", "INSTALL.md", "SECURITY.md", "SETTINGS.md"} <= set(OF_PAGES)
