"""Run the reader: python -m shardmq.shardd.reader --config CONFIG.

CONFIG is the settings as JSON, or fd:N for an open file that holds them.
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from shardmq.shardd.reader import config
from shardmq.shardd.reader.server import Server
from shardmq.supervisor import logs
from shardmq.supervisor.notify import section


def main() -> int:
    parser = argparse.ArgumentParser(prog="shardd.reader", description="Serves streams as Arrow.")
    parser.add_argument(
        "--config",
        required=True,
        metavar="JSON",
        help="settings as one JSON object, or fd:N that holds it",
    )
    try:
        settings = config.read(section(parser.parse_args().config))
    except (msgspec.DecodeError, ValueError) as error:
        print(f"reader: --config: {error}", file=sys.stderr)
        return 2
    logs.begin(settings.log_level, settings.log_format, "reader")
    logs.keep(settings.runtime_dir, "reader")
    return Server(settings).run()


if __name__ == "__main__":
    sys.exit(main())
