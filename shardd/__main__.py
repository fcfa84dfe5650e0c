"""python -m shardd --config JSON"""

from __future__ import annotations

import argparse
import logging
import sys

import msgspec

from shardd import config
from shardd.server import Server


def main() -> int:
    parser = argparse.ArgumentParser(prog="shardd", description="One shard of the broker; started by the supervisor.")
    parser.add_argument("--config", required=True, metavar="JSON")
    try:
        settings = config.read(parser.parse_args().config)
    except msgspec.DecodeError as error:
        print(f"shardd: --config: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=settings.log_level.upper(),
        format=f"%(asctime)s %(levelname)s shard-{settings.shard} %(name)s: %(message)s",
    )
    return Server(settings).run()


if __name__ == "__main__":
    sys.exit(main())
