"""The command and the environment to run a module of the broker in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SOURCE_ROOT = Path(__file__).absolute().parents[2]  # The folder that holds the packages.


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module.

    -P keeps Python from importing a folder of the working directory that has the name of one of the
    packages.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Return an environment in which a module is imported from where this process has its own."""
    path = os.environ.get("PYTHONPATH", "")
    root = str(SOURCE_ROOT)
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}
