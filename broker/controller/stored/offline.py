"""Definitions of a stopped broker's data directory.

The command is
`python -m shardmq.broker.controller.stored.offline [--key-file KEYS] export|import DIR [FILE]`.

`export` writes RabbitMQ's JSON to FILE or standard output and changes nothing. `import` takes such
a file in, as a start with `load_definitions` would. KEYS is the file of `secrets.key_file`: without
it, secrets that are encrypted stay so, and new ones are plain until the next start. The exit status
is 0, or 2 with the reason in one line. Whoever runs the command holds the directory's lock.
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
from shardmq.broker.controller.loading import load_or_begin
from shardmq.broker.controller.management.cluster_id import identity_of_host
from shardmq.broker.controller.management.resources.definitions import definitions as exported
from shardmq.broker.controller.stored.definitions import Definitions
from shardmq.broker.controller.stored.errors import DefinitionsError
from shardmq.broker.controller.stored.key_ring import NO_KEYS, KeyRing, key_ring
from shardmq.broker.shared.config import ConfigError

FAILED = 2
MODULE = "shardmq.broker.controller.stored.offline"
OWNER_ONLY = 0o600  # the file has password hashes


def export(directory: Path, out: BinaryIO, keys: KeyRing = NO_KEYS) -> None:
    # In no boot: what is not durable is left out.
    definitions = Definitions(directory, boot="", keys=keys)
    if definitions.is_new:
        raise DefinitionsError(f"{directory}: no definitions there")
    out.write(
        orjson.dumps(
            exported(definitions.read(), identity_of_host(str(directory))),
            default=_shown,
            option=orjson.OPT_INDENT_2,
        )
        + b"\n"
    )


def take_in(directory: Path, file: Path, keys: KeyRing = NO_KEYS) -> None:
    """Import a file; queues go to the shards that have directories, or to the first shard."""
    shards = len(list(directory.glob("shard-[0-9]*"))) or 1
    config = ControllerConfig(
        data_dir=str(directory),
        runtime_dir="",
        boot=uuid.uuid4().hex,
        shards=shards,
        load_definitions=str(file),
    )
    definitions = Definitions(directory, config.boot, keys=keys)
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
        keys = NO_KEYS
        if arguments[:1] == ["--key-file"] and len(arguments) > 1:
            keys, arguments = key_ring(arguments[1]), arguments[2:]
        match arguments:
            case ["export", directory]:
                export(Path(directory), sys.stdout.buffer, keys)
            case ["export", directory, file]:
                with open(
                    os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, OWNER_ONLY), "wb"
                ) as out:
                    export(Path(directory), out, keys)
            case ["import", directory, file]:
                take_in(Path(directory), Path(file), keys)
            case _:
                raise DefinitionsError(
                    f"usage: python -m {MODULE} [--key-file KEYS] export|import DIR [FILE]"
                )
    except (ConfigError, DefinitionsError, OSError) as error:
        print(f"definitions: {error}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
