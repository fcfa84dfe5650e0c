"""Every docstring begins with a sentence, and lines of the product end at 100 columns."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUFF = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
RULES = {"D205", "D400", "D401", "D404", "D415"}
# Packages whose lines end at 100 columns. This list only gets longer.
NARROW = ("bench", "broker", "pyspark_shardmq", "shardd", "supervisor")


def test_no_file_is_exempt_from_the_rules() -> None:
    assert "per-file-ignores" not in RUFF["lint"], "write the docstrings of these files anew instead"


def test_the_rules_are_selected_for_the_whole_repository() -> None:
    assert set(RUFF["lint"]["select"]) >= RULES
    assert not set(RUFF["lint"]["ignore"]) & {"E501", "D", *RULES}


@pytest.mark.parametrize("package", NARROW)
def test_lines_of_finished_packages_end_at_100_columns(package: str) -> None:
    own = tomllib.loads((ROOT / package / "ruff.toml").read_text())
    assert own["extend"] == "../pyproject.toml"
    assert own["line-length"] == 100
    assert set(own) == {"extend", "line-length", "cache-dir", "src"}, "no other rule is laxer here"
