"""shardctl: its commands. Exit status: 0 done, 1 failed or refused, 2 usage or settings, 69 no broker reachable."""

from __future__ import annotations

import tomllib
from importlib import metadata
from typing import Annotated

import typer

from supervisor.cli import definitions, permissions, policies, processes, queues, routes, shards, storage, users
from supervisor.cli.processes import SOURCE_ROOT

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Run and steer a shardmq broker.")

COMMANDS = (
    processes.start,
    processes.stop,
    processes.status,
    queues.list_queues,
    queues.list_virtual_queues,
    queues.list_shard_owners,
    queues.list_exchanges,
    queues.list_bindings,
    queues.list_connections,
    queues.delete_queue,
    queues.purge_queue,
    queues.pause_queue,
    queues.resume_queue,
    users.add_vhost,
    users.update_vhost_metadata,
    users.trace_on,
    users.trace_off,
    users.enable_vhost_deletion_protection,
    users.disable_vhost_deletion_protection,
    users.delete_vhost,
    users.list_vhosts,
    users.add_user,
    users.change_password,
    users.clear_password,
    users.set_user_tags,
    users.list_users,
    users.delete_user,
    users.set_permissions,
    permissions.clear_permissions,
    permissions.list_permissions,
    permissions.list_user_permissions,
    permissions.set_topic_permissions,
    permissions.clear_topic_permissions,
    permissions.list_topic_permissions,
    permissions.set_vhost_limits,
    permissions.clear_vhost_limits,
    permissions.list_vhost_limits,
    permissions.set_user_limits,
    permissions.clear_user_limits,
    permissions.list_user_limits,
    policies.set_policy,
    policies.clear_policy,
    policies.list_policies,
    policies.set_operator_policy,
    policies.clear_operator_policy,
    policies.list_operator_policies,
    policies.set_parameter,
    policies.clear_parameter,
    policies.list_parameters,
    policies.set_global_parameter,
    policies.clear_global_parameter,
    policies.list_global_parameters,
    definitions.export_definitions,
    definitions.import_definitions,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardctl {_version()}")
        raise typer.Exit


def _version() -> str:
    try:
        return metadata.version("shardmq")
    except metadata.PackageNotFoundError:  # run from its source tree
        project = tomllib.loads((SOURCE_ROOT / "pyproject.toml").read_text())["project"]
        return str(project["version"])


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Run and steer a shardmq broker."""


for command in COMMANDS:
    app.command(command.__name__)(command)  # typer's own naming would turn list_queues into list-queues
app.add_typer(routes.route, name="route")
app.add_typer(routes.ring, name="ring")
app.add_typer(shards.shards, name="shards")
app.add_typer(storage.app, name="store")
app.add_typer(storage.app, name="storage", hidden=True)  # its former name


def main() -> None:
    app()


if __name__ == "__main__":
    main()
