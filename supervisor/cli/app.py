"""shardctl: its commands. Exit status: 0 done, 1 failed or refused, 2 usage or settings, 69 no broker reachable."""

from __future__ import annotations

import tomllib
from importlib import metadata
from typing import Annotated

import typer

from supervisor.cli import processes, queues, storage, users
from supervisor.cli.processes import SOURCE_ROOT

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Run and steer a shardmq broker.")

COMMANDS = (
    processes.start,
    processes.stop,
    processes.status,
    queues.list_queues,
    queues.list_exchanges,
    queues.list_bindings,
    queues.list_connections,
    users.add_vhost,
    users.delete_vhost,
    users.add_user,
    users.change_password,
    users.delete_user,
    users.set_permissions,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardctl {_version()}")
        raise typer.Exit


def _version() -> str:
    try:
        return metadata.version("shardmq")
    except metadata.PackageNotFoundError:  # run from its source tree
        project = tomllib.loads((SOURCE_ROOT / "pyproject.toml").read_text())["project"]
        return str(project["version"])


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Run and steer a shardmq broker."""


for command in COMMANDS:
    app.command(command.__name__)(command)  # typer's own naming would turn list_queues into list-queues
app.add_typer(storage.app, name="storage")
app.add_typer(storage.app, name="store", hidden=True)  # as others call it


def main() -> None:
    app()


if __name__ == "__main__":
    main()
