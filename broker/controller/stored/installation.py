"""The id of this broker, made at its first start and kept in its data directory."""

from __future__ import annotations

import uuid
from pathlib import Path

from shardmq.broker.controller.stored.room import write_whole

NAME = "installation"


def installation_id(directory: Path) -> uuid.UUID:
    """Return the id, which is on stable storage then.

    Raises OSError or ValueError when it cannot be read or made.
    """
    path = directory / NAME
    try:
        return uuid.UUID(path.read_text().strip())
    except FileNotFoundError:
        made = uuid.uuid4()
    write_whole(path, f"{made}\n".encode())
    return made
