"""A disk hangs or fails: publishers are told at once, and operators see why.

Nothing confirmed is lost.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aio_pika
import pika
import pytest

from shardmq.broker.routing.placement import place
from tests.support.crash_clients import Listener, Publishing, connected, drained, wait_for
from tests.support.real_broker import PATIENCE_S, RealBroker, wait_until
from tests.support.sick_broker import VARIABLE, Disk

pytestmark = [pytest.mark.broker, pytest.mark.crash]

STALL_S = 1.0
# What is settled is synced each second: after so long nothing of it waits, or it has been tried.
QUIET_S, LAST_S = 3.0, 10.0
TYPE = "x-queue-type"
SETTINGS = """
[shards]
segment_bytes = 1048576
disk_stall_s = {stall_s}
disk_free_warn_bytes = 0
[supervision]
watchdog_s = {watchdog_s}
deaths_max = {deaths_max}
"""

Start = Callable[..., RealBroker]
READY, ALARMS = "health/checks/ready-to-serve-clients", "health/checks/alarms"


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "faults"))
    return Disk(tmp_path / "faults")


@pytest.fixture
def start(tmp_path: Path, disk: Disk) -> Iterator[Start]:
    started: list[RealBroker] = []

    def make(shards: int = 1, watchdog_s: float = 60, deaths_max: int = 100) -> RealBroker:
        settings = tmp_path / "broker.toml"
        settings.write_text(
            SETTINGS.format(stall_s=STALL_S, watchdog_s=watchdog_s, deaths_max=deaths_max)
        )
        module = ("tests.support.sick_broker",)
        broker = RealBroker(
            tmp_path / "data", shards=shards, more=("--config", str(settings)), command=module
        )
        started.append(broker)
        return broker

    try:
        yield make
    finally:
        disk.heal()
        for broker in started:
            broker.clean_up()


def asked(broker: RealBroker, path: str) -> tuple[int, Any]:
    login = base64.b64encode(b"guest:guest").decode()
    url = f"http://{broker.status()['http']}/api/{path}"
    request = urllib.request.Request(url, headers={"Authorization": f"Basic {login}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


async def told(broker: RealBroker, path: str, code: int, key: str, value: Any) -> None:
    """Wait until the HTTP path answers with the code, and with the value for the key.

    The shard tells the supervisor, the controller and the front doors, in no promised order.
    """

    def is_so() -> bool:
        status, answer = asked(broker, path)
        return status == code and answer[key] == value

    await asyncio.to_thread(wait_until, is_so, f"{path} to say {code}, {value}")


def shard_row(broker: RealBroker) -> dict[str, Any]:
    return next(row for row in asked(broker, "processes")[1] if row["name"] == "shard-0")


def publish_until_it_ends(broker: RealBroker) -> None:
    """Each publish meets the disk's failure; exit status 1."""
    with contextlib.suppress(pika.exceptions.AMQPError):
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        while True:
            channel.basic_publish("", "q", b"", pika.BasicProperties(delivery_mode=2))
            connection.process_data_events(0.05)
    assert broker.process.wait(120) == 1


