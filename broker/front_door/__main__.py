"""The front door of the broker, started by the supervisor.

The command is `python -m shardmq.broker.front_door --config fd:N`, or the JSON itself in place of
`fd:N`.
"""

import sys

from shardmq.broker.front_door.process import run
from shardmq.broker.shared.config import ConfigError, read_config
from shardmq.supervisor import logs


def main() -> int:
    try:
        config = read_config(sys.argv[1:])
    except ConfigError as error:
        print(f"broker: {error}", file=sys.stderr)
        return 2
    logs.begin(config.log_level, config.log_format, f"front-door-{config.door}")
    logs.keep(config.runtime_dir, f"front-door-{config.door}")
    try:
        run(config)
    except ConfigError as error:  # the settings name a file that cannot be used
        print(f"broker: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
