"""shardctl: the list of its commands, and what is common to them.

The exit statuses are those of rabbitmqctl, which come from sysexits.h: see `STATUSES`.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from shardmq.supervisor.cli.api import CONFIG, USAGE
from shardmq.supervisor.cli.lazy import Make, group_of
from shardmq.supervisor.cli.unsupported_commands import UNSUPPORTED, refusing

STATUSES = (
    "Exit status: 0 done; 1 failed, or a probe that was not passed; 64 wrong usage;"
    " 65 no such thing, or wrong data; 67 no such user; 69 no broker reachable;"
    " 70 refused by the broker. The help of start, store and pipeline names theirs."
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


# The commands by their headings in --help: the module and the function of each.
PANELS: Final[dict[str, str]] = {
    "The broker": (
        "processes.start processes.stop processes.shutdown processes.status node.ping"
        " node.version node.report node.cluster_status node.environment"
        " node.set_cluster_name node.await_startup node.wait node.set_log_level"
        " node.set_vm_memory_high_watermark node.set_disk_free_limit node.force_gc"
        " node.rotate_logs node.await_online_nodes node.list_feature_flags"
        " node.enable_feature_flag node.list_deprecated_features top.top perf.perf"
    ),
    "Queues, exchanges, bindings": (
        "queues.list_queues queues.list_virtual_queues queues.list_shard_owners"
        " queues.list_stream_tracking queues.reset_offset streams.add_super_stream"
        " streams.delete_super_stream queues.list_exchanges queues.list_bindings"
        " queues.list_unresponsive_queues queues.quorum_status queues.create_queue"
        " queues.delete_queue"
        " queues.purge_queue queues.pause_queue queues.resume_queue queues.move_queue"
        " queues.call_off_move queues.create_exchange"
        " queues.delete_exchange queues.bind queues.unbind"
    ),
    "Messages": ("messages.publish messages.get messages.tail messages.move_messages"),
    "Clients": (
        "connections.list_connections connections.list_channels connections.list_consumers"
        " connections.close_connection connections.close_all_connections"
        " connections.close_all_user_connections"
    ),
    "Users and virtual hosts": (
        "users.add_vhost users.update_vhost_metadata users.trace_on users.trace_off"
        " users.enable_vhost_deletion_protection users.disable_vhost_deletion_protection"
        " users.delete_vhost users.restart_vhost users.list_vhosts users.set_vhost_tags"
        " users.add_user users.authenticate_user users.hash_password users.change_password"
        " users.clear_password users.set_user_tags users.list_users users.delete_user"
        " users.set_permissions users.set_permissions_globally"
    ),
    "Permissions and limits": (
        "permissions.clear_permissions permissions.list_permissions"
        " permissions.list_user_permissions permissions.set_topic_permissions"
        " permissions.clear_topic_permissions permissions.list_topic_permissions"
        " permissions.list_user_topic_permissions permissions.set_vhost_limits"
        " permissions.clear_vhost_limits permissions.list_vhost_limits"
        " permissions.set_user_limits permissions.clear_user_limits"
        " permissions.list_user_limits"
    ),
    "Policies and parameters": (
        "policies.set_policy policies.clear_policy policies.list_policies"
        " policies.list_policies_that_match policies.set_operator_policy"
        " policies.clear_operator_policy policies.list_operator_policies"
        " policies.set_parameter policies.clear_parameter policies.list_parameters"
        " policies.set_global_parameter policies.clear_global_parameter"
        " policies.list_global_parameters shovels.shovel_status shovels.restart_shovel"
        " shovels.delete_shovel shovels.pause_shovel shovels.resume_shovel"
        " federation.federation_status federation.restart_federation_link"
    ),
    "Definitions and backup": (
        "definitions.export_definitions definitions.import_definitions snapshots.snapshot"
        " secrets_keys.generate_secrets_key"
    ),
}
COMMANDS: Final = {
    command.partition(".")[2]: command for words in PANELS.values() for command in words.split()
}


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    typer.echo(f"shardctl {load('node.own_version')()}")
    raise typer.Exit


# The commands that have commands of their own: the module and the application of typer of each.
GROUPS: Final = {
    "cluster": "cluster.app",
    "context": "context_commands.app",
    "diagnostics": "diagnostics.app",
    "migrate": "migrate.app",
    "route": "routes.route",
    "ring": "routes.ring",
    "pipeline": "pipeline.app",
    "definitions": "definitions.offline",
    "shards": "shards.shards",
    "store": "storage.app",
}
FORMER: Final = {"storage": "storage.app"}  # Former names, which the help does not show.


def load(place: str) -> Any:
    """Return a function or application by its module in this folder and its name."""
    module, _, name = place.partition(".")
    return getattr(importlib.import_module(f"shardmq.supervisor.cli.{module}"), name)


def _command(panel: str, place: str) -> Any:
    from shardmq.supervisor.cli.command import bound

    function = load(place)
    made = typer.Typer(add_completion=False)
    kind = StartCommand if function.__name__ == "start" else None
    # typer would name the command list-queues.
    made.command(function.__name__, cls=kind, rich_help_panel=panel)(bound(function))
    return typer.main.get_command(made)


def _group(place: str) -> Any:
    return typer.main.get_group(load(place))


VISIBLE: Final[dict[str, Make]] = {
    **{
        place.partition(".")[2]: partial(_command, panel, place)
        for panel, words in PANELS.items()
        for place in words.split()
    },
    **{name: partial(_group, place) for name, place in GROUPS.items()},
}
HIDDEN: Final[dict[str, Make]] = {
    **{name: partial(refusing, name) for name in UNSUPPORTED},
    **{name: partial(_group, place) for name, place in FORMER.items()},
}
# Options that say which broker is asked. Before a command they are the same as behind it: flags,
# which win over the environment.
MOVED: Final = ("url", "user", "password", "password_file", "data_dir")
app = typer.Typer(
    cls=group_of(VISIBLE, HIDDEN, MOVED),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run and steer a shardmq broker.",
    epilog=STATUSES,
)


class _DefaultsOfGroup(dict[str, Any]):
    """Gives each command of a group the same defaults."""

    def get(self, name: str, default: Any = None) -> Any:
        return default if name == "help" else dict(self)


def _names(completion: str) -> Any:
    """Return a completion of names.py that imports the file when it is called."""

    def complete(context: typer.Context, incomplete: str) -> Any:
        function = load(f"names.{completion}")
        return (
            function(incomplete)
            if completion == "complete_contexts"
            else function(context, incomplete)
        )

    return complete


EARLY = "As after the command."


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True)
    ] = False,
    vhost: Annotated[
        str | None,
        typer.Option("--vhost", "-p", help=EARLY, autocompletion=_names("complete_vhosts")),
    ] = None,
    quiet: Annotated[bool | None, typer.Option("--quiet", "-q", help=EARLY)] = None,
    silent: Annotated[bool | None, typer.Option("--silent", "-s", help=EARLY)] = None,
    formatter: Annotated[str | None, typer.Option(help=EARLY)] = None,
    timeout: Annotated[float | None, typer.Option("--timeout", "-t", help=EARLY)] = None,
    named: Annotated[
        str | None,
        typer.Option("--node", "-n", help=EARLY, autocompletion=_names("complete_contexts")),
    ] = None,
    url: Annotated[str | None, typer.Option(help=EARLY)] = None,
    user: Annotated[
        str | None, typer.Option(help=EARLY, autocompletion=_names("complete_users"))
    ] = None,
    password: Annotated[str | None, typer.Option(help=EARLY)] = None,
    password_file: Annotated[str | None, typer.Option(help=EARLY)] = None,
    data_dir: Annotated[str | None, typer.Option(help=EARLY)] = None,
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
    context.default_map = dict.fromkeys(COMMANDS, given)
    context.default_map["start"] = {"context": named} if named is not None else {}
    context.default_map |= {name: _DefaultsOfGroup(given) for name in (*GROUPS, *FORMER)}
