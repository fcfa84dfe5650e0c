"""A broker whose processes are forks is the same as one whose processes commands have started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked_broker
from tests.support.real_broker import RealBroker, wait_until

pytestmark = pytest.mark.broker
FACTS = ("Umask", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Seccomp")
PROCESSES = [("controller", 0), ("shard", 0), ("shard", 1), ("front-door", 0)]


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[RealBroker]:
    made = RealBroker(tmp_path / "forked")
    yield made
    made.clean_up()


def facts_of(pid: int, broker: RealBroker) -> dict[str, Any]:
    """Return what a process has of its start: signals, session, folder, and open files by kind."""
    proc = Path(f"/proc/{pid}")
    lines = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    runtime_dir = json.loads((broker.data_dir / "broker.json").read_text())["runtime_dir"]

    def kind(file: str) -> str:
        file = file.replace(runtime_dir, "runtime").replace(str(broker.data_dir), "data")
        return re.sub(r"\d+", "N", file)

    files = Counter(
        kind(os.readlink(each)) for each in (proc / "fd").iterdir() if each.is_symlink()
    )
    del files["anon_inode:[pidfd]"]  # by which the supervisor waits for its forks
    return {
        "session": os.getsid(pid) == pid,
        "folder": os.readlink(proc / "cwd"),
        "files": files,
        **{name: lines[name].strip() for name in FACTS},
    }


def test_its_processes_have_the_files_signals_and_sessions_of_others(
    forked: RealBroker, tmp_path: Path
) -> None:
    other = RealBroker(tmp_path / "other", forked=False)

    def found_in(broker: RealBroker) -> list[dict[str, Any]]:
        pids = [broker.process.pid, *(broker.pid(*which) for which in PROCESSES)]
        return [facts_of(pid, broker) for pid in pids]

    try:
        with contextlib.suppress(AssertionError):  # told with all that differs below
            wait_until(lambda: found_in(forked) == found_in(other), "all connections")
        assert found_in(forked) == found_in(other)
    finally:
        other.clean_up()


def test_a_process_that_was_killed_comes_back_and_a_stop_ends_all_with_0(
    forked: RealBroker,
) -> None:
    for which in PROCESSES:
        forked.kill(*which)
    assert forked.has_logged("ended: signal SIGKILL")
    assert forked.process.poll() is None
    forked.stop()
    assert forked.process.returncode == 0


def test_the_end_of_its_supervisor_is_told_with_the_signal(forked: RealBroker) -> None:
    forked.process.kill()
    assert forked.process.wait(60) == -signal.SIGKILL
    forked.process.kill()  # nothing that has its number by now


@pytest.mark.parametrize("name", ["PYTHONPATH", *forked_broker.READ_ONCE])
def test_what_python_or_a_module_reads_once_is_not_for_forks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(forked_broker.COLD, raising=False)
    assert forked_broker.may_fork({"SHARDMQ_SHARDS_COUNT": "2"})
    assert not forked_broker.may_fork({name: "x", "SHARDMQ_SHARDS_COUNT": "2"})
    if name in forked_broker.READ_ONCE:
        monkeypatch.setenv(name, "x")
        assert not forked_broker.may_fork({})
