"""shardctl perf --scenarios: the workloads of bench/, with its generator in C, on a broker that runs.

bench/ is a folder of scripts that nothing imports: it lies beside the source, or where the wheel puts it, and runs in a
process of its own, in the place of this one. It needs make and a C compiler.
"""

from __future__ import annotations

import datetime
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from shardmq.supervisor.cli.api import FAILED, fail
from shardmq.supervisor.cli.processes import SOURCE_ROOT

# As pyproject.toml installs it.
INSTALLED = Path("share") / "shardmq" / "bench"


def folder() -> Path:
    for found in (SOURCE_ROOT / "bench", Path(sys.prefix) / INSTALLED):
        if (found / "run.py").exists():
            return found
    fail("the scenarios are not installed: no folder bench", FAILED)


def run(
    uri: str, families: str, peers: list[str], runs: int, seconds: float, quick: bool, output: str
) -> NoReturn:
    """This process becomes bench/run.py: who interrupts it means the load. Without `output` its results lie where the
    command was given."""
    script = folder() / "run.py"
    missing = [name for name in ("make", "cc") if shutil.which(name) is None]
    if missing:
        fail(
            f"the generator is compiled on first use, and {' and '.join(missing)} is missing",
            FAILED,
        )
    now = datetime.datetime.now(datetime.UTC)
    command = [sys.executable, str(script), "--self", uri, "--group", families]
    command += ["--output", output or f"shardmq-{now:%Y-%m-%dT%H%M%S}.json"]
    command += [word for peer in peers for word in ("--peer", peer)]
    command += ["--quick"] if quick else ["--runs", str(runs), "--seconds", str(seconds)]
    os.execv(sys.executable, command)
