"""The commands `pipeline run` and `pipeline list`: jobs on Spark.

The package pyspark_shardmq has the jobs. Each runs in a process of its own.
"""

from __future__ import annotations

from typing import Annotated

import typer

from shardmq.supervisor.cli.api import CONFIG, fail
from shardmq.supervisor.cli.processes import run_module

JOBS = {
    "archive": "streams to Parquet files, exactly once",
    "replay": "archived rows to an exchange",
    "process": "SQL over streams, what it gives to an exchange",
    "analytics": "rates, hot keys and skew of streams, as tables and as a page",
    "backfill": "Parquet, CSV or JSON files to an exchange",
}

app = typer.Typer(
    no_args_is_help=True,
    help=r"Run jobs over streams on Spark (pip install 'pyspark-shardmq\[spark]').",
)


@app.command("list")
def list_jobs() -> None:
    """List the jobs."""
    for name, text in JOBS.items():
        typer.echo(f"{name:10} {text}")


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
    epilog="shardctl pipeline run NAME --help says what a job takes.",
)
def run(
    context: typer.Context, name: Annotated[str, typer.Argument(help="Name of the job.")]
) -> None:
    """Run a job with the arguments after its name.

    The exit status is that of the job.
    """
    if name not in JOBS:
        fail(f"no job {name}: there are {', '.join(JOBS)}", CONFIG)
    raise typer.Exit(run_module(f"pyspark_shardmq.jobs.{name}", *context.args))
