"""Every docstring begins with a sentence, and every line ends at 100 columns."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUFF = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
RULES = {"D205", "D400", "D401", "D404", "D415"}


def test_no_file_is_exempt_from_the_rules() -> None:
    assert "per-file-ignores" not in RUFF["lint"], (
        "write the docstrings of these files anew instead"
    )


def test_the_rules_are_selected_for_the_whole_repository() -> None:
    assert set(RUFF["lint"]["select"]) >= RULES
    assert not set(RUFF["lint"]["ignore"]) & {"E501", "D", *RULES}


def test_lines_end_at_100_columns() -> None:
    assert RUFF["line-length"] == 100


def test_no_folder_has_rules_of_its_own() -> None:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    found = [own for folder in folders for own in folder.rglob("*ruff.toml")]
    assert [path for path in found if "node_modules" not in path.parts] == []


def sources_that_ruff_does_not_read() -> list[Path]:
    """Return the compiled modules with their headers, the load generator, and all scripts."""
    kinds = {".pyx", ".pxd", ".pxi", ".h", ".sh"}
    folders = (
        "bridges", "broker", "cluster", "combined", "shardd", "supervisor", "pyspark_shardmq",
        "bench", "deploy", "examples", "tests",
    )  # fmt: skip
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if not {"node_modules", "build", "dist"} & {*path.relative_to(ROOT).parts[:-1]}
        if path.suffix in kinds or (not path.suffix and path.is_file() and is_script(path))
    ]
    load = ROOT / "bench" / "load" / "amqpload.c"
    return [ROOT / "Makefile", load, *(ROOT / ".ci").iterdir(), *files]


def is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def long_lines(text: str) -> list[int]:
    return [number for number, line in enumerate(text.split("\n"), 1) if len(line) > 100]


def test_lines_of_other_sources_end_at_100_columns() -> None:
    files = sources_that_ruff_does_not_read()
    assert len(files) > 80
    assert {path.suffix for path in files} >= {".pyx", ".pxd", ".h", ".c", ""}
    found = {
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number in long_lines(path.read_text())
    }
    assert found == set()
    assert long_lines("a" * 100 + "\n" + "b" * 101) == [2]
