"""The list of feature rows that have a test says what the marks and parameter ids of the tests say."""

from __future__ import annotations

from tests.rows import report, rows_named, rows_of

TABLE = """
| # | Feature | R | Exact observable behaviour |
|---|---|---|---|
| A1.1 | Protocol header | Y | the server's answer |
| A1.2 | connection.start | Y | mechanisms |
| D3 | streams | Y | prefetch | needed |
text | A1.9 | not at the start of a line
"""


def test_rows_are_the_lines_that_begin_with_an_id() -> None:
    assert rows_of(TABLE) == {"A1.1": "Protocol header", "A1.2": "connection.start", "D3": "streams"}


def test_a_test_names_rows_by_its_marks_and_by_the_ids_among_its_parameters() -> None:
    assert rows_named("tests/x.py::test_one", ["A1.1"]) == {"A1.1"}
    assert rows_named("tests/x.py::test_two[A1.2 both mechanisms-D3]", []) == {"A1.2", "D3"}
    assert rows_named("tests/A1.1/x.py::test_three[a1.1]", []) == set()


def test_the_report_counts_by_section_and_names_each_row_without_a_test() -> None:
    assert report(rows_of(TABLE), {"A1.2": ["tests/x.py::test_two"]}) == [
        "A1: 1 of 2 rows tested",
        "    untested A1.1   Protocol header",
        "D: 0 of 1 rows tested",
        "    untested D3     streams",
        "all: 1 of 3 rows tested, 2 untested",
    ]
