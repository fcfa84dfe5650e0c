"""store verify, stats, dump, salvage: a stopped broker's files, read by the store itself in a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from shardmq.supervisor.cli.api import CONFIG, fail
from shardmq.supervisor.cli.processes import module_command, module_environment

Directory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="The data directory, or one store: DATA/shard-00/<hash of the vhost>."
    ),
]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="A directory that is not there yet.")]

STATUSES = (
    "Exit status: 0 all is well; 1 damage found, told on standard error by file, byte range and what it costs (all "
    "else is done); 2 nothing done: no such directory, a broker runs on these files, or they are of a later version; "
    "64 wrong usage."
)

app = typer.Typer(
    no_args_is_help=True, help="Look into a stopped broker's message files.", epilog=STATUSES
)


@app.command(epilog=STATUSES)
def verify(directory: Directory) -> None:
    """Check every record; what is damaged is told by file and byte range. Changes nothing."""
    _run("verify", directory)


@app.command(epilog=STATUSES)
def stats(directory: Directory) -> None:
    """A line of JSON per segment, then one per store: live and dead messages and bytes. Changes nothing."""
    _run("stats", directory)


@app.command(epilog=STATUSES)
def dump(directory: Directory) -> None:
    """A line of JSON for each message that is not settled. Changes nothing.

    Body and AMQP properties are in base64; queues are named by the id that each keeps for life.
    """
    _run("dump", directory)


@app.command(epilog=STATUSES)
def salvage(directory: Directory, target: Target) -> None:
    """Copy what is readable and not settled into new files, in order; the old ones stay as they are.

    To go on with them put the stores in OUT in the place of those in DIR. A start does as much by itself with damaged
    records; this is for disks that cannot be read everywhere, and to look before.
    """
    _run("salvage", directory, target)


def _run(verb: str, directory: Path, *others: Path) -> None:
    if not directory.is_dir():
        fail(f"{directory}: not a directory", CONFIG)
    command = module_command("shardmq.shardd.store", verb, str(directory), *map(str, others))
    raise typer.Exit(subprocess.run(command, env=module_environment(), check=False).returncode)
