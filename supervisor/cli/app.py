"""shardctl: the list of its commands, and the program itself.

The exit statuses are those of rabbitmqctl, which come from sysexits.h: see `STATUSES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from shardmq.supervisor.cli import (
    connections,
    context_commands,
    definitions,
    diagnostics,
    messages,
    node,
    perf,
    permissions,
    pipeline,
    policies,
    processes,
    queues,
    routes,
    shards,
    storage,
    streams,
    top,
    unsupported_commands,
    users,
)
from shardmq.supervisor.cli.api import CONFIG, USAGE
from shardmq.supervisor.cli.command import bound

STATUSES = (
    "Exit status: 0 done; 1 failed, or a probe that was not passed; 64 wrong usage;"
    " 65 no such thing, or wrong data; 67 no such user; 69 no broker reachable;"
    " 70 refused by the broker. The help of start, store and pipeline names theirs."
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run and steer a shardmq broker.",
    epilog=STATUSES,
)
# The status of click for wrong usage is 2, which scripts written for rabbitmqctl do not know. The
# class is that of click or of the copy of click in typer.
UsageError: Any = typer.BadParameter.__bases__[0]
UsageError.exit_code = USAGE


class StartCommand(TyperCommand):
    """The command `start`.

    Its status for wrong usage is the one with which the broker refuses a setting, so that a wrong
    flag and a wrong value end with the same status.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            error.exit_code = CONFIG
            raise


# The commands by their headings in --help.
PANELS: Final[dict[str, tuple[Callable[..., Any], ...]]] = {
    "The broker": (
        processes.start, processes.stop, processes.shutdown, processes.status, node.ping,
        node.version, node.report, node.cluster_status, node.environment, node.set_cluster_name,
        node.await_startup, node.wait, node.set_log_level, node.set_vm_memory_high_watermark,
        node.set_disk_free_limit, node.force_gc, node.rotate_logs, node.await_online_nodes,
        node.list_feature_flags, node.enable_feature_flag, node.list_deprecated_features, top.top,
        perf.perf,
    ),
    "Queues, exchanges, bindings": (
        queues.list_queues, queues.list_virtual_queues, queues.list_shard_owners,
        queues.list_stream_tracking, queues.reset_offset, streams.add_super_stream,
        streams.delete_super_stream, queues.list_exchanges, queues.list_bindings,
        queues.list_unresponsive_queues, queues.create_queue, queues.delete_queue,
        queues.purge_queue, queues.pause_queue, queues.resume_queue, queues.create_exchange,
        queues.delete_exchange, queues.bind, queues.unbind,
    ),
    "Messages": (
        messages.publish, messages.get, messages.tail, messages.move_messages,
    ),
    "Clients": (
        connections.list_connections, connections.list_channels, connections.list_consumers,
        connections.close_connection, connections.close_all_connections,
        connections.close_all_user_connections,
    ),
    "Users and virtual hosts": (
        users.add_vhost, users.update_vhost_metadata, users.trace_on, users.trace_off,
        users.enable_vhost_deletion_protection, users.disable_vhost_deletion_protection,
        users.delete_vhost, users.restart_vhost, users.list_vhosts, users.set_vhost_tags,
        users.add_user, users.authenticate_user, users.hash_password, users.change_password,
        users.clear_password, users.set_user_tags, users.list_users, users.delete_user,
        users.set_permissions, users.set_permissions_globally,
    ),
    "Permissions and limits": (
        permissions.clear_permissions, permissions.list_permissions,
        permissions.list_user_permissions, permissions.set_topic_permissions,
        permissions.clear_topic_permissions, permissions.list_topic_permissions,
        permissions.list_user_topic_permissions, permissions.set_vhost_limits,
        permissions.clear_vhost_limits, permissions.list_vhost_limits, permissions.set_user_limits,
        permissions.clear_user_limits, permissions.list_user_limits,
    ),
    "Policies and parameters": (
        policies.set_policy, policies.clear_policy, policies.list_policies,
        policies.list_policies_that_match, policies.set_operator_policy,
        policies.clear_operator_policy, policies.list_operator_policies, policies.set_parameter,
        policies.clear_parameter, policies.list_parameters, policies.set_global_parameter,
        policies.clear_global_parameter, policies.list_global_parameters,
    ),
    "Definitions": (
        definitions.export_definitions, definitions.import_definitions,
    ),
}  # fmt: skip
COMMANDS = tuple(command for commands in PANELS.values() for command in commands)


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    typer.echo(f"shardctl {node.own_version()}")
    raise typer.Exit


# The commands that have commands of their own.
GROUPS: Final[dict[str, typer.Typer]] = {
    "context": context_commands.app,
    "diagnostics": diagnostics.app,
    "route": routes.route,
    "ring": routes.ring,
    "pipeline": pipeline.app,
    "definitions": definitions.offline,
    "shards": shards.shards,
    "store": storage.app,
    "storage": storage.app,
}
FORMER = ("storage",)  # Former names, which the help does not show.


class _DefaultsOfGroup(dict[str, Any]):
    """Gives each command of a group the same defaults."""

    def get(self, name: str, default: Any = None) -> Any:
        return default if name == "help" else dict(self)


EARLY = "As after the command."


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True)
    ] = False,
    vhost: Annotated[str | None, typer.Option("--vhost", "-p", help=EARLY)] = None,
    quiet: Annotated[bool | None, typer.Option("--quiet", "-q", help=EARLY)] = None,
    silent: Annotated[bool | None, typer.Option("--silent", "-s", help=EARLY)] = None,
    formatter: Annotated[str | None, typer.Option(help=EARLY)] = None,
    timeout: Annotated[float | None, typer.Option("--timeout", "-t", help=EARLY)] = None,
    named: Annotated[str | None, typer.Option("--node", "-n", help=EARLY)] = None,
) -> None:
    """Run and steer a shardmq broker."""
    # rabbitmqctl accepts its options before the command too. They become defaults of the command.
    early = {
        "vhost": vhost,
        "quiet": quiet,
        "no_table_headers": silent,
        "formatter": formatter,
        "timeout": timeout,
        "node": named,
    }
    given = {name: value for name, value in early.items() if value is not None}
    context.default_map = dict.fromkeys((*(each.__name__ for each in COMMANDS),), given)
    context.default_map |= {name: _DefaultsOfGroup(given) for name in GROUPS}


for panel, commands in PANELS.items():
    for command in commands:
        kind = StartCommand if command is processes.start else None
        # typer would name the command list-queues.
        app.command(command.__name__, cls=kind, rich_help_panel=panel)(bound(command))
unsupported_commands.add_to(app)
for name, group in GROUPS.items():
    app.add_typer(group, name=name, hidden=name in FORMER)


def main() -> None:
    """Run shardctl with the arguments of the command line."""
    app()


if __name__ == "__main__":
    main()
