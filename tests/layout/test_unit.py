"""The systemd unit allows every system call that the broker makes in a start, work and a stop."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2]
UNIT = (SOURCE / "deploy" / "shardmq.service").read_text()


def groups() -> dict[str, list[str]]:
    """systemd's groups of system calls, and what each has."""
    said = subprocess.run(
        ["systemd-analyze", "syscall-filter"], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, list[str]] = {}
    for line in said.splitlines():
        word = line.strip()
        if line.startswith("@"):
            found[word] = members = []
        elif word and not word.startswith("#"):
            members.append(word)
    return found


def calls(word: str, known: dict[str, list[str]]) -> set[str]:
    return set().union(*(calls(one, known) for one in known[word])) if word in known else {word}


def allowed() -> set[str]:
    """By the lines of the unit, one after the other."""
    known, found = groups(), set[str]()
    for line in re.findall(r"^SystemCallFilter=(.*)$", UNIT, re.MULTILINE):
        for word in line.removeprefix("~").split():
            found = (
                found - calls(word, known) if line.startswith("~") else found | calls(word, known)
            )
    return found


@pytest.mark.broker
@pytest.mark.skipif(
    not shutil.which("strace") or not shutil.which("systemd-analyze"),
    reason="no strace, no systemd",
)
def test_the_broker_makes_no_system_call_that_its_unit_refuses(tmp_path: Path) -> None:
    traced = tmp_path / "calls"
    start = [sys.executable, "-m", "shardmq.supervisor", "--data-dir", str(tmp_path / "data"),
             "--bind", "127.0.0.1",
             "--amqp-port", "0", "--http-port", "0", "--metrics-port", "0", "--shards",
             "1"]  # fmt: skip
    broker = subprocess.Popen(
        ["strace", "-f", "-c", "-o", str(traced), *start],
        cwd=SOURCE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert broker.stdout is not None
    assert broker.stdout.readline().startswith("ready: ")
    for command in (
        ["perf", "-z", "0.2", "-c", "10", "--persistent"],
        ["add_user", "a", "b"],
        ["stop"],
    ):
        shardctl = [
            sys.executable,
            "-m",
            "shardmq.supervisor.cli",
            *command,
            "--data-dir",
            str(tmp_path / "data"),
        ]
        subprocess.run(shardctl, cwd=SOURCE, check=True, capture_output=True, timeout=120)
    assert broker.wait(timeout=120) == 0
    lines = [line.split() for line in traced.read_text().splitlines()]
    used = {line[-1] for line in lines if len(line) >= 5 and re.fullmatch(r"\d+\.\d+", line[0])} - {
        "total"
    }
    assert {"fdatasync", "memfd_create"} <= used
    assert used <= allowed()
