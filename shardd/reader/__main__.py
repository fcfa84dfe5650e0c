"""python -m shardd.reader --config fd:N, or the JSON itself"""

from __future__ import annotations

import argparse
import logging
import sys

import msgspec

from shardd.reader import config
from shardd.reader.server import Server
from supervisor.notify import section


def main() -> int:
    parser = argparse.ArgumentParser(prog="shardd.reader", description="Serves streams as Arrow.")
    parser.add_argument(
        "--config", required=True, metavar="JSON", help="settings as one JSON object, or fd:N that holds it"
    )
    try:
        settings = config.read(section(parser.parse_args().config))
    except (msgspec.DecodeError, ValueError) as error:
        print(f"reader: --config: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s reader %(name)s: %(message)s"
    )
    return Server(settings).run()


if __name__ == "__main__":
    sys.exit(main())