@pytest.mark.parametrize(
    ("call", "slow"),
    [
        pytest.param("sync", "", id="sync in the loop"),
        pytest.param("sync", "0.005", id="sync in the thread"),
        pytest.param("write", "", id="write in the loop", marks=pytest.mark.torture),
        pytest.param("write", "0.005", id="write in the thread", marks=pytest.mark.torture),
    ],
)
async def test_a_disk_that_hangs_takes_the_shard_out_of_service_until_it_answers(
    start: Start, disk: Disk, call: str, slow: str
) -> None:
    """The loop itself waits for a quick disk, a thread for a slow one.

    The loop makes all writes.
    """
    broker = await asyncio.to_thread(start)
    listener = await asyncio.to_thread(Listener, broker)
    try:
        async with connected(broker) as connection:
            channel = await connection.channel()
            await channel.declare_queue("q", durable=True)
            if slow:
                disk.fault("sync", slow)
            publisher = Publishing(channel, "q", 20)
            await wait_for(lambda: len(publisher.confirmed) > 50, "confirms")
            disk.fault(call, "hang")
            await wait_for(lambda: listener.blocked, "connection.blocked")
            assert set(listener.reasons) == {"disk does not answer"}
            await wait_for(lambda: publisher.nacked >= 20, "nacks")
            await told(broker, READY, 503, "reason", "disk does not answer: shards 0")
            await told(
                broker, ALARMS, 503, "alarms", [{"shard": 0, "alarm": "disk does not answer"}]
            )
            said = f"disk does not answer: {call} takes more than {STALL_S:g} s"
            await wait_for(lambda: shard_row(broker)["status"] == said, "the supervisor to be told")
            disk.heal()
            before = len(publisher.confirmed)
            await wait_for(lambda: not listener.blocked, "connection.unblocked")
            await wait_for(lambda: len(publisher.confirmed) > before + 50, "confirms afterwards")
            await publisher.finish()
            await wait_for(
                lambda: shard_row(broker)["status"] == "serving", "the supervisor to be told"
            )
            assert (await asyncio.to_thread(shard_row, broker))["restarts"] == 0
            await told(broker, READY, 200, "status", "ok")
            assert set(publisher.confirmed) <= set(await drained(channel, "q"))
    finally:
        await asyncio.to_thread(listener.stop)
    await asyncio.to_thread(broker.stop)
    assert "the disk does not answer: " in broker.log_path.read_text()
    assert "the disk answers again: " in broker.log_path.read_text()


async def test_a_shard_that_cannot_turn_for_its_disk_is_killed_and_recovery_decides(
    start: Start, disk: Disk
) -> None:
    broker = await asyncio.to_thread(start, watchdog_s=3)
    async with connected(broker) as connection:
        channel = await connection.channel()
        await channel.declare_queue("q", durable=True)
        publisher = Publishing(channel, "q", 20)
        await wait_for(lambda: len(publisher.confirmed) > 50, "confirms")
        disk.fault("write", "hang")
        await wait_for(lambda: broker.status()["children"][1]["restarts"] == 1, "the watchdog")
        disk.heal()
        before = len(publisher.confirmed)
        await wait_for(lambda: len(publisher.confirmed) > before + 50, "confirms afterwards")
        await publisher.finish()
        assert set(publisher.confirmed) <= set(await drained(channel, "q"))
    row = await asyncio.to_thread(shard_row, broker)
    assert row["last_end"] == (
        "signal SIGKILL: killed: silent for 3 s while ready; it last said: "
        f"disk does not answer: write takes more than {STALL_S:g} s"
    )
    await asyncio.to_thread(broker.stop)


@pytest.mark.parametrize("call", ["sync", "write"])
async def test_a_disk_that_fails_is_told_and_recovery_loses_nothing_confirmed(
    start: Start, disk: Disk, call: str
) -> None:
    broker = await asyncio.to_thread(start)
    async with connected(broker) as connection:
        channel = await connection.channel()
        await channel.declare_queue("q", durable=True)
        publisher = Publishing(channel, "q", 20)
        await wait_for(lambda: len(publisher.confirmed) > 50, "confirms")
        disk.fault(call, "EIO")
        await wait_for(lambda: broker.status()["children"][1]["restarts"] >= 2, "restarts")
        assert publisher.nacked
        disk.heal()
        before = len(publisher.confirmed)
        await wait_for(lambda: len(publisher.confirmed) > before + 50, "confirms afterwards")
        await publisher.finish()
        row = await asyncio.to_thread(shard_row, broker)
        assert row["last_end"].startswith("exit status 1: disk failed: ")
        assert row["last_end"].endswith(f"[Errno 5] {call} fails on purpose")
        assert set(publisher.confirmed) <= set(await drained(channel, "q"))
    await told(broker, READY, 200, "status", "ok")
    await asyncio.to_thread(broker.stop)


