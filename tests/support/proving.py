"""Parameters of a test whose cases prove different rows of the feature table."""

from __future__ import annotations

from typing import Any

import pytest


def proving(rows: str, name: str, *values: Any) -> Any:
    """Return one set of parameters, called `name`, with the marks of its `rows`, one or more by blanks."""
    return pytest.param(*values, id=name, marks=pytest.mark.row(*rows.split()))
