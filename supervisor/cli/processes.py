"""The commands start, stop, shutdown and status: the processes of the broker."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import time
from typing import Annotated, Any

import typer

from shardmq.supervisor import modules
from shardmq.supervisor.cli.api import (
    FAILED,
    UNREACHABLE,
    Api,
    Rows,
    fail,
    is_alive,
    running,
    searched,
)
from shardmq.supervisor.cli.command import DataDir, Formatter, Json
from shardmq.supervisor.cli.rabbitmq_json import status_document
from shardmq.supervisor.cli.show import check_formatter, show
from shardmq.supervisor.config import FLAGS

STOP_POLL_S = 0.05
# The columns that fit on a terminal. `--formatter json` shows all that the broker reports.
PROCESS_COLUMNS = ["name", "pid", "state", "restarts", "uptime", "rss_bytes", "status"]
SHARD_COLUMNS = [
    "shard", "pid", "ready", "queues", "live_messages", "live_bytes", "dead_bytes", "disk_bytes",
    "alarm", "warnings",
]  # fmt: skip


def start(**given: str | None) -> None:
    """Run the broker in the foreground until Ctrl-C or SIGTERM.

    Flags win over the settings file.
    """
    arguments = [
        f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None
    ]
    # The supervisor replaces this process, so that a signal reaches the broker.
    command = modules.command("shardmq.supervisor", *arguments)
    os.execve(command[0], command, modules.environment())


_OPTIONS = [
    inspect.Parameter(
        flag.removeprefix("--").replace("-", "_"),
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[str | None, typer.Option(help=text)],
        default=None,
    )
    for flag, text in (
        ("--config", "Settings file (TOML)."),
        *((flag, text) for flag, (_, text) in FLAGS.items()),
    )
]
# typer reads the signature and the annotations.
start.__signature__ = inspect.Signature(_OPTIONS)  # type: ignore[attr-defined]
start.__annotations__ = {option.name: option.annotation for option in _OPTIONS}


def stop(
    data_dir: DataDir = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the drain.")] = 120,
) -> None:
    """Drain and stop the broker on this data directory, and wait until it is gone."""
    found = running(data_dir)
    if found is None:
        fail(f"no broker runs on {searched(data_dir)}", UNREACHABLE)
    pid = int(found["pid"])
    try:
        os.kill(pid, signal.SIGTERM)
    except PermissionError:
        fail(f"not allowed to stop pid {pid}")
    except ProcessLookupError:
        return
    deadline = time.monotonic() + timeout
    while is_alive(pid, int(found["pid_started"])):
        if time.monotonic() > deadline:
            fail(f"pid {pid} still drains after {timeout:g} s", FAILED)
        time.sleep(STOP_POLL_S)


def shutdown(
    data_dir: DataDir = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the drain.")] = 120,
) -> None:
    """Drain and stop the broker, as stop does."""
    stop(data_dir, timeout)


def status(api: Api, formatter: Formatter = "table", as_json: Json = False) -> None:
    """List the processes with their pids, the shards with their queues, and what is wrong.

    JSON has the keys of rabbitmqctl, and these lists as `broker_processes` and `shards`.
    """
    check_formatter(formatter)
    processes: list[dict[str, Any]] = api.get("processes")
    shards: list[dict[str, Any]] = api.get("shards")
    if as_json or formatter == "json":
        typer.echo(json.dumps(status_document(api, processes, shards)))
        return
    if formatter == "table":  # The output is for people, even if it goes to a pipe.
        formatter = "pretty_table"
    columns = PROCESS_COLUMNS
    if any(row["kind"] == "shard" and row.get("front_door") is not None for row in processes):
        columns = [*PROCESS_COLUMNS, "front_door"]
    in_cluster = ["node"] if any("node" in row for row in processes) else []
    # 0 is no pid. The processes of bridges and of the reader run only when they are needed.
    listed = [row | {"pid": row.get("pid") or None} for row in processes]
    show(Rows(listed, [*in_cluster, *columns]), formatter)
    typer.echo("")
    show(Rows(shards, [*in_cluster, *SHARD_COLUMNS]), formatter)
    for node in api.get("nodes") if in_cluster else ():
        for alarm in node["alarms"] if node["running"] else ["down"]:
            typer.echo(f"\n{node['name']}: {alarm}")


def run_module(module: str, *arguments: str) -> int:
    """Run a module in a process of its own and return its exit status."""
    command = modules.command(module, *arguments)
    return subprocess.run(command, env=modules.environment(), check=False).returncode
