"""The commands `shardctl cluster`: the nodes of a cluster."""

from __future__ import annotations

import typer

from shardmq.supervisor.cli.api import Api, Rows
from shardmq.supervisor.cli.command import bound
from shardmq.supervisor.cli.demo import demo

COLUMNS = [
    "name", "running", "is_leader", "shards", "processors", "mem_used", "disk_free", "sockets_used",
    "version", "alarms", "uptime",
]  # fmt: skip

app = typer.Typer(no_args_is_help=True, help="The nodes of a cluster.")


def status(api: Api) -> Rows:
    """List the nodes: which run, which one leads, and what each of them has."""
    return Rows(api.get("nodes"), COLUMNS)


app.command("status")(bound(status))
app.command("demo")(demo)
