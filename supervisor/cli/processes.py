"""The commands start, stop, shutdown and status: the processes of the broker."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

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
from shardmq.supervisor.cli.command import DataDir, Formatter
from shardmq.supervisor.cli.show import check_formatter, show

STOP_POLL_S = 0.05
# The columns that fit on a terminal. `--formatter json` shows all that the broker reports.
PROCESS_COLUMNS = ["name", "pid", "state", "restarts", "uptime", "rss_bytes", "status"]
SHARD_COLUMNS = [
    "shard", "pid", "ready", "queues", "live_messages", "live_bytes", "dead_bytes", "disk_bytes",
    "alarm", "warnings",
]  # fmt: skip
SOURCE_ROOT = Path(__file__).absolute().parents[3]


def start(
    config: Annotated[str | None, typer.Option(help="Settings file (TOML).")] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Directory of messages and definitions.")
    ] = None,
    runtime_dir: Annotated[
        str | None, typer.Option(help="Directory of the sockets between the processes.")
    ] = None,
    bind: Annotated[
        str | None, typer.Option(help="Addresses to listen at, separated by commas; * is all.")
    ] = None,
    amqp_port: Annotated[str | None, typer.Option(help="0: any free one.")] = None,
    http_port: Annotated[str | None, typer.Option(help="0: any free one.")] = None,
    metrics_port: Annotated[str | None, typer.Option(help="0: any free one.")] = None,
    amqps_port: Annotated[
        str | None, typer.Option(help="With a certificate. 0: any free one.")
    ] = None,
    https_port: Annotated[
        str | None, typer.Option(help="With a certificate. 0: any free one.")
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(help="Certificate chain, PEM. It opens the ports for TLS.")
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option(help="Key of the certificate, PEM, unless the same file holds both."),
    ] = None,
    tls_ca: Annotated[
        str | None, typer.Option(help="Certificates that may sign those of clients, PEM.")
    ] = None,
    tls_verify: Annotated[
        str | None, typer.Option(help="none or peer: ask clients for certificates.")
    ] = None,
    shards: Annotated[
        str | None, typer.Option(help="A number, or auto: one for each core.")
    ] = None,
    front_doors: Annotated[
        str | None, typer.Option(help="Number of processes that speak AMQP.")
    ] = None,
    durability: Annotated[str | None, typer.Option(help="fsync or page-cache.")] = None,
    load_definitions: Annotated[
        str | None, typer.Option(help="JSON file, loaded at each start.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, text, json or journal.")] = None,
) -> None:
    """Run the broker in the foreground until Ctrl-C or SIGTERM.

    Flags win over the settings file.
    """
    flags = {name: value for name, value in locals().items() if value is not None}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    # The supervisor replaces this process, so that a signal reaches the broker.
    os.execve(
        sys.executable, module_command("shardmq.supervisor", *arguments), module_environment()
    )


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


def status(api: Api, formatter: Formatter = "table") -> None:
    """List the processes with their pids, and the shards with their queues."""
    check_formatter(formatter)
    processes: list[dict[str, Any]] = api.get("processes")
    shards: list[dict[str, Any]] = api.get("shards")
    if formatter == "json":
        typer.echo(json.dumps({"processes": processes, "shards": shards}))
        return
    if formatter == "table":  # The output is for people, even if it goes to a pipe.
        formatter = "pretty_table"
    show(Rows(processes, PROCESS_COLUMNS), formatter)
    typer.echo("")
    show(Rows(shards, SHARD_COLUMNS), formatter)


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module.

    -P keeps Python from importing a folder of the working directory that has the name of one of the
    packages.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """Return an environment in which modules are imported from where shardctl has its own."""
    path = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": f"{SOURCE_ROOT}{os.pathsep}{path}" if path else str(SOURCE_ROOT),
    }
