"""make rows: which rows of the feature table have a test, and which have none.

The table is a Markdown file whose rows begin with an id: `| A3.1 | exchange.declare | ...`. It lies
outside this project, in shared/FEATURES.md of the nearest folder above that has one, unless
FEATURES says where. A test names the rows that it proves by a mark; so does a set of its
parameters, for which there is tests/support/proving.py:

    @pytest.mark.row("A3.1", "A3.2")

Nothing is run: tests are collected as pytest would. A mark that names no row of the table is an
error, as it is most likely a slip of the pen.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

TABLES = [folder / "shared" / "FEATURES.md" for folder in Path(__file__).resolve().parents[2:]]
ROW = re.compile(r"^\|\s*([A-Z]\d*(?:\.\d+)?)\s*\|\s*([^|]*?)\s*\|")


def rows_of(table: str) -> dict[str, str]:
    """Id to feature, in the table's order."""
    found = (ROW.match(line) for line in table.splitlines())
    return {row[1]: row[2] for row in found if row}


class Collected:
    """A pytest plugin that keeps the tests by row."""

    def __init__(self) -> None:
        self.tests: dict[str, list[str]] = defaultdict(list)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for row in sorted({str(row) for mark in item.iter_markers("row") for row in mark.args}):
                self.tests[row].append(item.nodeid)


def report(rows: dict[str, str], tests: dict[str, list[str]]) -> list[str]:
    """By section: how many of its rows are tested, and each row that is not."""
    sections: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        sections[row.partition(".")[0] if "." in row else row[0]].append(row)
    lines = []
    for section, members in sections.items():
        untested = [row for row in members if row not in tests]
        lines.append(f"{section}: {len(members) - len(untested)} of {len(members)} rows tested")
        lines += [f"    untested {row:6} {rows[row]}" for row in untested]
    tested = sum(row in tests for row in rows)
    return [*lines, f"all: {tested} of {len(rows)} rows tested, {len(rows) - tested} untested"]


def main(arguments: list[str]) -> int:
    """`arguments`: sections to show (A1, B, ...); all without."""
    found = next((path for path in TABLES if path.is_file()), TABLES[0])
    path = Path(os.environ.get("FEATURES", found))
    if not path.is_file():
        print(
            f"rows: there is no feature table at {path}; FEATURES=... says where it is",
            file=sys.stderr,
        )
        return 2
    rows = rows_of(path.read_text(encoding="utf-8"))
    collected = Collected()
    quiet = ["-p", "no:terminal", "-o", "addopts="]  # whose options need the terminal's plugin
    status = pytest.main(
        ["--collect-only", *quiet, str(Path(__file__).parent)], plugins=[collected]
    )
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        print(
            "rows: the tests cannot be collected; python -m pytest --collect-only says why",
            file=sys.stderr,
        )
        return 2
    if unknown := {row: tests for row, tests in collected.tests.items() if row not in rows}:
        for row, tests in unknown.items():
            print(
                f"rows: {tests[0]} is marked with {row}, which is no row of {path}", file=sys.stderr
            )
        return 1
    wanted = {
        row: what for row, what in rows.items() if not arguments or row.startswith(tuple(arguments))
    }
    print("\n".join(report(wanted, collected.tests)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
