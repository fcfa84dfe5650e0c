"""A disk runs full: publishers are blocked and told why, deliveries and acknowledgements go on, and then it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aio_pika
import aiormq
import pytest

from tests.support.crash_clients import Listener, Publishing, connected, wait_for
from tests.support.real_broker import RealBroker

DISK_MIB = 64
FREE_MIN_MIB = 24
BODY_BYTES = 100_000

SETTINGS = """
[shards]
segment_bytes = {}
disk_free_min_bytes = {}
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "shardmq-test", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True) if os.geteuid() == 0 else None
    if done is None or done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip() if done else 'not root'}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def free_min_mib() -> int:
    return FREE_MIN_MIB


@pytest.fixture
def broker(small_disk: Path, tmp_path: Path, free_min_mib: int) -> Iterator[RealBroker]:
    settings = tmp_path / "broker.toml"
    settings.write_text(SETTINGS.format(4 << 20, free_min_mib << 20))
    made = RealBroker(small_disk / "data", shards=1, more=("--config", str(settings)))
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


async def test_publishers_are_blocked_and_nothing_confirmed_is_lost(broker: RealBroker) -> None:
    listener = Listener(broker)
    try:
        async with connected(broker) as publishing, connected(broker) as consuming:
            channel = await publishing.channel()
            await channel.declare_queue("q", durable=True)
            publisher = Publishing(channel, "q", 20, padding=BODY_BYTES)
            await wait_for(lambda: listener.blocked, "connection.blocked")
            assert listener.reasons == ["low on disk"]
            await asyncio.sleep(0.3)
            held = len(publisher.confirmed)
            arrived: set[bytes] = set()
            reader = await consuming.channel()
            await reader.set_qos(10)
            queue = await reader.get_queue("q")

            async def collect(message: object) -> None:
                arrived.add(message.body.partition(b":")[0])  # type: ignore[attr-defined]
                await message.ack()  # type: ignore[attr-defined]

            await queue.consume(collect)
            await wait_for(lambda: len(arrived) >= held, "deliveries while publishers are blocked")
            await wait_for(lambda: not listener.blocked, "connection.unblocked")
            await wait_for(lambda: len(publisher.confirmed) > held + 20, "confirms afterwards")
            await publisher.finish()
            await wait_for(lambda: set(publisher.confirmed) <= arrived, "all that was confirmed")
    finally:
        listener.stop()


@pytest.mark.parametrize("free_min_mib", [0])
async def test_with_not_a_byte_left_publishes_are_nacked_and_the_rest_goes_on(
    broker: RealBroker, small_disk: Path, free_min_mib: int
) -> None:
    """Another program took the room that the alarm was to keep."""
    async with connected(broker) as publishing, connected(broker) as consuming:
        channel = await publishing.channel()
        reader = await consuming.channel()
        await reader.set_qos(10)
        queue = await channel.declare_queue("q", durable=True)
        publisher = Publishing(channel, "q", 5, padding=BODY_BYTES)
        await wait_for(lambda: len(publisher.confirmed) > 50, "confirms")
        filled = small_disk / "filled"
        with contextlib.suppress(OSError), filled.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        await wait_for(lambda: publisher.nacked > 0, "nacks")
        transactional = await publishing.channel(publisher_confirms=False)
        transaction = transactional.transaction()
        await transaction.select()
        await transactional.default_exchange.publish(aio_pika.Message(bytes(5 << 20), delivery_mode=2), "q")
        with pytest.raises(aiormq.exceptions.ChannelPreconditionFailed):
            await transaction.commit()
        with contextlib.suppress(aiormq.exceptions.AMQPError):  # refused, but no process ends
            await asyncio.wait_for((await consuming.channel()).declare_queue("other", durable=True), 60)
        arrived: set[bytes] = set()

        async def collect(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            arrived.add(message.body.partition(b":")[0])
            await message.ack()

        await (await reader.get_queue(queue.name)).consume(collect)
        await wait_for(lambda: set(publisher.confirmed) <= arrived, "deliveries on a full disk")
        filled.unlink()
        before = len(publisher.confirmed)
        await wait_for(lambda: len(publisher.confirmed) > before + 10, "confirms afterwards")
        await publisher.finish()
        await wait_for(lambda: set(publisher.confirmed) <= arrived, "all that was confirmed")
        assert all(child["restarts"] == 0 for child in broker.status()["children"])
