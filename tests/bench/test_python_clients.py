"""The figures of Python clients come from messages and tasks that went through a broker."""

from __future__ import annotations

import pytest
import python_clients

from tests.support.real_broker import RealBroker


@pytest.mark.parametrize("row", python_clients.ROWS)
def test_each_row_has_a_figure_of_a_real_broker(broker: RealBroker, row: str) -> None:
    assert python_clients.measured(row, broker.url, 0.1) > 0


def test_the_table_has_the_median_of_each_broker() -> None:
    figures = {("celery", "a"): [1.0, 3.0, 2000.0], ("celery", "b"): [5.0]}
    assert python_clients.table(figures, ["a", "b"]).splitlines()[2] == (
        f"| {python_clients.ROWS['celery'][0]} | 3 (1 to 2,000) | 5 (5 to 5) |"
    )