async def test_an_ack_alone_is_synced_within_seconds_and_an_idle_shard_syncs_nothing(
    start: Start, disk: Disk
) -> None:
    """A sync that fails ends the shard: so it is seen whether there was one.

    A classic queue lies on one shard, a stream on the other.
    """
    broker = await asyncio.to_thread(start, shards=2)
    names = [f"q-{number}" for number in range(100)]
    on = [next(name for name in names if place("/", name, 2) == shard) for shard in range(2)]

    def restarts(shard: int) -> int:
        found: int = broker._child("shard", shard)["restarts"]
        return found

    async with connected(broker) as connection:
        messages = []
        for name, kind in zip(on, ("classic", "stream"), strict=True):
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=10)
            queue = await channel.declare_queue(name, durable=True, arguments={TYPE: kind})
            for number in range(2):
                await channel.default_exchange.publish(
                    aio_pika.Message(b"%d" % number, delivery_mode=2), name
                )
            came: asyncio.Queue[aio_pika.abc.AbstractIncomingMessage] = asyncio.Queue()
            tracked = {"x-stream-automatic-offset-tracking": True, "x-stream-offset": "first"}
            arguments = tracked if kind == "stream" else {}
            await queue.consume(came.put, consumer_tag=f"reader-{kind}", arguments=arguments)
            messages.append(await asyncio.wait_for(came.get(), PATIENCE_S))
        await asyncio.sleep(QUIET_S)
        disk.fault("sync", "EIO")
        await asyncio.sleep(QUIET_S)
        assert [restarts(0), restarts(1)] == [0, 0], "nothing was to be synced"
        for message in messages:
            await message.ack()
        for shard in range(2):
            await wait_for(
                lambda shard=shard: restarts(shard) >= 1, f"a sync of the ack at {shard}", LAST_S
            )
        disk.heal()
    await asyncio.to_thread(broker.stop)


async def test_a_disk_that_goes_on_failing_ends_the_broker_which_says_why(
    start: Start, disk: Disk
) -> None:
    broker = await asyncio.to_thread(start, deaths_max=3)
    async with connected(broker) as connection:
        channel = await connection.channel()
        await channel.declare_queue("q", durable=True)
        await channel.default_exchange.publish(aio_pika.Message(b"kept", delivery_mode=2), "q")
        disk.fault("sync", "EIO")
        await asyncio.to_thread(publish_until_it_ends, broker)
    log = broker.log_path.read_text()
    assert "shard-0 died too often, at last with exit status 1: disk failed: " in log
    disk.heal()
    await asyncio.to_thread(broker.restart)
    async with connected(broker) as connection:
        assert b"kept" in await drained(await connection.channel(), "q")
    await asyncio.to_thread(broker.stop)


async def test_a_shard_that_has_recovered_serves_while_another_recovers_and_says_how_far_it_is(
    start: Start, disk: Disk
) -> None:
    broker = await asyncio.to_thread(start, shards=2)
    async with connected(broker) as connection:
        channel = await connection.channel()
        for number in range(8):
            await channel.declare_queue(f"q-{number}", durable=True)
        shards = {
            row["name"]: row["shard"]
            for row in (await asyncio.to_thread(asked, broker, "queues"))[1]
        }
        quick, slow = (
            next(name for name, shard in shards.items() if shard == wanted) for wanted in (0, 1)
        )
        for queue in (quick, slow):
            publisher = Publishing(channel, queue, 20, padding=100_000)
            await wait_for(lambda publisher=publisher: len(publisher.confirmed) > 150, "confirms")
            await publisher.finish()
    before = broker.process.pid
    await asyncio.to_thread(broker.kill_all)
    disk.fault("read", "0.1", shard=1)
    restarting = asyncio.create_task(asyncio.to_thread(broker.restart))
    said: set[str] = set()

    def status() -> dict[str, dict[str, Any]]:
        now = broker.status()
        children = (
            {child["name"]: child for child in now["children"]} if now["pid"] != before else {}
        )
        said.add(children["shard-1"]["status"] if children else "")
        return children

    await wait_for(lambda: status().get("front-door-0", {}).get("state") == "ready", "a front door")
    async with connected(broker) as connection:
        channel = await connection.channel()
        assert (
            await channel.declare_queue(quick, passive=True)
        ).declaration_result.message_count > 150
        await channel.default_exchange.publish(aio_pika.Message(b"now", delivery_mode=2), quick)
        assert status()["shard-1"]["state"] == "starting", "too late: the test proves nothing"
        with pytest.raises(aio_pika.exceptions.DeliveryError):
            await channel.default_exchange.publish(
                aio_pika.Message(b"too early", delivery_mode=2), slow
            )
        code, answer = await asyncio.to_thread(
            asked, broker, "health/checks/ready-to-serve-clients"
        )
        assert (code, answer["reason"]) == (503, "shards not ready: 1")
        await wait_for(
            lambda: status() and any("recovering" in words for words in said), "a word of progress"
        )
        disk.heal()
        await restarting
        # The shard tells the supervisor and the controller; nobody promises who hears it first.
        await wait_for(
            lambda: asked(broker, "health/checks/ready-to-serve-clients")[0] == 200, "health"
        )
        await channel.default_exchange.publish(aio_pika.Message(b"late", delivery_mode=2), slow)
        assert b"now" in await drained(channel, quick)
    recovering = [
        line
        for line in broker.log_path.read_text().splitlines()
        if " shard-1 " in line and "recovering" in line
    ]
    assert 0 < len(recovering) < 60
    assert re.search(
        r"recovering \d+ %: vhost /, [\d.]+ of [\d.]+ MB, [\d,]+ messages", recovering[0]
    )
    await asyncio.to_thread(broker.stop)


