"""The command `python -m shardmq.supervisor [--config FILE] [flags]`.

Flags win over the environment, the environment over the settings file, and the file over the
defaults. Standard output gets one line, `ready: ...`. The log goes to standard error.

The exit status is 0 after a drain; 1 if the supervisor gives up or the disk refuses everything; 2
if a setting, a port or the data directory cannot be used. In the last case one line says which, and
nothing has been changed.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # asyncio would load OpenSSL, which takes 5 MB. This process speaks to its children only, and in
    # a cluster to etcd.
    from shardmq.supervisor.glance import may_be_a_node

    if not may_be_a_node(sys.argv):
        sys.modules["ssl"] = None  # type: ignore[assignment]

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
from pathlib import Path
from typing import Any, NoReturn

from shardmq.supervisor import logs
from shardmq.supervisor.config import FLAGS, ConfigError, kinds
from shardmq.supervisor.plan import children
from shardmq.supervisor.sources import (
    Effective,
    Given,
    from_environment,
    mistaken_login,
    parsed,
    read,
)
from shardmq.supervisor.supervisor import Planner, Reread, Supervisor

FILES_WANTED = 65536  # A lower limit of open files is worth a warning.


def main(arguments: list[str] | None = None, planner: Planner = children) -> int:
    """Run the broker in the foreground and return the exit status.

    Args:
        arguments: The flags. None means those of the command line.
        planner: Makes the plans of the children; tests give another one.
    """
    try:
        given = sys.argv[1:] if arguments is None else arguments
        effective = settings_from(given)
        settings = effective.settings
        logs.begin(settings.log_level, settings.log_format, "supervisor")
        return asyncio.run(_run(effective, planner, lambda set: settings_from(given, set)))
    except ConfigError as error:
        text, status = str(error), 2
    except OSError as error:  # The disk refuses everything.
        text, status = error.strerror if error.strerror and not error.filename else str(error), 1
    with contextlib.suppress(OSError):  # Standard error may lie on the same disk.
        print(f"shardmq: {text}", file=sys.stderr, flush=True)
    return status


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError for a wrong flag, as for any other wrong setting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def settings_from(arguments: list[str], set: dict[str, Any] | None = None) -> Effective:
    """Read the settings from the file, the environment and the flags.

    Args:
        arguments: The flags of the command line.
        set: Settings by path that win over the flags.

    Raises:
        ConfigError: A flag, a variable or a setting is wrong.
    """
    parser = Parser(
        prog="python -m shardmq.supervisor", description="Run the broker in the foreground."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file, TOML")
    for flag, (key, _) in FLAGS.items():
        parser.add_argument(flag, dest=key, help=f"overrides {key}")
    values: dict[str, Any] = vars(parser.parse_args(arguments))
    flags = {
        key: Given(parsed(value, kinds()[key]), flag)
        for flag, (key, _) in FLAGS.items()
        if (value := values[key]) is not None
    }
    changed = {key: Given(value, "shardctl") for key, value in (set or {}).items()}
    return read(values["config"], from_environment(os.environ) | flags | changed)


async def _run(effective: Effective, planner: Planner, reread: Reread) -> int:
    supervisor = Supervisor(effective, len(os.sched_getaffinity(0)), planner, reread)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, supervisor.stop)
    started_at_terminal = _has_terminal()

    def hung_up() -> None:
        # The kernel sends SIGHUP too when the terminal is closed in which the broker was started.
        # That is no wish for a reload.
        if started_at_terminal and not _has_terminal():
            supervisor.stop()
        else:
            supervisor.reload()

    loop.add_signal_handler(signal.SIGHUP, hung_up)
    supervisor.open()
    # A connection is an open file, and so is a segment in use. The children inherit the limit.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):  # A sandbox may forbid the call.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < FILES_WANTED:
        logging.getLogger("supervisor").warning(
            "only %d files may be open in each process (ulimit -n, LimitNOFILE)", hard
        )
    if warning := mistaken_login(os.environ, effective.sources):
        logging.getLogger("supervisor").warning("%s", warning)
    logging.getLogger("supervisor").info(
        "data in %s, shards: %d, front doors: %d, boot %s",
        supervisor.settings.data_dir,
        supervisor.shards,
        len(supervisor.sockets.amqp),
        supervisor.boot,
    )
    return await supervisor.run(lambda line: print(line, flush=True))


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
