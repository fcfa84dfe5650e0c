"""python -m shardmq.supervisor [--config FILE] [flags]: flags win over the file, the file over the defaults.

Standard output gets the one line `ready: ...`; what happens goes to standard error, one line per event. Exit status:
0 drained, 1 given up, or the disk refuses everything, 2 wrong settings, port, data directory (one line says which;
nothing was touched).
"""

from __future__ import annotations

import sys

if (
    __name__ == "__main__"
):  # asyncio would load OpenSSL, 5 MB, into a process that speaks to none but its children
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
from shardmq.supervisor.config import ConfigError, Settings, read_settings
from shardmq.supervisor.plan import children
from shardmq.supervisor.supervisor import Planner, Reread, Supervisor

FILES_WANTED = 65536  # fewer are said to be few

FLAGS: dict[str, tuple[str, type[int | str]]] = {
    "--data-dir": ("data_dir", str),
    "--runtime-dir": ("runtime_dir", str),
    "--load-definitions": ("load_definitions", str),
    "--bind": ("listen.bind", str),
    "--amqp-port": ("listen.amqp_port", int),
    "--http-port": ("listen.http_port", int),
    "--metrics-port": ("listen.metrics_port", int),
    "--amqps-port": ("listen.amqps_port", int),
    "--https-port": ("listen.https_port", int),
    "--tls-cert": ("tls.cert", str),
    "--tls-key": ("tls.key", str),
    "--tls-ca": ("tls.ca", str),
    "--tls-verify": ("tls.verify", str),
    "--shards": ("shards.count", str),
    "--front-doors": ("front_doors.count", int),
    "--durability": ("shards.durability", str),
    "--log-level": ("log_level", str),
    "--log-format": ("log_format", str),
}


def main(arguments: list[str] | None = None, planner: Planner = children) -> int:
    try:
        given = sys.argv[1:] if arguments is None else arguments
        settings = settings_from(given)
        logs.begin(settings.log_level, settings.log_format, "supervisor")
        return asyncio.run(_run(settings, planner, lambda set: settings_from(given, set)))
    except ConfigError as error:
        _say(error)
        return 2
    except OSError as error:  # a disk that refuses everything
        _say(error.strerror if error.strerror and not error.filename else error)
        return 1


def _say(what: object) -> None:
    with contextlib.suppress(OSError):  # standard error may lie on the same disk
        print(f"shardmq: {what}", file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """A wrong flag is told as any other wrong setting is."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def settings_from(arguments: list[str], set: dict[str, Any] | None = None) -> Settings:
    """`set`: what wins over the flags."""
    parser = Parser(
        prog="python -m shardmq.supervisor", description="Run the broker in the foreground."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file, TOML")
    for flag, (key, kind) in FLAGS.items():
        parser.add_argument(flag, dest=key, type=kind, help=f"overrides {key}")
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    overrides = {key: value for key, _ in FLAGS.values() if (value := given[key]) is not None}
    shards = overrides.get("shards.count", "auto")
    if shards.lstrip("-").isdigit():
        overrides["shards.count"] = int(shards)
    if "," in (bind := overrides.get("listen.bind", "")):
        overrides["listen.bind"] = bind.split(",")
    return read_settings(given["config"], overrides | (set or {}))


async def _run(settings: Settings, planner: Planner, reread: Reread) -> int:
    supervisor = Supervisor(settings, len(os.sched_getaffinity(0)), planner, reread)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, supervisor.stop)
    at_terminal = _has_terminal()

    def hung_up() -> None:
        """Who closes the terminal the broker was started in does not mean a reload."""
        if at_terminal and not _has_terminal():
            supervisor.stop()
        else:
            supervisor.reload()

    loop.add_signal_handler(signal.SIGHUP, hung_up)
    supervisor.open()
    _open_many_files()
    logging.getLogger("supervisor").info(
        "data in %s, shards: %d, front doors: %d, boot %s",
        supervisor.settings.data_dir,
        sum(slot.plan.kind == "shard" for slot in supervisor.slots),
        settings.front_doors.count,
        supervisor.boot,
    )
    return await supervisor.run(lambda line: print(line, flush=True))


def _open_many_files() -> None:
    """Each connection is one, each segment in use too: as many as we may have, for us and all children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may keep that to itself
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < FILES_WANTED:
        logging.getLogger("supervisor").warning(
            "only %d files may be open in each process (ulimit -n, LimitNOFILE)", hard
        )


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
