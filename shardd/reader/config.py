"""Define the settings of the reader, which are checked once at its start and not changed."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class ReaderConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    data_dir: str
    runtime_dir: str
    listen_fd: Annotated[int, Meta(ge=0)]
    shards: list[int]
    scans_max: Annotated[int, Meta(ge=1, le=64)] = 4
    bytes_per_s: Annotated[int, Meta(ge=0)] = 512 << 20  # no limit if 0
    log_level: str = "info"
    log_format: str = "auto"


def read(text: str) -> ReaderConfig:
    """Return the settings in a JSON text.

    Raise msgspec.ValidationError with the path of the wrong setting.
    """
    return msgspec.json.decode(text, type=ReaderConfig)
