"""The users, as the copy of the definitions on this node has them, for logins at this node."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shardmq.broker.controller.stored.errors import DefinitionsError
from shardmq.broker.controller.stored.rows import read_rows
from shardmq.broker.model.changes import UserPut

USERS: Final = "users"

log = logging.getLogger(__name__)


class OwnUsers:
    """Reads the file of the users again when it has changed."""

    def __init__(self, data_dir: str) -> None:
        self._path = Path(data_dir) / f"{USERS}.json"
        self._stamp: tuple[int, ...] = ()
        self._users: dict[str, UserPut] = {}

    def now(self) -> Mapping[str, UserPut]:
        """Return the users by name; none while this node has no copy that can be read."""
        try:
            about = os.stat(self._path)
            stamp = about.st_ino, about.st_size, about.st_mtime_ns
            if stamp != self._stamp:
                self._stamp = stamp
                rows = read_rows(USERS, self._path, self._path.read_bytes())
                self._users = {row.name: row for row in rows if isinstance(row, UserPut)}
        except FileNotFoundError:
            self._stamp, self._users = (), {}
        except (OSError, DefinitionsError) as error:
            log.warning("logins at this node are checked by the users before: %s", error)
        return self._users
