"""Check imports that import contracts cannot see.

A compiled module imports only C, CPython, Cython, its own folder, the declarations at the top of
its package, and modules of another folder that are made for it. Those declarations import nothing
but C and each other.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILED = sorted(
    path
    for package in ("broker", "shardd", "supervisor")
    for path in (ROOT / "shardmq" / package).rglob("*.pyx")
)
# What they include belongs to them.
PARTS = sorted({path for module in COMPILED for path in module.parent.glob("*.pxi")})
IMPORT = re.compile(r"^\s*(?:from\s+(\S+)\s+)?c?import\s+(\S+)", re.MULTILINE)
# Structures and inline functions that several folders of a package share.
SHARED = [
    path
    for package in ("broker", "shardd")
    for path in (ROOT / "shardmq" / package).glob("*.pxd")
    if not path.with_suffix(".pyx").exists()
]
# The reader sends the arrays of the store's columns from where they lie.
MADE_FOR = {
    "shardmq.shardd.reader": {
        "shardmq.shardd.store.format.columns",
        "shardmq.shardd.store.format.layout",
    },
    # The short way of a front door is made of what these do for the way by Python, and takes
    # messages out of rings. It waits for descriptors as rings do.
    "shardmq.broker.front_door": {
        "shardmq.broker.amqp.contents",
        "shardmq.broker.amqp.frames",
        "shardmq.broker.amqp.octets",
        "shardmq.shardd.wire.codec",
        "shardmq.shardd.wire.polling",
        "shardmq.shardd.wire.publishes",
        "shardmq.shardd.wire.shared_memory",
    },
}
OPTIONS = "# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False"


def imported(text: str) -> set[str]:
    return {origin or name for origin, name in IMPORT.findall(text)}


@pytest.mark.parametrize("path", COMPILED + PARTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_compiled_modules_know_nothing_outside_their_folder(path: Path) -> None:
    folder = ".".join(path.parent.relative_to(ROOT).parts)
    shared = {f"shardmq.{path.parent.name}.{path.stem}" for path in SHARED}
    for name in imported(path.read_text()):
        known = name.split(".")[0] in (
            "libc",
            "cpython",
            "cython",
            "posix",
        ) or name in shared | MADE_FOR.get(folder, set())
        assert known or name.startswith((".", folder + ".")), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", SHARED, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_folders_share_knows_none_of_them(path: Path) -> None:
    shared = {f"shardmq.{path.parent.name}.{path.stem}" for path in SHARED}
    others = imported(path.read_text()) - shared
    assert {name.split(".")[0] for name in others} <= {"libc", "cpython"}


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: str(path.relative_to(ROOT)))
def test_compiled_modules_begin_with_the_agreed_options(path: Path) -> None:
    assert path.read_text().splitlines()[0] == OPTIONS


# The folders of the repository lie at the top of its path; only what lies in `shardmq` is
# installed.
UNINSTALLED = re.compile(
    r"^\s*(?:from|c?import) (?:broker|cluster|combined|shardd|supervisor)(?:[.\s]|$)", re.MULTILINE
)


def test_the_packages_are_imported_by_the_name_that_is_installed() -> None:
    folders = (
        "bridges", "broker", "cluster", "combined", "shardd", "supervisor", "pyspark_shardmq",
        "tests", "bench",
    )  # fmt: skip
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.p[yx]*")
        if path.suffix != ".pyc"
    ]
    assert len(files) > 500
    assert [path.relative_to(ROOT) for path in files if UNINSTALLED.search(path.read_text())] == []
    assert UNINSTALLED.search("import os\n    from broker.amqp import frames\n")


def test_the_rule_would_notice() -> None:
    assert imported("from libc.string cimport memcpy\nimport os\n  from zmq import Socket\n") == {
        "libc.string",
        "os",
        "zmq",
    }
