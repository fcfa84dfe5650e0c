"""What `make torture` plays: how many, and from which seed."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import etcd_program

__all__ = ["etcd_program"]


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> range:
    first = request.config.option.seed
    return range(first, first + request.config.option.histories)
