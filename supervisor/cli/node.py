"""The commands for the broker as a whole, by the names of rabbitmqctl.

They tell whether the broker runs and is ready, and change what can be set while it runs.
"""

from __future__ import annotations

import json
import platform
import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from shardmq.supervisor.cli.api import (
    DATA,
    DATA_DIRS,
    DEFAULT_PASSWORD,
    FAILED,
    UNREACHABLE,
    USAGE,
    Api,
    Rows,
    connect,
    fail,
    running,
    searched,
)
from shardmq.supervisor.cli.command import DataDir
from shardmq.supervisor.cli.rabbitmq_json import cluster_document
from shardmq.supervisor.modules import SOURCE_ROOT

UNITS = {
    "": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "kib": 1 << 10, "mib": 1 << 20,
    "gib": 1 << 30, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
LEVELS = ("debug", "info", "warning", "error")
LEVELS_OF_RABBITMQ = {"critical": "error", "notice": "info", "none": "error"}
POLL_INTERVAL_S = 0.1
NODES_INTERVAL_S = 0.5
UP = ("ready", "uncalled")  # The states of a child in which nothing is left to wait for.
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
    """Check that a broker answers."""
    api.get("health", "checks", "virtual-hosts")
    typer.echo("Ping succeeded")


def version(api: Api) -> None:
    """Show the version of the broker or, if there is none on this host, of shardctl."""
    if api.endpoint.hint and not api.answers():
        typer.echo("no broker answers; this is the version of shardctl:", err=True)
        typer.echo(own_version())
        return
    typer.echo(api.get("overview")["product_version"])


def own_version() -> str:
    """Return the version of the package."""
    import tomllib
    from importlib import metadata

    try:
        return metadata.version("shardmq")
    except metadata.PackageNotFoundError:  # shardctl runs from its source tree.
        project = tomllib.loads((SOURCE_ROOT / "pyproject.toml").read_text())["project"]
        return str(project["version"])


def report(api: Api) -> None:
    """Print all that the broker reports about itself as JSON, for whoever looks for an error."""
    found: dict[str, Any] = {"host": platform.platform(), "python": platform.python_version()}
    typer.echo(json.dumps(found | {name: api.get(name) for name in REPORTED}, indent=2))


def environment(api: Api) -> Rows:
    """List the settings that hold now, by their keys in the settings file, and their sources."""
    sources = api.get("settings", "sources")
    rows = [
        {"key": key, "value": value, "source": sources.get(key, "")}
        for key, value in api.get("settings").items()
    ]
    return Rows(rows, ["key", "value", "source"])


def cluster_status(api: Api) -> Rows:
    """List the nodes, their alarms and their listeners."""
    overview, nodes = api.get("overview"), api.get("nodes")

    def listeners_of(node: str) -> list[str]:
        return [
            f"{one['protocol']} {one['ip_address']}:{one['port']}"
            for one in overview["listeners"]
            if one.get("node", node) == node
        ]

    rows = [
        {**node, "cluster": overview["cluster_name"], "node": node["name"],
         "alarms": node.get("alarms", []), "listeners": listeners_of(node["name"])}
        for node in nodes
    ]  # fmt: skip
    columns = ["cluster", "node", "running", "alarms", "listeners"]
    if any("is_leader" in node for node in nodes):
        columns[3:3] = ["is_leader", "version"]
    return Rows(rows, columns, cluster_document(overview, nodes))


def set_cluster_name(api: Api, name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Set the name of the broker that clients and metrics show."""
    api.put("global-parameters", "cluster_name", body={"value": name})


def set_log_level(
    api: Api, level: Annotated[str, typer.Argument(metavar="LEVEL", help=", ".join(LEVELS))]
) -> None:
    """Set the level of the log until the next start. The setting log_level holds after that."""
    wanted = LEVELS_OF_RABBITMQ.get(level, level)
    if wanted not in LEVELS:
        fail(f"no such level: {level}; it is one of {', '.join(LEVELS)}", USAGE)
    api.put("settings", "log_level", body={"value": wanted})


def set_vm_memory_high_watermark(
    api: Api,
    value: Annotated[
        str, typer.Argument(metavar="PART", help="A part of the memory, 0 to 1; or: absolute SIZE.")
    ],
    size: Annotated[str, typer.Argument(metavar="SIZE")] = "",
) -> None:
    """Set the memory above which publishers are blocked, until the next start."""
    if value == "absolute":
        api.put("settings", "memory.high_watermark_bytes", body={"value": size_bytes(size)})
        return
    try:
        part = float(value)
    except ValueError:
        fail(f"not a part of the memory: {value}; for a number of bytes: absolute {value}", USAGE)
    api.put("settings", "memory.high_watermark", body={"value": part})
    api.put("settings", "memory.high_watermark_bytes", body={"value": 0})


def set_disk_free_limit(api: Api, size: Size) -> None:
    """Set the free room of the disk below which publishers are blocked, until the next start."""
    api.put("settings", "shards.disk_free_min_bytes", body={"value": size_bytes(size)})


def size_bytes(text: str) -> int:
    """Return a size such as 512MB in bytes, as RabbitMQ counts: kB is 1000 bytes, k and kiB 1024.

    A text that is no size ends the command with status 64.
    """
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    unit = UNITS.get(match[2] if match[2] != "b" else "") if match else None
    if match is None or unit is None:
        fail(f"not a size: {text or 'nothing'}; such as 1000000, 512MB, 2GiB", USAGE)
    return int(match[1]) * unit


def force_gc(api: Api) -> None:
    """Make the controller return free memory to the system at once.

    Front doors and shards return theirs by themselves.
    """
    api.post("nodes", "gc_collect", body={})


def rotate_logs(api: Api) -> None:
    """Do nothing: the program that keeps the log rotates it.

    The log goes to the journal or to standard error.
    """


def list_feature_flags(api: Api) -> Rows:
    """List the feature flags. There are none: every feature is enabled."""
    return Rows(api.get("feature-flags"), ["name", "state"])


def enable_feature_flag(
    api: Api,
    flag: Annotated[str, typer.Argument(metavar="FLAG", help="all, as before an upgrade.")],
) -> None:
    """Enable a feature flag. There are none, so only `all` is accepted."""
    if flag != "all" and all(row["name"] != flag for row in api.get("feature-flags")):
        fail(f"feature flag '{flag}' does not exist", DATA)


def list_deprecated_features(api: Api) -> Rows:
    """List the deprecated features. There are none."""
    return Rows(api.get("deprecated-features"), ["name", "deprecation_phase"])


def await_startup(
    data_dir: DataDir = None,
    timeout: Annotated[float, typer.Option("--timeout", "-t", help="Seconds to wait.")] = 300,
) -> None:
    """Wait until the broker on this host is ready.

    All its processes are ready then, and every queue is recovered.
    """
    from rich.console import Console

    end = time.monotonic() + timeout
    with Console(stderr=True).status("starting") as shown:
        while (missing := _missing(data_dir)) is not None:
            if time.monotonic() > end:
                break
            shown.update(missing)
            time.sleep(POLL_INTERVAL_S)
    if missing is not None:
        fail(f"not ready after {timeout:g} s", FAILED if running(data_dir) else UNREACHABLE)


def wait(
    pid_file: str = typer.Argument(
        "", metavar="PIDFILE", help="Accepted for rabbitmqctl's scripts; without effect."
    ),
    data_dir: DataDir = None,
    timeout: Annotated[float, typer.Option("--timeout", "-t", help="Seconds.")] = 300,
) -> None:
    """Wait until the broker on this host is ready, as await_startup does."""
    await_startup(data_dir, timeout)


def await_online_nodes(
    count: Annotated[
        int, typer.Argument(metavar="COUNT", min=0, help="Without a cluster there is one.")
    ],
    data_dir: DataDir = None,
    timeout: Annotated[float, typer.Option("--timeout", "-t", help="Seconds.")] = 300,
) -> None:
    """Wait until so many nodes run. If it is one, wait until the broker on this host is ready."""
    end = time.monotonic() + timeout
    if count == 0:
        return
    if count > 1 and not _is_in_cluster(data_dir):
        fail(f"{count} nodes will never be there: a broker is one", USAGE)
    await_startup(data_dir, timeout)
    if count == 1:
        return
    api = connect("", "", DEFAULT_PASSWORD, data_dir)
    while (here := sum(node["running"] for node in api.get("nodes"))) < count:
        if time.monotonic() > end:
            fail(f"{here} of {count} nodes run after {timeout:g} s", FAILED)
        time.sleep(NODES_INTERVAL_S)


def _is_in_cluster(data_dir: Path | None) -> bool:
    """Return whether the data directory of the broker is that of a node of a cluster."""
    from shardmq.cluster.membership import FILE_NAME

    directories = DATA_DIRS if data_dir is None else (data_dir,)
    return any((directory / FILE_NAME).exists() for directory in directories)


def _missing(data_dir: DataDir) -> str | None:
    """Return what the start still waits for as a text, or None if the broker is ready."""
    found = running(data_dir)
    if found is None:
        return f"no broker runs on {searched(data_dir)} yet"
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
