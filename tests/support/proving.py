"""Parameters of a test whose cases prove different rows of the feature table."""

from __future__ import annotations

from typing import Any

import pytest


def proving(rows: str, name: str, *values: Any) -> Any:
    """Return one set of parameters, called `name`, with marks of its `rows`.

    Blanks stand between several rows.
    """
    return pytest.param(*values, id=name, marks=pytest.mark.row(*rows.split()))
