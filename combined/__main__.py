"""Run a front door and a shard in one process, started by the supervisor.

The command is `python -m shardmq.combined --config fd:N`, or the JSON itself in place of `fd:N`.
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from shardmq.broker.shared.config import ConfigError
from shardmq.combined import config
from shardmq.combined.process import run
from shardmq.supervisor import logs
from shardmq.supervisor.notify import section


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shardmq.combined",
        description="A front door and a shard of the broker; started by the supervisor.",
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="JSON",
        help="settings as one JSON object, or fd:N that holds it",
    )
    try:
        settings = config.read(section(parser.parse_args().config))
    except (msgspec.DecodeError, ValueError) as error:
        print(f"combined: --config: {error}", file=sys.stderr)
        return 2
    name = f"shard-{settings.shard.shard}"
    logs.begin(settings.shard.log_level, settings.shard.log_format, name)
    logs.keep(settings.shard.runtime_dir, name)
    try:
        return run(settings)
    except ConfigError as error:  # the settings name a file that cannot be used
        print(f"combined: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
