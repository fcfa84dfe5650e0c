"""The list of tested rows follows the marks of the tests, and nothing else names rows."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

from tests.rows import report, rows_of

TESTS = Path(__file__).parents[1]
ROW = re.compile(r"(?<![\w.%/-])[A-N]\d{1,2}(?:\.\d{1,2})?(?![\w.%/-])")
ONLY_ROWS = re.compile(rf"""["']{ROW.pattern}( {ROW.pattern})*["']""")

TABLE = """
| # | Feature | R | Exact observable behaviour |
|---|---|---|---|
| A1.1 | Protocol header | Y | the server's answer |
| A1.2 | connection.start | Y | mechanisms |
| D3 | streams | Y | prefetch | needed |
text | A1.9 | not at the start of a line
"""


def test_rows_are_the_lines_that_begin_with_an_id() -> None:
    assert rows_of(TABLE) == {
        "A1.1": "Protocol header",
        "A1.2": "connection.start",
        "D3": "streams",
    }


def test_the_report_counts_by_section_and_names_each_row_without_a_test() -> None:
    assert report(rows_of(TABLE), {"A1.2": ["tests/x.py::test_two"]}) == [
        "A1: 1 of 2 rows tested",
        "    untested A1.1   Protocol header",
        "D: 0 of 1 rows tested",
        "    untested D3     streams",
        "all: 1 of 3 rows tested, 2 untested",
    ]


def rows_in_prose(text: str) -> list[str]:
    """Return the comments and strings of Python code that name rows.

    Strings of rows alone are left out: marks have them.
    """
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    prose = [token.string for token in tokens if token.type in (tokenize.COMMENT, tokenize.STRING)]
    return [each for each in prose if ROW.search(each) and not ONLY_ROWS.fullmatch(each)]


def test_marks_alone_name_rows() -> None:
    files = set(TESTS.rglob("*.py")) - {Path(__file__), TESTS / "rows.py"}
    assert len(files) > 300
    found = {
        path.relative_to(TESTS): rows for path in files if (rows := rows_in_prose(path.read_text()))
    }
    assert found == {}


def test_the_rule_would_notice() -> None:
    code = '''
@pytest.mark.row("A1.2", 'D3')
@pytest.mark.parametrize("x", [proving("C2.1 C10", "first", 1), pytest.param(2, id="C3 second")])
def test_one(x):
    """Section C2 of the table."""
    check("/A1/C3.4.5-E6")  # row D3, not x.D3
'''
    assert rows_in_prose(code) == [
        '"C3 second"',
        '"""Section C2 of the table."""',
        "# row D3, not x.D3",
    ]
