"""Run one shard: python -m shardmq.shardd --config JSON, or --config fd:N."""

from __future__ import annotations

import argparse
import sys

import msgspec

from shardmq.shardd import config
from shardmq.shardd.process import run
from shardmq.supervisor import logs
from shardmq.supervisor.notify import section


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shardmq.shardd",
        description="One shard of the broker; started by the supervisor.",
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
        print(f"shardd: --config: {error}", file=sys.stderr)
        return 2
    logs.begin(settings.log_level, settings.log_format, f"shard-{settings.shard}")
    logs.keep(settings.runtime_dir, f"shard-{settings.shard}")
    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
