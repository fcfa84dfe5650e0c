"""The names people install and the modules that must be compiled."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import runpy
import tomllib
from contextlib import chdir
from pathlib import Path
from unittest import mock

import pytest
from setuptools import Extension

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
with (
    chdir(ROOT),
    mock.patch("setuptools.setup") as setup,
    mock.patch("Cython.Build.cythonize", lambda extensions, **_: extensions),
):
    runpy.run_path("setup.py")
EXTENSIONS: list[Extension] = setup.call_args.kwargs["ext_modules"]
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for top in ("broker", "shardd")
    for path in (ROOT / "shardmq" / top).rglob("*.pyx")
)

# The short ways of a shard and of a front door are compiled, too, and so are the passes of a front
# door (pace.pyx, watch.pyx) and its anteroom. Otherwise this number only gets smaller.
COMPILED_MAX = 27

# Headers of our own; those of C stand in angle brackets.
HEADER = re.compile(r'^\s*cdef extern from "(?!<)([^"]+)"', re.MULTILINE)
SHARED = re.compile(r"^from (shardmq\.(?:broker|shardd)\.\S+) cimport", re.MULTILINE)


def test_every_compiled_module_is_built_and_none_is_forgotten() -> None:
    assert sorted(source for extension in EXTENSIONS for source in extension.sources) == SOURCES
    assert len(SOURCES) <= COMPILED_MAX


@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda extension: extension.name)
def test_a_header_that_is_included_is_shipped_and_rebuilds_what_includes_it(
    extension: Extension,
) -> None:
    (source,) = extension.sources
    assert {str(path.relative_to(ROOT)) for path in included(ROOT / source)} <= set(
        extension.depends
    )


def included(path: Path) -> set[Path]:
    """By this file, and by what that includes; what it says of itself in a .pxd is part of it."""
    text = path.read_text()
    shared = [ROOT / (name.replace(".", "/") + ".pxd") for name in SHARED.findall(text)]
    shared += [own for own in [path.with_suffix(".pxd")] if own.exists() and own != path]
    headers = {Path(os.path.normpath(path.parent / name)) for name in HEADER.findall(text)}
    return headers.union(shared, *map(included, shared))


@pytest.mark.parametrize("name", [extension.name for extension in EXTENSIONS])
def test_a_compiled_module_is_compiled_and_typed(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader)
    assert (ROOT / (name.replace(".", "/") + ".pyi")).exists()


def test_the_command_is_shardctl() -> None:
    assert PROJECT["project"]["scripts"] == {"shardctl": "shardmq.supervisor.cli.app:main"}


def test_every_dependency_is_pinned_for_the_build() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [*PROJECT["project"]["dependencies"], *(name for extra in extras for name in extra)]
    assert {name.partition(">")[0].lower() for name in wanted} <= pinned
