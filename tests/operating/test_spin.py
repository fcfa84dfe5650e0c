"""A broker that looks again before it sleeps serves as any other, and idles when nothing comes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from tests.support.real_broker import RealBroker

pytestmark = pytest.mark.broker

SETTINGS = """
[front_doors]
spin_us = 500
[shards]
spin_us = 500
"""
IDLE_S = 2.0
# The share of a core that all processes of an idle broker may take; looks without end take two.
SHARE_MAX = 0.3


@pytest.fixture(scope="module")
def spinning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    directory = tmp_path_factory.mktemp("spinning")
    settings = directory / "broker.toml"
    settings.write_text(SETTINGS)
    made = RealBroker(Path(directory) / "data", more=("--config", str(settings)))
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


def test_messages_flow_and_an_idle_broker_sleeps(spinning: RealBroker) -> None:
    with pika.BlockingConnection(pika.URLParameters(spinning.url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("q", durable=True)
        for number in range(300):
            body = b"%d" % number
            channel.basic_publish("", "q", body, pika.BasicProperties(delivery_mode=2))
            method, _, got = channel.basic_get("q")
            assert got == body
            channel.basic_ack(method.delivery_tag)
        before = cpu_seconds(spinning)
        time.sleep(IDLE_S)
        assert cpu_seconds(spinning) - before < SHARE_MAX * IDLE_S


def cpu_seconds(broker: RealBroker) -> float:
    """Return the processor time that the processes of the broker have had."""
    total = 0
    for child in broker.status()["children"]:
        pid = child["pid"]
        if not pid:
            continue
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")
