"""python -m broker.controller --config JSON"""

from __future__ import annotations

import argparse
import logging
import sys

import msgspec
import uvloop

from broker.controller.config import ControllerConfig, read_config
from broker.controller.definitions import DefinitionsError
from broker.controller.server import serve

BAD_CONFIG = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m broker.controller")
    parser.add_argument("--config", required=True, help="settings as one JSON object")
    try:
        config = read_config(parser.parse_args().config)
    except msgspec.MsgspecError as error:
        print(f"controller: {error}", file=sys.stderr)
        return BAD_CONFIG
    return run(config)


def run(config: ControllerConfig) -> int:
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s controller: %(message)s", stream=sys.stderr
    )
    try:
        return uvloop.run(serve(config))
    except DefinitionsError as error:
        print(f"controller: {error}", file=sys.stderr)
        return BAD_CONFIG


if __name__ == "__main__":
    sys.exit(main())
