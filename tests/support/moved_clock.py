"""A host's clock that can be moved, for the processes that have its environment.

A library that is loaded before all others (moved_clock.c) adds seconds to the time of day. The
monotonic clock goes on as it does. Debian's libfaketime 0.9.10 does not do: `time.sleep` of Python
fails with EINVAL where it leaves the monotonic clock alone.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_suffix(".c")
SECONDS: Final = struct.Struct("=q")
COMPILER: Final = "gcc"


def why_impossible() -> str:
    """Return why no clock can be moved here, or ""."""
    return "" if shutil.which(COMPILER) else f"no moved clocks: there is no {COMPILER}"


class MovedClock:
    """The clock of the processes that have `environment`.

    Args:
        directory: Where the library and the distance are.
        name: Whose clock it is.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._moved = directory / f"{name}.clock"
        self._library = directory / "moved_clock.so"
        if not self._library.exists():
            command = [COMPILER, "-shared", "-fPIC", "-O2", "-o", str(self._library), str(SOURCE)]
            subprocess.run(command, check=True)
        self._moved.write_bytes(SECONDS.pack(0))

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "MOVED_CLOCK": str(self._moved)}

    def move(self, seconds: int) -> None:
        """Let the clock be so many seconds ahead of the true one, from now on."""
        with self._moved.open("r+b") as moved:
            moved.write(SECONDS.pack(seconds))
