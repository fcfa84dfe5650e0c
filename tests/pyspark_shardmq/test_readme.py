"""The session in SESSION.md, run cell by cell, prints the output that the file shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from pyspark_shardmq.jobs.command import STARTS_SLOWLY
from tests.pyspark_shardmq.conftest import ROOT
from tests.support.real_broker import RealBroker

# Spark starts slowly on a busy machine
pytestmark = [pytest.mark.minutes, pytest.mark.timeout(600)]

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, lines) of each block; the language of a cell's output is ""."""
    return BLOCK.findall(text)


def run(cell: str, names: dict[str, Any]) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(cell, names)
    return shown.getvalue()


@pytest.mark.broker
def test_the_session_of_the_readme_shows_what_it_says(spark: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    try:
        play(spark, tmp_path / "once")
    # a Python worker has ten seconds to start, and no setting makes this longer
    except Exception as error:
        if STARTS_SLOWLY not in str(error):
            raise
        play(spark, tmp_path / "again")


def play(spark: Any, directory: Path) -> None:
    directory.mkdir()
    broker = RealBroker(directory / "data", shards=4)
    names: dict[str, Any] = {}
    shown = ""
    try:
        for language, lines in blocks((ROOT / "pyspark_shardmq" / "SESSION.md").read_text()):
            if language == "python":
                assert shown == "", "what a cell prints is shown"
                cell = lines.replace("127.0.0.1:5672", broker.amqp).replace(
                    "127.0.0.1:15672", broker.http
                )
                shown = run(cell.replace("0.0.0.0", "127.0.0.1"), names)
            else:
                assert shown.split() == lines.split()
                shown = ""
        assert shown == "" and names["spark"] is spark
        broker.stop()
    finally:
        broker.clean_up()
