"""The command `shardctl perf --scenarios`: the workloads of bench/ on a running broker.

bench/ is a folder of scripts that nothing imports. The folder lies beside the source, or where the
wheel has installed it. Its script replaces this process. The load generator is written in C, so the
command needs make and a C compiler.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from shardmq.supervisor.cli.api import FAILED, fail
from shardmq.supervisor.modules import SOURCE_ROOT

# The place where pyproject.toml installs the folder, below the prefix of Python.
INSTALLED = Path("share") / "shardmq" / "bench"
SELF_VARIABLE = "BENCH_SELF"  # bench/run.py reads it in place of --self.


def folder() -> Path:
    """Return the folder bench/, or end the command if it is not installed."""
    for found in (SOURCE_ROOT / "bench", Path(sys.prefix) / INSTALLED):
        if (found / "run.py").exists():
            return found
    fail("the scenarios are not installed: no folder bench", FAILED)


def run(
    uri: str, families: str, peers: list[str], runs: int, seconds: float, quick: bool, output: str
) -> NoReturn:
    """Replace this process by bench/run.py, so that a signal reaches the load.

    Args:
        uri: The broker, as amqp://user:password@host:port/vhost.
        families: The families of scenarios, separated by commas.
        peers: Other brokers to measure by turns, as NAME=URL.
        runs: How often each scenario runs.
        seconds: The length of a run.
        quick: Run each scenario once, for a second.
        output: The file for the results, or "" for none.
    """
    script = folder() / "run.py"
    missing = [name for name in ("make", "cc") if shutil.which(name) is None]
    if missing:
        fail(
            f"the generator is compiled on first use, and {' and '.join(missing)} is missing",
            FAILED,
        )
    command = [sys.executable, str(script), "--group", families]
    command += ["--output", output] if output else ["--no-files"]
    command += [word for peer in peers for word in ("--peer", peer)]
    command += ["--quick"] if quick else ["--runs", str(runs), "--seconds", str(seconds)]
    # Other users can read a command line, and the URI holds the password.
    os.execve(sys.executable, command, {**os.environ, SELF_VARIABLE: uri})
