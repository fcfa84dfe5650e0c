"""What `make torture` plays: how many, and from which seed."""

from __future__ import annotations

import pytest


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> range:
    first = request.config.option.seed
    return range(first, first + request.config.option.histories)
