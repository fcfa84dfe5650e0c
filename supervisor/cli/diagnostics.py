"""The commands `shardctl diagnostics`: probes for scripts, by the names of rabbitmq-diagnostics.

A check ends with status 0 if it is passed, 1 with the reason if it is not, 64 for wrong usage and
69 if no broker is reachable.
"""

from __future__ import annotations

import socket
import ssl
from functools import partial
from typing import Annotated, Any

import typer

from shardmq.supervisor.cli import log, node, processes, unsupported_commands
from shardmq.supervisor.cli.api import FAILED, HERE, Api, Rows, fail
from shardmq.supervisor.cli.command import Command, bound
from shardmq.supervisor.cli.lazy import group_of
from shardmq.supervisor.cli.unsupported_commands import UNSUPPORTED

Port = Annotated[int, typer.Argument(metavar="PORT")]
Protocol = Annotated[
    str, typer.Argument(metavar="PROTOCOL", help="amqp, amqp/ssl, http, https, http/prometheus.")
]
CONNECT_TIMEOUT_S = 5.0
STATUSES = "Exit status of the checks: 0 passed, 1 failed, 64 usage, 69 no broker reachable."

# Checks without an argument: the command, the health check of the HTTP API and the help.
CHECKS = {
    "check_running": (
        "is-in-service",
        "Check that all shards and a front door run. An alarm may block publishers: check_alarms.",
    ),
    "check_alarms": ("alarms", "Check that no alarm is in effect."),
    "check_local_alarms": ("local-alarms", "Check that no alarm is in effect on this node."),
    "check_virtual_hosts": ("virtual-hosts", "Check that all vhosts are served."),
    "check_if_node_is_below_connection_limit": (
        "below-node-connection-limit",
        "Check that the broker accepts one more connection.",
    ),
    "check_if_node_is_quorum_critical": (
        "node-is-quorum-critical",
        "Check that no quorum queue and no definition needs this node. Passed without a cluster.",
    ),
    "check_if_node_is_mirror_sync_critical": (
        "node-is-mirror-sync-critical",
        "Check that no mirror waits for this node. Passed: there are no mirrors.",
    ),
}


def check_port_listener(api: Api, port: Port) -> None:
    """Check that the broker listens at this port."""
    _check(api, "port-listener", str(port))


def check_protocol_listener(api: Api, protocol: Protocol) -> None:
    """Check that the broker listens for this protocol."""
    _check(api, "protocol-listener", protocol)


def check_certificate_expiration(
    api: Api,
    within: Annotated[int, typer.Option("--within", min=0, help="How many of --unit.")] = 4,
    unit: Annotated[str, typer.Option("--unit", help="days, weeks, months or years.")] = "weeks",
) -> None:
    """Check that no certificate of the broker ends within that time."""
    _check(api, "certificate-expiration", str(within), unit)


def check_port_connectivity(api: Api) -> None:
    """Check that this host can connect to every listener."""
    failures = []
    for listener in api.get("overview")["listeners"]:
        host = HERE.get(listener["ip_address"], listener["ip_address"])
        try:
            address = (host, listener["port"])
            socket.create_connection(address, timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            endpoint = f"{listener['protocol']} {host}:{listener['port']}"
            failures.append(f"{endpoint}: {error.strerror or error}")
    if failures:
        fail("; ".join(failures), FAILED)


def check_if_any_deprecated_features_are_used(api: Api) -> None:
    """Check that no deprecated feature is used."""
    used = api.get("deprecated-features", "used")
    if used:
        fail(", ".join(str(row["name"]) for row in used), FAILED)


def alarms(api: Api) -> Rows:
    """List the alarms in effect, and the warnings."""
    _, said = api.health("alarms")
    rows = [*said.get("alarms", []), *said.get("warnings", [])]
    return Rows(rows, [*_node_column(rows), "alarm", "warning", "shard", "process"])


def listeners(api: Api) -> Rows:
    """List the addresses and ports at which the broker listens."""
    rows = api.get("overview")["listeners"]
    nodes = {row.get("node") for row in rows}
    columns = ["protocol", "ip_address", "port"]
    return Rows(rows, columns if len(nodes) < 2 else ["node", *columns])


def memory_breakdown(api: Api) -> Rows:
    """List the resident memory of each process."""
    rows: list[dict[str, Any]] = [row for row in api.get("processes") if row.get("rss_bytes")]
    total = sum(row["rss_bytes"] for row in rows) or 1
    for row in rows:
        row["percent"] = 100 * row["rss_bytes"] / total
    columns = [*_node_column(rows), "name", "rss_bytes", "percent"]
    return Rows(sorted(rows, key=lambda row: -row["rss_bytes"]), columns)


def message_size_stats(api: Api) -> Rows:
    """List how many messages of which size have come since the start of each front door."""
    return Rows(api.get("message-sizes"), ["above", "up_to", "messages", "percent"])


def list_node_auth_attempt_stats(api: Api) -> Rows:
    """List the numbers of logins by protocol."""
    columns = ["protocol", "auth_attempts", "auth_attempts_failed", "auth_attempts_succeeded"]
    return Rows(api.get("auth", "attempts", _called_node(api)), columns)


def reset_node_auth_attempt_metrics(api: Api) -> None:
    """Count logins from 0 again."""
    api.delete("auth", "attempts", _called_node(api))


def tls_versions() -> None:
    """List the versions of TLS that this host offers."""
    for version in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
        typer.echo(version.name.replace("_", "."))


def cipher_suites() -> None:
    """List the cipher suites that this host offers, by their names in OpenSSL."""
    for cipher in ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).get_ciphers():
        typer.echo(cipher["name"])


