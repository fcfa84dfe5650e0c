"""Processes of two releases refuse each other, and both say why once.

They serve again when all are of one release.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aio_pika
import pytest

from shardmq.shardd.wire.messages import WIRE_VERSION
from tests.support.crash_clients import connected, drained
from tests.support.mixed_broker import VARIABLE
from tests.support.real_broker import RealBroker, wait_until

pytestmark = pytest.mark.crash

NEW = WIRE_VERSION + 1
QUIET_S = 3.0  # front doors and controllers try again each second, or more often
SETTINGS = """
[supervision]
deaths_max = 100
"""


class Mixed(RealBroker):
    def upgrade(self, kind: str) -> None:
        """Have one process of this kind replaced by one of the next version."""
        Path(os.environ[VARIABLE]).write_text(kind)
        os.kill(self.pid(kind), signal.SIGKILL)

    def said(self, process: str, *words: str) -> int:
        """Return how many lines of this process have all these words."""
        lines = [
            line
            for line in self.log_path.read_text().splitlines()
            if re.search(rf"\b{process}\b", line)
        ]
        return sum(all(word in line for word in words) for line in lines)

    def ask(self, path: str) -> Any:
        login = base64.b64encode(b"guest:guest").decode()
        url = f"http://{self.status()['http']}/api/{path}"
        request = urllib.request.Request(url, headers={"Authorization": f"Basic {login}"})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as refused:
            return json.load(refused)


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mixed]:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "next"))
    (tmp_path / "next").write_text("")
    settings = tmp_path / "broker.toml"
    settings.write_text(SETTINGS)
    made = Mixed(
        tmp_path / "data", more=("--config", str(settings)), command=("tests.support.mixed_broker",)
    )
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


def between(peer: str, spoken: int, speaks: int) -> str:
    return f"between {peer} and shard 0 is of wire version {spoken}, this process speaks {speaks}"


async def test_a_shard_of_another_version_and_its_peers_say_so_once(broker: Mixed) -> None:
    broker.upgrade("shard")
    expected = {
        ("shard-0", between("front door 0", WIRE_VERSION, NEW)),
        ("shard-0", between("the controller", WIRE_VERSION, NEW)),
        ("front-door-0", between("front door 0", NEW, WIRE_VERSION)),
        ("controller", between("the controller", NEW, WIRE_VERSION)),
    }
    wait_until(lambda: all(broker.said(*each) for each in expected), "all to say it")
    time.sleep(QUIET_S)
    assert {each: broker.said(*each) for each in expected} == dict.fromkeys(expected, 1)
    assert [row["alarm"] for row in broker.ask("shards")] == [
        f"speaks wire version {NEW}, the controller {WIRE_VERSION}",
        "",
    ]
    assert broker.ask("health/checks/ready-to-serve-clients")["reason"] == "shards not ready: 0"
    Path(os.environ[VARIABLE]).write_text("")
    broker.kill("shard")
    wait_until(
        lambda: [row["alarm"] for row in broker.ask("shards")] == ["", ""], "the alarm to end"
    )
    await _serves(broker)


@pytest.mark.parametrize("kind", ["front-door", "controller"])
async def test_a_front_door_or_controller_of_another_version_and_its_peers_say_so_once(
    broker: Mixed, kind: str
) -> None:
    broker.upgrade(kind)
    new_door = kind == "front-door"
    door, controller = (NEW, WIRE_VERSION) if new_door else (WIRE_VERSION, NEW)
    expected = {
        (
            "front-door-0",
            f"the controller speaks wire version {controller}, this process speaks {door}",
        ),
        ("controller", f"speaks wire version {door}, this process speaks {controller}"),
    }
    peer, process = (
        ("front door 0", "front-door-0") if new_door else ("the controller", "controller")
    )
    for_shards = {
        ("shard-0", between(peer, NEW, WIRE_VERSION)),
        (process, between(peer, WIRE_VERSION, NEW)),
    }
    if new_door:  # it waits for the catalog before it looks for its shards
        for_shards = set()
    expected |= for_shards
    wait_until(lambda: all(broker.said(*each) for each in expected), "all to say it")
    time.sleep(QUIET_S)
    assert {each: broker.said(*each) for each in expected} == dict.fromkeys(expected, 1)
    if new_door:
        answer = broker.ask("health/checks/ready-to-serve-clients")
        assert answer["reason"] == "front doors of another release: 0"
    Path(os.environ[VARIABLE]).write_text("")
    broker.kill(kind)
    wait_until(
        lambda: broker.ask("health/checks/ready-to-serve-clients") == {"status": "ok"},
        "all to be well",
    )
    await _serves(broker)


async def _serves(broker: RealBroker) -> None:
    async with connected(broker) as connection:
        channel = await connection.channel()
        for number in range(8):  # queues at both shards
            name = f"q{number}"
            await channel.declare_queue(name, durable=True)
            await channel.default_exchange.publish(aio_pika.Message(b"kept"), name)
            assert await drained(channel, name) == [b"kept"]
