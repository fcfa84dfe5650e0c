"""shardctl: its commands. Exit status: 0 done, 1 failed or refused, 2 usage or settings, 69 no broker reachable."""

from __future__ import annotations

import typer

from supervisor.cli import processes, queues, storage, users

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Run and steer a shardmq broker.")

COMMANDS = (
    processes.start,
    processes.stop,
    processes.status,
    queues.list_queues,
    queues.list_exchanges,
    queues.list_bindings,
    queues.list_connections,
    users.add_vhost,
    users.delete_vhost,
    users.add_user,
    users.delete_user,
    users.set_permissions,
)

for command in COMMANDS:
    app.command(command.__name__)(command)  # typer's own naming would turn list_queues into list-queues
app.add_typer(storage.app, name="storage")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
