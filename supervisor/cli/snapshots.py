"""The command `shardctl snapshot`: a backup of a broker that runs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import typer

from shardmq.supervisor.cli.api import TIMEOUT_S, Api

SNAPSHOT_S_MAX = 3600.0


def snapshot(
    api: Api,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Absent or empty, on the host of the broker.")
    ],
) -> None:
    """Make a snapshot of the definitions and messages of a broker that runs.

    Start a broker on it with `shardctl start --data-dir DIR`. Files that no longer change get a
    second name there, if DIR is on the same file system, and are copied if not.
    """
    if api.timeout_s == TIMEOUT_S:
        api = dataclasses.replace(api, timeout_s=SNAPSHOT_S_MAX)
    made = api.post("snapshots", body={"directory": os.path.abspath(directory)})
    typer.echo(f"a snapshot is in {made['directory']}")
