"""Test clients of Node by scripts of tests/clients/node, whose packages .ci/node installs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.real_broker import RealBroker

SCRIPTS = Path(__file__).parent / "node"
STEPS = [
    "channel",
    "confirmed",
    "consumed in order",
    "got",
    "returned",
    "routed",
    "refused",
    "committed",
    "closed",
]


def test_cloudamqp_amqp_client_does_what_its_users_do(broker: RealBroker, name: str) -> None:
    url = f"amqp://guest:guest@{broker.host}:{broker.port}"
    command = ["node", str(SCRIPTS / "cloudamqp.mjs"), url, name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines() == STEPS
