"""The id of this broker, made at its first start and kept in its data directory."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

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
    new = path.with_name(f"{NAME}.new")
    with new.open("w") as file:
        file.write(f"{made}\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return made
