"""Ordinary clients are served beside ten attackers of each kind.

99 of 100 of their messages arrive and are confirmed in time.

Give it a machine that does nothing else. What a newcomer waits is printed, too: it has seven round
trips.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.attackers import ATTACKS, waits_under
from tests.support.real_broker import RealBroker

ATTACKERS = 10
SECONDS = 5.0
PATIENCE_S = 60.0
P99_S_MAX = 0.25


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RealBroker]:
    made = RealBroker(tmp_path / "data")
    yield made
    made.clean_up()


@pytest.mark.torture
@pytest.mark.parametrize("kind", ATTACKS)
def test_ordinary_clients_are_served_beside_attackers(broker: RealBroker, kind: str) -> None:
    victim, newcomer = waits_under(
        kind, broker.port, attackers=ATTACKERS, seconds=SECONDS, patience_s=PATIENCE_S
    )
    print(f"\n{kind}: a message {victim}; a connection with a queue {newcomer}")
    assert victim.percentile(0.99) < P99_S_MAX
