"""shardctl diagnostics: probes for scripts and orchestrators, by rabbitmq-diagnostics' names.

Exit status of the checks: 0 passed, 1 failed (with the reason), 64 usage, 69 no broker reachable.
"""

from __future__ import annotations

import socket
import ssl
from typing import Annotated, Any

import typer

from shardmq.supervisor.cli import elsewhere, log, node, processes
from shardmq.supervisor.cli.api import FAILED, Api, Rows, fail
from shardmq.supervisor.cli.command import Command, bound

Port = Annotated[int, typer.Argument(metavar="PORT")]
Protocol = Annotated[
    str, typer.Argument(metavar="PROTOCOL", help="amqp, amqp/ssl, http, https, http/prometheus.")
]
CONNECT_TIMEOUT_S = 5.0
STATUSES = "Exit status of the checks: 0 passed, 1 failed, 64 usage, 69 no broker reachable."
HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}

app = typer.Typer(
    no_args_is_help=True, help="Probes, for scripts and orchestrators.", epilog=STATUSES
)


def check_running(api: Api) -> None:
    """All shards and a front door are there: messages can be published and consumed."""
    _check(api, "is-in-service")


def check_alarms(api: Api) -> None:
    """No alarm is in effect."""
    _check(api, "alarms")


def check_virtual_hosts(api: Api) -> None:
    """All vhosts are served."""
    _check(api, "virtual-hosts")


def check_port_listener(api: Api, port: Port) -> None:
    """Somebody of the broker listens at this port."""
    _check(api, "port-listener", str(port))


def check_protocol_listener(api: Api, protocol: Protocol) -> None:
    """There is a listener for this protocol."""
    _check(api, "protocol-listener", protocol)


def check_certificate_expiration(
    api: Api,
    within: Annotated[int, typer.Option("--within", min=0, help="How many of --unit.")] = 4,
    unit: Annotated[str, typer.Option("--unit", help="days, weeks, months or years.")] = "weeks",
) -> None:
    """No certificate of the broker ends within that time."""
    _check(api, "certificate-expiration", str(within), unit)


def check_if_node_is_below_connection_limit(api: Api) -> None:
    """One more connection would be let in."""
    _check(api, "below-node-connection-limit")


def check_port_connectivity(api: Api) -> None:
    """Every listener can be connected to, from here."""
    failures = []
    for one in api.get("overview")["listeners"]:
        host = HERE.get(one["ip_address"], one["ip_address"])
        try:
            socket.create_connection((host, one["port"]), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            failures.append(f"{one['protocol']} {host}:{one['port']}: {error.strerror or error}")
    if failures:
        fail("; ".join(failures), FAILED)


def alarms(api: Api) -> Rows:
    """Alarms in effect, and warnings that are none yet."""
    _, said = api.health("alarms")
    return Rows(
        [*said.get("alarms", []), *said.get("warnings", [])],
        ["alarm", "warning", "shard", "process"],
    )


def listeners(api: Api) -> Rows:
    """Where the broker listens."""
    return Rows(api.get("overview")["listeners"], ["protocol", "ip_address", "port"])


def memory_breakdown(api: Api) -> Rows:
    """Resident memory by process."""
    rows: list[dict[str, Any]] = [row for row in api.get("processes") if row.get("rss_bytes")]
    total = sum(row["rss_bytes"] for row in rows) or 1
    for row in rows:
        row["percent"] = 100 * row["rss_bytes"] / total
    return Rows(sorted(rows, key=lambda row: -row["rss_bytes"]), ["name", "rss_bytes", "percent"])


def message_size_stats(api: Api) -> Rows:
    """How large the messages were that came since each front door's start."""
    return Rows(api.get("message-sizes"), ["above", "up_to", "messages", "percent"])


def list_node_auth_attempt_stats(api: Api) -> Rows:
    """Logins that were tried, by protocol."""
    columns = ["protocol", "auth_attempts", "auth_attempts_failed", "auth_attempts_succeeded"]
    return Rows(api.get("auth", "attempts", _node(api)), columns)


def reset_node_auth_attempt_metrics(api: Api) -> None:
    """Count logins from 0."""
    api.delete("auth", "attempts", _node(api))


def _node(api: Api) -> str:
    return str(api.get("nodes")[0]["name"])


def check_if_node_is_quorum_critical(api: Api) -> None:
    """No queue would lose its majority without this node: queues have none here, and the check is passed."""
    _check(api, "node-is-quorum-critical")


def check_if_node_is_mirror_sync_critical(api: Api) -> None:
    """No mirror waits for this node: there are none, and the check is passed."""
    _check(api, "node-is-mirror-sync-critical")


def check_if_any_deprecated_features_are_used(api: Api) -> None:
    """Nothing is used that will go."""
    used = api.get("deprecated-features", "used")
    if used:
        fail(", ".join(str(row["name"]) for row in used), FAILED)


def tls_versions() -> None:
    """Versions of TLS that can be had here."""
    for version in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
        typer.echo(version.name.replace("_", "."))


def cipher_suites() -> None:
    """Cipher suites that can be had here, in OpenSSL's words."""
    for cipher in ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).get_ciphers():
        typer.echo(cipher["name"])


def _check(api: Api, *path: str) -> None:
    passed, said = api.health(*path)
    if not passed:
        more = [_alarm(one) for one in said.get("alarms", [])]
        more += [one["certificate"] for one in said.get("expired", [])]
        fail("; ".join([str(said.get("reason")), *more]), FAILED)


def _alarm(row: dict[str, Any]) -> str:
    where = (
        f"shard {row['shard']}: "
        if "shard" in row
        else f"{row['process']}: "
        if "process" in row
        else ""
    )
    return f"{where}{row['alarm']}"


COMMANDS: dict[str, Command] = {
    "ping": node.ping,
    "status": processes.status,
    "server_version": node.version,
    "check_running": check_running,
    "is_running": check_running,
    "check_alarms": check_alarms,
    "check_local_alarms": check_alarms,
    "check_virtual_hosts": check_virtual_hosts,
    "check_port_listener": check_port_listener,
    "check_protocol_listener": check_protocol_listener,
    "check_port_connectivity": check_port_connectivity,
    "check_certificate_expiration": check_certificate_expiration,
    "check_if_node_is_below_connection_limit": check_if_node_is_below_connection_limit,
    "check_if_node_is_quorum_critical": check_if_node_is_quorum_critical,
    "check_if_node_is_mirror_sync_critical": check_if_node_is_mirror_sync_critical,
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

for name, command in COMMANDS.items():
    app.command(name)(bound(command))
elsewhere.add_to(app)
