"""The commands `store verify`, `stats`, `dump`, `salvage` and `merge`, for files at rest.

All but `merge` are the store's, which reads the files in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardmq.supervisor import merging
from shardmq.supervisor.cli.api import CONFIG, fail
from shardmq.supervisor.cli.processes import run_module

Directory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="The data directory, or one store: DATA/shard-00/<hash of the vhost>."
    ),
]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="A directory that is not there yet.")]

STATUSES = (
    "Exit status: 0 no damage; 1 damage found: standard error names the file, the byte range and"
    " what is lost, and the rest is done; 2 nothing done: no such directory, a broker runs on these"
    " files, or they are of a later version; 64 wrong usage."
)

app = typer.Typer(
    no_args_is_help=True, help="Look into a stopped broker's message files.", epilog=STATUSES
)


@app.command(epilog=STATUSES)
def verify(directory: Directory) -> None:
    """Check every record and report damage by file and byte range. Changes nothing."""
    _run("verify", directory)


@app.command(epilog=STATUSES)
def stats(directory: Directory) -> None:
    """Print live and dead messages and bytes: a line of JSON for each segment, then for each store.

    Changes nothing.
    """
    _run("stats", directory)


@app.command(epilog=STATUSES)
def dump(directory: Directory) -> None:
    """Print a line of JSON for each message that is not acknowledged. Changes nothing.

    Body and AMQP properties are in base64. A queue is named by the id that it keeps for life.
    """
    _run("dump", directory)


@app.command(epilog=STATUSES)
def salvage(directory: Directory, target: Target) -> None:
    """Copy the messages that are readable and not acknowledged into new files, in their order.

    The old files stay as they are. To go on with the new ones, replace the stores in DIR by those
    in OUT. A start of the broker repairs damaged records by itself: this command is for disks that
    cannot be read everywhere, and for a look before the start.
    """
    _run("salvage", directory, target)


@app.command(epilog=STATUSES)
def merge(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Has the parts of all nodes, as DIR/NODE.")
    ],
    target: Target,
) -> None:
    """Merge the parts of a cluster's snapshot into a data directory for one host.

    A broker without a cluster starts on OUT, and so does the first node of a new cluster. The parts
    stay as they are.
    """
    try:
        origin = merging.merge(directory.absolute(), target.absolute())
    except merging.NotMerged as error:
        fail(str(error), CONFIG)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), CONFIG)
    typer.echo(f"the snapshot {origin.snapshot} of {origin.made_at} is in {target}")


def _run(verb: str, directory: Path, *others: Path) -> None:
    if not directory.is_dir():
        fail(f"{directory}: not a directory", CONFIG)
    paths = map(str, (directory, *others))
    raise typer.Exit(run_module("shardmq.shardd.store.tools", verb, *paths))