async def test_a_bit_that_flipped_on_the_disk_costs_its_record_alone_and_is_told(
    start: Start,
) -> None:
    """The index is good, so the consumer meets the damage.

    The shard reads everything anew and goes on.
    """
    broker = await asyncio.to_thread(start)
    async with connected(broker) as connection:
        channel = await connection.channel()
        await channel.declare_queue("q", durable=True)
        publisher = Publishing(channel, "q", 5, padding=10_000)
        await wait_for(lambda: len(publisher.confirmed) > 500, "confirms")
        await publisher.finish()
    await asyncio.to_thread(broker.stop)
    segment = sorted(broker.data_dir.glob("shard-00/*/msgs.*"))[1]
    with segment.open("r+b") as file:
        file.seek(500_000)
        byte = file.read(1)[0]
        file.seek(500_000)
        file.write(bytes([byte ^ 4]))
    await asyncio.to_thread(broker.restart)
    bodies: set[bytes] = set()
    async with connected(broker) as connection:
        channel = await connection.channel()
        await channel.set_qos(20)

        async def take(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            number, _, rest = message.body.partition(b":")
            assert rest == b"x" * 10_000
            bodies.add(number)
            await message.ack()

        queue = await channel.declare_queue("q", passive=True)
        await queue.consume(take)
        await wait_for(lambda: len(set(publisher.confirmed) - bodies) <= 5, "all others")
        await asyncio.sleep(0.3)
        missing = set(publisher.confirmed) - bodies
        assert 1 <= len(missing) <= 5, "those that were published together with it"
    row = await asyncio.to_thread(shard_row, broker)
    assert row["restarts"] == 1 and "is damaged" in row["last_end"]
    _, health = await asyncio.to_thread(asked, broker, "health/checks/alarms")
    text = "1 damaged places found in message files, see the log"
    assert health == {"status": "ok", "warnings": [{"shard": 0, "warning": text}]}
    assert re.search(
        rf"{segment}, bytes \d+ to \d+ \(\d+ bytes\): damaged, .* damaged.{segment.name[5:]}",
        broker.log_tail(),
    )
    assert segment.with_name(segment.name.replace("msgs", "damaged")).exists()
    await asyncio.to_thread(broker.stop)


async def test_little_room_is_warned_of_before_publishers_are_blocked(tmp_path: Path) -> None:
    settings = tmp_path / "broker.toml"
    settings.write_text(f"[shards]\ndisk_free_warn_bytes = {1 << 50}\n")
    broker = await asyncio.to_thread(
        lambda: RealBroker(tmp_path / "data", shards=1, more=("--config", str(settings)))
    )
    try:
        await wait_for(lambda: "low on disk soon: " in broker.log_tail(), "the warning")
        # Named for the line below.
        warning = lambda: asked(broker, ALARMS)[1]["warnings"][0]["warning"]  # noqa: E731
        await asyncio.to_thread(
            wait_until, lambda: warning().startswith("low on disk soon: "), "the warning"
        )
        async with connected(broker) as connection:
            channel = await connection.channel()
            await channel.declare_queue("q")
            await channel.default_exchange.publish(aio_pika.Message(b"taken"), "q")
            assert await drained(channel, "q") == [b"taken"]
        await asyncio.to_thread(broker.stop)
        assert broker.log_path.read_text().count("low on disk soon: ") == 1
    finally:
        broker.clean_up()
