"""storage verify, list, dump: a stopped broker's files, read by the store itself in a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from supervisor.cli.api import USAGE, fail
from supervisor.cli.processes import module_command, module_environment

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A store, as DATA/shard-00/<hash of the vhost>.")]

app = typer.Typer(no_args_is_help=True, help="Look into a stopped broker's message files; nothing is changed.")


@app.command()
def verify(directory: Directory) -> None:
    """Check every record."""
    _run("verify", directory)


@app.command("list")
def list_segments(directory: Directory) -> None:
    """The segments and what they hold."""
    _run("list", directory)


@app.command()
def dump(directory: Directory) -> None:
    """Every message as a line of JSON."""
    _run("dump", directory)


def _run(verb: str, directory: Path) -> None:
    if not directory.is_dir():
        fail(f"{directory}: not a directory", USAGE)
    command = module_command("shardd.store", verb, str(directory))
    raise typer.Exit(subprocess.run(command, env=module_environment(), check=False).returncode)
