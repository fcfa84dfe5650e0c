"""Ordinary clients are served while others send what takes long to handle.

Each of these attacks once held everybody up for seconds. How long it takes on a quiet machine, and
the other attacks: tests/torture/test_attackers.py.
"""

from __future__ import annotations

import pytest

from tests.support.attackers import waits_under
from tests.support.real_broker import RealBroker

ATTACKERS = 10
SECONDS = 1.5
PATIENCE_S = 60.0
# Beside other tests, on two cores; without time slices it is several seconds.
P50_S_MAX = 0.6


@pytest.mark.parametrize("kind", ["headers", "unroutable", "qos"])
def test_a_message_is_confirmed_soon_beside_attackers(broker: RealBroker, kind: str) -> None:
    victim, newcomer = waits_under(
        kind, broker.port, attackers=ATTACKERS, seconds=SECONDS, patience_s=PATIENCE_S
    )
    print(f"{kind}: a message {victim}; a connection with a queue {newcomer}")
    assert victim.percentile(0.5) < P50_S_MAX
