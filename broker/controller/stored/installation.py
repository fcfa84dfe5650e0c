"""The id of this broker, made at its first start and kept beside the definitions."""

from __future__ import annotations

import uuid
from pathlib import Path

from shardmq.broker.controller.stored.room import READABLE, write_whole
from shardmq.shardd.store.files import Files

NAME = "installation"


def installation_id(directory: Path, files: Files = READABLE) -> uuid.UUID:
    """Return the id, which is on stable storage then. It is made by `files`.

    Raises OSError or ValueError when it cannot be read or made.
    """
    path = directory / NAME
    try:
        return uuid.UUID(path.read_text().strip())
    except FileNotFoundError:
        made = uuid.uuid4()
    write_whole(path, f"{made}\n".encode(), files)
    return made
