"""Documents keep to 100 columns, and the files, tests and links that they name are there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "bench", "bridges", "broker", "cluster", "combined", "deploy", "examples", "pyspark_shardmq",
    "shardd", "supervisor", "tests",
)  # fmt: skip
FILES = [path.name for path in ROOT.iterdir() if path.is_file()] + [
    str(path.relative_to(ROOT))
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.*")
    if "node_modules" not in path.parts
]
DOCUMENTS = [
    path for path in FILES if path.endswith(".md") and not path.startswith("bench/results/")
]
WIDE = {"CHANGELOG.md"}  # this list only gets shorter
COLUMNS_MAX = 100
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
# A file in backticks, as `limits.py` or `shardd/queues/limits.py`; a name in capitals stands for
# any. Other kinds are known by their folder.
FILE = re.compile(r"`(\w[\w./-]*\.(?:py|pyx|pxi|pxd|pyi|h|c|js|toml)|tests/[\w./-]+)`")
# Files that a reader writes.
NOT_OURS = {"NAME.py", "jobs/NAME.py"}


@pytest.mark.parametrize("document", sorted(set(DOCUMENTS) - WIDE))
def test_prose_keeps_to_its_columns(document: str) -> None:
    lines = (ROOT / document).read_text().splitlines()
    assert [
        line for line in lines if len(line) > COLUMNS_MAX and not line.lstrip().startswith("|")
    ] == []


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_links_lead_to_files(document: str) -> None:
    folder = (ROOT / document).parent
    links = LINK.findall((ROOT / document).read_text())
    assert [link for link in links if not (folder / link).exists()] == []


@pytest.mark.parametrize("document", sorted(set(DOCUMENTS) - {"CHANGELOG.md"}))
def test_files_in_backticks_are_there(document: str) -> None:
    named = set(FILE.findall((ROOT / document).read_text())) - NOT_OURS
    named = {name for name in named if not (ROOT / name).is_dir()}
    there = [f"/{path}" for path in FILES]
    assert [
        name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in there)
    ] == []


# A function or class in backticks, as `test_documents.py::test_prose_keeps_to_its_columns`. The
# file is named from the folder of the document, or from the root.
DEFINED = re.compile(r"`([\w./-]+\.py)::(\w+)`")


@functools.cache
def defined_in(path: Path) -> set[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


def not_defined(text: str, folder: Path) -> list[str]:
    """Return what a document in a folder names that is not there."""
    missing = []
    for file, name in DEFINED.findall(text):
        path = next((above / file for above in (folder, ROOT) if (above / file).is_file()), None)
        if path is None or name not in defined_in(path):
            missing.append(f"{file}::{name}")
    return missing


@pytest.mark.parametrize("document", sorted(set(DOCUMENTS) - {"CHANGELOG.md"}))
def test_functions_in_backticks_are_there(document: str) -> None:
    path = ROOT / document
    assert not_defined(path.read_text(), path.parent) == []


def test_a_function_that_is_not_there_is_noticed() -> None:
    here, own = Path(__file__).parent, "test_a_function_that_is_not_there_is_noticed"
    text = f"`test_documents.py::{own}`, `tests/layout/test_documents.py::{own}`"
    assert not_defined(text, here) == []
    for wrong in ("test_documents.py::test_a", f"test_none.py::{own}"):
        assert not_defined(f"{text} `{wrong}`", here) == [wrong]


@pytest.mark.parametrize(
    ("title", "rows"), [("What went wrong for others", 11), ("What fails, and what is seen", 9)]
)
def test_each_fault_of_a_cluster_has_a_test(title: str, rows: int) -> None:
    text = (ROOT / "tests" / "cluster" / "README.md").read_text()
    section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    found = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(found) == rows
    assert [row for row in found if not DEFINED.search(row.split(" | ")[-1])] == []


def test_the_table_of_tests_names_each_folder_of_tests() -> None:
    named = re.findall(r"^\| `(\w+)` \|", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert named == sorted(folders - {"support"})


# READMEs that draw or list all files of their folder and its folders without a README. The first
# line of a file says more than a list could; the other READMEs list folders.
WHOLE = (
    "bench", "bridges", "cluster", "combined", "pyspark_shardmq", "shardd/store",
    "shardd/store/format", "shardd/store/segments", "shardd/store/streams", "shardd/store/tools",
)  # fmt: skip


@pytest.mark.parametrize("folder", WHOLE)
def test_readmes_that_list_files_name_each_of_them(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text()
    words = set(re.findall(r"[\w.-]+", text))
    below = {Path(path).parent for path in DOCUMENTS if path.endswith("README.md")}
    files = [
        Path(path)
        for path in FILES
        if path.startswith(f"{folder}/") and path.endswith((".py", ".pyx", ".pxi", ".h"))
        if "build" not in Path(path).parts and not path.endswith(("__init__.py", "__main__.py"))
    ]
    own = [
        path
        for path in files
        if next(above for above in path.parents if above in below) == Path(folder)
    ]
    assert own
    assert [str(path) for path in own if path.name not in words] == []
