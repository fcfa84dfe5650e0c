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
