"""The command `python -m shardmq.broker.controller --config fd:N`, or with the JSON itself."""

from __future__ import annotations

import argparse
import sys

import msgspec
import uvloop

from shardmq.broker.controller.config import ControllerConfig, read_config
from shardmq.broker.controller.server import serve
from shardmq.broker.controller.stored.errors import DefinitionsError
from shardmq.broker.shared.config import ConfigError
from shardmq.shardd.wire.memory import collect_seldom
from shardmq.shardd.wire.precedence import messages_first
from shardmq.supervisor import logs
from shardmq.supervisor.notify import section

BAD_CONFIG = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shardmq.broker.controller")
    parser.add_argument(
        "--config", required=True, help="settings as one JSON object, or fd:N that holds it"
    )
    try:
        config = read_config(section(parser.parse_args().config))
    except (msgspec.MsgspecError, ValueError) as error:
        print(f"controller: {error}", file=sys.stderr)
        return BAD_CONFIG
    return run(config)


def run(config: ControllerConfig) -> int:
    logs.begin(config.log_level, config.log_format, "controller")
    logs.keep(config.runtime_dir, "controller")
    collect_seldom()
    messages_first()
    try:
        if config.cluster is None:
            return uvloop.run(serve(config))
        from shardmq.broker.controller.nodes import node  # with a client for etcd

        return uvloop.run(node.serve(config, config.cluster))
    except (ConfigError, DefinitionsError) as error:
        print(f"controller: {error}", file=sys.stderr)
        return BAD_CONFIG


if __name__ == "__main__":
    sys.exit(main())
