"""python -m broker --config fd:N, or the JSON itself: a front door, started by the supervisor."""

import sys

from broker.config import ConfigError, read_config
from broker.server import run
from supervisor import logs


def main() -> int:
    try:
        config = read_config(sys.argv[1:])
    except ConfigError as error:
        print(f"broker: {error}", file=sys.stderr)
        return 2
    logs.begin(config.log_level, config.log_format, f"front-door-{config.door}")
    try:
        run(config)
    except ConfigError as error:  # a file that it names cannot be used
        print(f"broker: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
