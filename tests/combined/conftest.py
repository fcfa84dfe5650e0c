"""Brokers whose shards are front doors, too: `front_doors.count = 0`.

Tests of other folders that a file here imports run with such brokers.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.real_broker import COMBINED, RealBroker


@pytest.fixture(scope="package", autouse=True)
def combined() -> Iterator[None]:
    """Make each broker that a test of this folder starts a combined one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(COMBINED, "1")
        yield


@pytest.fixture(scope="package")
def broker(combined: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    # One process: imported tests expect that their clients share a front door, so that what one has
    # sent another one sees.
    made = RealBroker(tmp_path_factory.mktemp("combined") / "data", shards=1)
    try:
        yield made
        made.stop()
        assert "Traceback" not in made.log_path.read_text()
    finally:
        made.clean_up()
