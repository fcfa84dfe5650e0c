"""The jobs' command lines answer each error with one line and an exit status, without Spark."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from typer.testing import CliRunner

from pyspark_shardmq.jobs import archive, command, replay
from shardmq.supervisor.cli.app import app


def test_a_job_nobody_knows_is_status_2_and_those_known_are_listed() -> None:
    refused = CliRunner().invoke(app, ["pipeline", "run", "archve", "orders"])
    assert (
        refused.exit_code == 2
        and "there are archive, replay, process, analytics, backfill" in refused.output
    )
    assert CliRunner().invoke(app, ["pipeline", "list"]).output.count("\n") == 5


@pytest.mark.parametrize(
    ("lacking", "hint"), [("pyspark", "'pyspark-shardmq[spark]'"), ("java", "apt-get install")]
)
def test_what_spark_lacks_is_status_69_and_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lacking: str, hint: str
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == lacking else object()
    )
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    given = archive.arguments(["orders", "/tmp/never-made"])
    assert (
        command.run("archive", given, lambda *_: pytest.fail("no Spark was to be had"))
        == command.UNAVAILABLE
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line


def test_the_line_that_says_why_is_found_in_sparks_pages() -> None:
    text = (
        "[STREAM_FAILED] Query ...\nTraceback\n  File x\npyspark_shardmq.offsets.DataLoss: "
        "orders/0 is gone\n\tat org"
    )
    assert command.reason(RuntimeError(text)) == "orders/0 is gone"
    assert command.reason(RuntimeError("one\ntwo")) == "one"


@pytest.mark.parametrize(
    "words",
    [
        ["orders"],
        ["orders", "/x", "--rows-per-epoch", "0"],
        ["a", "b", "--table-format", "x"],
        ["a", "b", "--option", "groupName"],
        ["a", "b", "--conf", "=1"],
    ],
)
def test_wrong_arguments_are_status_2(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        archive.arguments(words)
    assert ended.value.code == 2


def test_a_time_of_the_command_line_is_meant_to_the_microsecond_and_else_refused(
    capsys: Any,
) -> None:
    for text in (
        "2026-11-20T12:00:00.123457Z",
        "2026-11-20 13:00:00.123457+01:00",
        "2026-11-20T12:00:00.123457",
    ):
        assert (
            replay.arguments(["/x", "--since", text]).since == "timestamp_micros(1795176000123457)"
        )
    with pytest.raises(SystemExit) as ended:
        replay.arguments(["/x", "--until", "yesterday"])
    assert ended.value.code == 2 and "'yesterday' is no time" in capsys.readouterr().err
