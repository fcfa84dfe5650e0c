"""storage verify, stats, dump, salvage: a stopped broker's files, read by the store itself in a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from supervisor.cli.api import USAGE, fail
from supervisor.cli.processes import module_command, module_environment

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The data directory, or one store: DATA/shard-00/<hash of the vhost>.")
]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="A directory that is not there yet.")]

app = typer.Typer(
    no_args_is_help=True,
    help="Look into a stopped broker's message files. Exit status: 0 good, 1 damage found, 2 not possible.",
)


@app.command()
def verify(directory: Directory) -> None:
    """Check every record; what is damaged is told by file and byte range."""
    _run("verify", directory)


@app.command()
def stats(directory: Directory) -> None:
    """A line of JSON per segment, then one per store: live and dead messages and bytes."""
    _run("stats", directory)


@app.command()
def dump(directory: Directory) -> None:
    """Every message that is not settled as a line of JSON."""
    _run("dump", directory)


@app.command()
def salvage(directory: Directory, target: Target) -> None:
    """Copy what is readable and not settled into new files; the old ones stay as they are."""
    _run("salvage", directory, target)


def _run(verb: str, directory: Path, *others: Path) -> None:
    if not directory.is_dir():
        fail(f"{directory}: not a directory", USAGE)
    command = module_command("shardd.store", verb, str(directory), *map(str, others))
    raise typer.Exit(subprocess.run(command, env=module_environment(), check=False).returncode)
