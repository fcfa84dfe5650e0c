"""Definitions of a stopped broker's data directory.

The command is `python -m shardmq.broker.controller.stored.offline export|import DIR [FILE]`.

`export` writes RabbitMQ's JSON to FILE or standard output and changes nothing; `import` takes a file of it in, as a
start with `load_definitions` would. Exit status 0, or 2 with the reason in one line. Whoever runs it holds the
directory's lock.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.management.resources.definitions import definitions as exported
from shardmq.broker.controller.server import load_or_begin
from shardmq.broker.controller.stored.definitions import Definitions, DefinitionsError

FAILED = 2
OWNER_ONLY = 0o600  # password hashes are in it


def export(directory: Path, out: BinaryIO) -> None:
    definitions = Definitions(
        directory, boot=""
    )  # no life of a broker: what is not durable is gone
    if definitions.is_new:
        raise DefinitionsError(f"{directory}: no definitions there")
    out.write(
        orjson.dumps(
            exported(definitions.read(), str(directory)), default=_shown, option=orjson.OPT_INDENT_2
        )
        + b"\n"
    )


def take_in(directory: Path, file: Path) -> None:
    """A queue goes to a shard that there is; where there is none yet, to the first."""
    shards = len(list(directory.glob("shard-[0-9]*"))) or 1
    config = ControllerConfig(
        data_dir=str(directory),
        runtime_dir="",
        boot=uuid.uuid4().hex,
        shards=shards,
        load_definitions=str(file),
    )
    definitions = Definitions(directory, config.boot)
    try:
        load_or_begin(definitions, config, needs_given=True)
    finally:
        definitions.close()


def _shown(value: Any) -> Any:
    if isinstance(value, Iterator):
        return list(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    return str(value)


def main(arguments: list[str]) -> int:
    try:
        match arguments:
            case ["export", directory]:
                export(Path(directory), sys.stdout.buffer)
            case ["export", directory, file]:
                with open(
                    os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, OWNER_ONLY), "wb"
                ) as out:
                    export(Path(directory), out)
            case ["import", directory, file]:
                take_in(Path(directory), Path(file))
            case _:
                raise DefinitionsError(
                    f"usage: {(__doc__ or '').partition(':')[0]} export|import DIR [FILE]"
                )
    except (DefinitionsError, OSError) as error:
        print(f"definitions: {error}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