def _called_node(api: Api) -> str:
    """Return the name of the node that answers."""
    nodes = api.get("nodes")
    return str(nodes[0]["name"] if len(nodes) == 1 else api.get("overview")["node"])


def _node_column(rows: list[dict[str, Any]]) -> list[str]:
    """Return the column of the node, if the rows are of a cluster."""
    return ["node"] if any("node" in row for row in rows) else []


def _check(api: Api, *path: str) -> None:
    passed, said = api.health(*path)
    if passed:
        return
    reasons = [str(said.get("reason"))]
    for row in said.get("alarms", []):
        source = f"shard {row['shard']}" if "shard" in row else row.get("process")
        where = [str(part) for part in (row.get("node"), source) if part is not None]
        reasons.append(": ".join([" ".join(where)] * bool(where) + [str(row["alarm"])]))
    reasons += [row["certificate"] for row in said.get("expired", [])]
    fail("; ".join(reasons), FAILED)


def _check_command(check: str, text: str) -> Command:
    """Return the command of a row of CHECKS."""

    def command(api: Api) -> None:
        _check(api, check)

    command.__doc__ = text
    return command


_CHECK_COMMANDS = {name: _check_command(*row) for name, row in CHECKS.items()}
COMMANDS: dict[str, Command] = {
    "ping": node.ping,
    "status": processes.status,
    "server_version": node.version,
    **_CHECK_COMMANDS,
    "is_running": _CHECK_COMMANDS["check_running"],
    "check_port_listener": check_port_listener,
    "check_protocol_listener": check_protocol_listener,
    "check_port_connectivity": check_port_connectivity,
    "check_certificate_expiration": check_certificate_expiration,
    "check_if_any_deprecated_features_are_used": check_if_any_deprecated_features_are_used,
    "alarms": alarms,
    "listeners": listeners,
    "memory_breakdown": memory_breakdown,
    "message_size_stats": message_size_stats,
    "list_node_auth_attempt_stats": list_node_auth_attempt_stats,
    "reset_node_auth_attempt_metrics": reset_node_auth_attempt_metrics,
    "log_tail": log.log_tail,
    "log_tail_stream": log.log_tail_stream,
    "log_location": log.log_location,
    "tls_versions": tls_versions,
    "cipher_suites": cipher_suites,
    "report": node.report,
    "environment": node.environment,
}


def _command(name: str, function: Command) -> Any:
    made = typer.Typer(add_completion=False)
    made.command(name)(bound(function))
    return typer.main.get_command(made)


app = typer.Typer(
    cls=group_of(
        {name: partial(_command, name, command) for name, command in COMMANDS.items()},
        {name: partial(unsupported_commands.refusing, name) for name in UNSUPPORTED},
    ),
    no_args_is_help=True,
    help="Probes, for scripts and orchestrators.",
    epilog=STATUSES,
)


@app.callback()
def _options() -> None:
    pass
