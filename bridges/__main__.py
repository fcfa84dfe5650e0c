"""The command `python -m shardmq.bridges --config fd:N`, or with the JSON itself."""

from __future__ import annotations

import argparse
import sys

import msgspec
import uvloop

from shardmq.bridges.config import BridgesConfig, read
from shardmq.bridges.process import Bridges
from shardmq.supervisor import logs
from shardmq.supervisor.notify import section

BAD_CONFIG = 2


async def serve(config: BridgesConfig) -> int:
    return await Bridges(config).serve()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shardmq.bridges")
    parser.add_argument(
        "--config", required=True, help="settings as one JSON object, or fd:N that holds it"
    )
    try:
        config = read(section(parser.parse_args().config))
    except (msgspec.MsgspecError, ValueError) as error:
        print(f"bridges: {error}", file=sys.stderr)
        return BAD_CONFIG
    logs.begin(config.log_level, config.log_format, "bridges")
    logs.keep(config.runtime_dir, "bridges")
    return uvloop.run(serve(config))


if __name__ == "__main__":
    sys.exit(main())
