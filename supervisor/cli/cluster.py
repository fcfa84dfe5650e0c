"""The commands `shardctl cluster`: the nodes of a cluster."""

from __future__ import annotations

import typer

from shardmq.supervisor.cli.demo import demo

app = typer.Typer(no_args_is_help=True, help="The nodes of a cluster.")
app.command()(demo)


@app.callback()
def _group() -> None:
    """Keep the commands below `cluster`, even if there is only one."""
