"""The broker as a whole: is it there, is it ready, and what can be set while it runs; rabbitmqctl's names."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shardmq.supervisor.cli.api import (
    DATA,
    FAILED,
    UNREACHABLE,
    USAGE,
    Api,
    Rows,
    fail,
    looked_in,
    running,
)
from shardmq.supervisor.cli.command import DataDir

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30,
         "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # fmt: skip
LEVELS = ("debug", "info", "warning", "error")
LEVELS_OF_RABBITMQ = {"critical": "error", "notice": "info", "none": "error"}
LOOK_EACH_S = 0.1
UP = ("ready", "uncalled")  # states of children
REPORTED = (
    "overview",
    "nodes",
    "processes",
    "shards",
    "vhosts",
    "policies",
    "connections",
    "queues",
)

Size = Annotated[
    str, typer.Argument(metavar="SIZE", help="Bytes, or with a unit such as 512MB or 2GiB.")
]


def ping(api: Api) -> None:
    """Whether a broker answers."""
    api.get("overview")
    typer.echo("Ping succeeded")


def version(api: Api) -> None:
    """The broker's version."""
    typer.echo(api.get("overview")["product_version"])


def report(api: Api) -> None:
    """All there is to say about this broker, as JSON: for whoever is to find out what is wrong with it."""
    found: dict[str, Any] = {"host": platform.platform(), "python": platform.python_version()}
    typer.echo(json.dumps(found | {name: api.get(name) for name in REPORTED}, indent=2))


def environment(api: Api) -> Rows:
    """The settings as they hold now, by their keys in the file."""
    return Rows(
        [{"key": key, "value": value} for key, value in api.get("settings").items()],
        ["key", "value"],
    )


def cluster_status(api: Api) -> Rows:
    """The node there is, what is wrong with it, and where it listens."""
    overview, nodes = api.get("overview"), api.get("nodes")
    where = [
        f"{one['protocol']} {one['ip_address']}:{one['port']}" for one in overview["listeners"]
    ]
    rows = [
        {"cluster": overview["cluster_name"], "node": node["name"], "running": node["running"],
         "alarms": node["alarms"], "listeners": where}
        for node in nodes
    ]  # fmt: skip
    return Rows(rows, ["cluster", "node", "running", "alarms", "listeners"])


def set_cluster_name(api: Api, name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Give the broker another name for clients and metrics."""
    api.put("global-parameters", "cluster_name", body={"value": name})


def set_log_level(
    api: Api, level: Annotated[str, typer.Argument(metavar="LEVEL", help=", ".join(LEVELS))]
) -> None:
    """Log more or less, until the next start; log_level in the settings is for ever."""
    wanted = LEVELS_OF_RABBITMQ.get(level, level)
    if wanted not in LEVELS:
        fail(f"{level}: one of {', '.join(LEVELS)}", USAGE)
    _set(api, "log_level", wanted)


def set_vm_memory_high_watermark(
    api: Api,
    value: Annotated[
        str, typer.Argument(metavar="PART", help="Of the memory, 0 to 1; or: absolute SIZE.")
    ],
    size: Annotated[str, typer.Argument(metavar="SIZE")] = "",
) -> None:
    """How much memory the broker may hold before publishers are blocked, until the next start."""
    if value == "absolute":
        _set(api, "memory.high_watermark_bytes", size_bytes(size))
        return
    try:
        part = float(value)
    except ValueError:
        fail(f"not a part of the memory: {value}; for a number of bytes: absolute {value}", USAGE)
    _set(api, "memory.high_watermark", part)
    _set(api, "memory.high_watermark_bytes", 0)


def set_disk_free_limit(api: Api, size: Size) -> None:
    """How much of the disk is to stay free: below, publishers are blocked. Until the next start."""
    _set(api, "shards.disk_free_min_bytes", size_bytes(size))


def size_bytes(text: str) -> int:
    """As RabbitMQ counts: kB are 1000 bytes, k and kiB 1024."""
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    unit = UNITS.get(match[2] if match[2] != "b" else "") if match else None
    if match is None or unit is None:
        fail(f"not a size: {text or 'nothing'}; such as 1000000, 512MB, 2GiB", USAGE)
    return int(match[1]) * unit


def _set(api: Api, name: str, value: str | float) -> None:
    api.put("settings", name, body={"value": value})


def force_gc(api: Api) -> None:
    """Have the controller give free memory back at once; front doors and shards do by themselves."""
    api.post("nodes", "gc_collect", body={})


def rotate_logs(api: Api) -> None:
    """Nothing to do: the log goes to the journal or to standard error, and who keeps it rotates it."""


def list_feature_flags(api: Api) -> Rows:
    """Feature flags: there are none, every feature is there."""
    return Rows(api.get("feature-flags"), ["name", "state"])


def enable_feature_flag(
    api: Api,
    flag: Annotated[str, typer.Argument(metavar="FLAG", help="all, as before an upgrade.")],
) -> None:
    """All there are, which is none."""
    if flag != "all" and all(row["name"] != flag for row in api.get("feature-flags")):
        fail(f"feature flag '{flag}' does not exist", DATA)


def list_deprecated_features(api: Api) -> Rows:
    """Features that will go: there are none."""
    return Rows(api.get("deprecated-features"), ["name", "deprecation_phase"])


def await_startup(
    data_dir: DataDir = None,
    timeout: Annotated[
        float, typer.Option("--timeout", "-t", help="Seconds; rabbitmqctl's are 300.")
    ] = 300,
) -> None:
    """Wait until the broker on this host is ready: all its processes are, and every backlog is recovered."""
    if not _wait(lambda: _unready(data_dir), timeout):
        fail(f"not ready after {timeout:g} s", FAILED if running(data_dir) else UNREACHABLE)


def wait(
    pid_file: Annotated[
        str, typer.Argument(metavar="PIDFILE", help="Taken as rabbitmqctl's, and not needed.")
    ] = "",
    data_dir: DataDir = None,
    timeout: Annotated[float, typer.Option("--timeout", "-t", help="Seconds.")] = 300,
) -> None:
    """As await_startup."""
    await_startup(data_dir, timeout)


def await_online_nodes(
    count: Annotated[int, typer.Argument(metavar="COUNT", min=0, help="There is one.")],
    data_dir: DataDir = None,
    timeout: Annotated[float, typer.Option("--timeout", "-t", help="Seconds.")] = 300,
) -> None:
    """As await_startup: a broker is one node."""
    if count > 1:
        fail(f"{count} nodes will never be there: a broker is one", USAGE)
    if count == 1:
        await_startup(data_dir, timeout)


def _unready(data_dir: DataDir) -> str | None:
    """What is still to come, in words; None when all is there."""
    found = running(data_dir)
    if found is None:
        return f"no broker runs on {looked_in(data_dir)} yet"
    try:
        children = json.loads((Path(found["runtime_dir"]) / "status.json").read_text())["children"]
    except (OSError, ValueError, KeyError):
        return "starting"
    waits = [
        f"{child['name']}: {child['status'] or child['state']}"
        for child in children
        if child["state"] not in UP
    ]
    return "; ".join(waits) or None


def _wait(unready: Callable[[], str | None], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    with Console(stderr=True).status("starting") as shown:
        while (what := unready()) is not None:
            if time.monotonic() > end:
                return False
            shown.update(what)
            time.sleep(LOOK_EACH_S)
    return True
