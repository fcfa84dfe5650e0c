"""The settings of the process of bridges, which are checked once at its start."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class BridgesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings.

    listen_fd: the socket at which the controller calls.
    first_door, doors: the numbers of the front doors of this host.
    """

    runtime_dir: str
    listen_fd: Annotated[int, Meta(ge=0)]
    first_door: Annotated[int, Meta(ge=0)] = 0
    doors: Annotated[int, Meta(ge=1)] = 1
    log_level: str = "info"
    log_format: str = "auto"


def read(text: str) -> BridgesConfig:
    """Return the settings in a JSON text. Raises msgspec.ValidationError."""
    return msgspec.json.decode(text, type=BridgesConfig)
