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
    second name there, if DIR is on the same file system, and are copied if not. In a cluster each
    node makes DIR/NODE on its own host. Each shard is in the part of one node, so keep all parts.
    """
    if api.timeout_s == TIMEOUT_S:
        api = dataclasses.replace(api, timeout_s=SNAPSHOT_S_MAX)
    made = api.post("snapshots", body={"directory": os.path.abspath(directory)})
    if "parts" not in made:
        typer.echo(f"a snapshot is in {made['directory']}")
        return
    typer.echo(f"the snapshot {made['snapshot']} is in {made['directory']} of each host:")
    for node, shards in made["parts"].items():
        typer.echo(f"  {node}: {'shards ' if shards else 'no shard'}{', '.join(map(str, shards))}")
    for node in made["nodes_away"]:
        typer.echo(f"  {node}: it is down and has no part; other nodes have its shards")
