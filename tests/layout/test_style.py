"""The list of files that need not follow the rules for docstrings and for 100 columns only gets shorter."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUFF = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
IGNORED: dict[str, list[str]] = RUFF["lint"]["per-file-ignores"]
RULES = {"D205", "D400", "D401", "D404", "D415"}
# Packages whose lines end at 100 columns. This list only gets longer.
NARROW = ("bench", "broker", "pyspark_shardmq", "shardd", "supervisor")

# What `per-file-ignores` of pyproject.toml names, and the rules. A file that is rewritten leaves both lists.
LISTED = """
shardd/** D E501
tests/** D
"""
EXEMPT = {name: rules for name, *rules in (line.split() for line in LISTED.strip().splitlines())}


def test_no_file_becomes_exempt_from_the_rules_for_docstrings_and_lines() -> None:
    added = [name for name, rules in IGNORED.items() if not set(rules) <= set(EXEMPT.get(name, []))]
    assert added == [], "write the docstrings of these files anew instead"


def test_a_file_that_was_rewritten_cannot_become_exempt_again() -> None:
    done = [name for name, rules in EXEMPT.items() if not set(rules) <= set(IGNORED.get(name, []))]
    assert done == [], "these are done: take them off LISTED"


@pytest.mark.parametrize("package", ["broker", "pyspark_shardmq", "supervisor"])
def test_the_packages_are_exempt_by_file_not_by_folder(package: str) -> None:
    names = [name for name in IGNORED if name.startswith(package)]
    assert [name for name in names if not (ROOT / name).is_file()] == []


def test_the_rules_are_selected_for_the_whole_repository() -> None:
    assert set(RUFF["lint"]["select"]) >= RULES
    assert not set(RUFF["lint"]["ignore"]) & {"E501", "D", *RULES}


@pytest.mark.parametrize("package", NARROW)
def test_lines_of_finished_packages_end_at_100_columns(package: str) -> None:
    own = tomllib.loads((ROOT / package / "ruff.toml").read_text())
    assert own["extend"] == "../pyproject.toml"
    assert own["line-length"] == 100
    assert set(own) == {"extend", "line-length", "cache-dir", "src"}, "no other rule is laxer here"
