"""The controller or a front door dies: messages flow and promises hold.

New work waits for its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import urllib.request
from collections.abc import AsyncIterator

import aio_pika
import aiormq
import pytest

from tests.support.brokers import killable_broker
from tests.support.crash_clients import (
    Publishing,
    connected,
    connected_to_both_doors,
    drained,
    wait_for,
)
from tests.support.real_broker import PATIENCE_S, RealBroker, is_running

pytestmark = pytest.mark.crash
broker = killable_broker

# a publish on a crowded machine; one that waited for an end that never comes would be longer
HELD_UP_S_MAX = 5.0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "in order"])
async def test_while_the_controller_is_away_messages_flow_and_declares_wait(
    broker: RealBroker, name: str, how: signal.Signals
) -> None:
    async with connected(broker) as connection:
        channel = await connection.channel()
        other = await connection.channel()
        await channel.declare_queue(name, durable=True)
        exclusive = await channel.declare_queue(exclusive=True)
        transient = await channel.declare_queue(
            f"{name}-transient", durable=False, auto_delete=True
        )
        for queue in (exclusive, transient):
            await channel.default_exchange.publish(aio_pika.Message(b"kept"), queue.name)
        publishing = Publishing(channel, name, 5)
        await wait_for(lambda: publishing.confirmed, "the first confirms")
        async with _no_new_controller(broker, how):
            before = len(publishing.confirmed)
            declaring = asyncio.create_task(other.declare_queue(f"{name}-new", durable=True))
            await wait_for(
                lambda: len(publishing.confirmed) > before + 5, "more than were on their way"
            )
            assert not declaring.done()
        declared = await asyncio.wait_for(declaring, PATIENCE_S)
        await publishing.finish()
        assert not publishing.nacked and publishing.slowest_s < HELD_UP_S_MAX
        await other.default_exchange.publish(aio_pika.Message(b"new"), declared.name)
        for queue, body in (
            (exclusive.name, b"kept"),
            (transient.name, b"kept"),
            (declared.name, b"new"),
        ):
            assert await drained(channel, queue) == [body]
        await asyncio.to_thread(_http_answers, broker)


@contextlib.asynccontextmanager
async def _no_new_controller(broker: RealBroker, how: signal.Signals) -> AsyncIterator[None]:
    """Kill the controller, while the supervisor is stopped and cannot start another one."""
    controller, supervisor = broker.pid("controller"), broker.process.pid
    os.kill(supervisor, signal.SIGSTOP)
    try:
        os.kill(controller, how)
        await wait_for(lambda: not is_running(controller), "the end of the controller")
        yield
    finally:
        os.kill(supervisor, signal.SIGCONT)


def _http_answers(broker: RealBroker) -> None:
    """Within seconds, on the port it had."""
    request = urllib.request.Request(
        f"http://{broker.http}/api/overview", headers={"Authorization": _GUEST}
    )
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                assert answer.status == 200
            return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)


_GUEST = "Basic Z3Vlc3Q6Z3Vlc3Q="


async def test_what_went_while_the_controller_was_away_is_gone_when_it_is_back(
    broker: RealBroker, name: str
) -> None:
    """Exclusive queues of a client that left, auto-delete queues whose last consumer left."""
    async with connected(broker) as leaving, connected(broker) as staying:
        channel = await leaving.channel()
        exclusive = await channel.declare_queue(exclusive=True)
        shared = await (await staying.channel()).declare_queue(f"{name}-auto", auto_delete=True)
        auto_delete = await channel.get_queue(shared.name)
        await auto_delete.consume(_ignore)
        os.kill(broker.pid("controller"), signal.SIGKILL)
        await leaving.close()
        for queue in (exclusive.name, shared.name):
            await asyncio.wait_for(_until_gone(staying, queue), PATIENCE_S)


async def _ignore(message: object) -> None: ...


async def _until_gone(connection: aio_pika.abc.AbstractConnection, queue: str) -> None:
    while True:
        try:
            await (await connection.channel()).declare_queue(queue, passive=True)
        except aiormq.exceptions.ChannelNotFoundEntity:
            return
        except aiormq.exceptions.ChannelLockedResource:
            pass  # its owner is still thought to be there
        await asyncio.sleep(0.05)


async def test_a_declare_is_in_force_on_every_front_door_also_when_the_controller_was_just_killed(
    broker: RealBroker, name: str
) -> None:
    async with connected_to_both_doors(broker) as (one, other):
        declaring, publishing = await one.channel(), await other.channel()
        for number in range(30):
            if number % 10 == 5:
                os.kill(broker.pid("controller"), signal.SIGKILL)
            queue = await asyncio.wait_for(
                declaring.declare_queue(f"{name}-{number}", durable=True), PATIENCE_S
            )
            # Mandatory: a front door that does not know the queue would return it.
            await publishing.default_exchange.publish(
                aio_pika.Message(b"x"), queue.name, mandatory=True
            )
            assert await drained(declaring, queue.name) == [b"x"]


async def test_a_front_door_dies_and_only_its_clients_notice(broker: RealBroker, name: str) -> None:
    """The unacknowledged messages are back in their places in the queue.

    The exclusive queues of its clients are gone.
    """
    async with connected_to_both_doors(broker) as (dying, living):
        holder, reader = await dying.channel(), await living.channel()
        queue = await reader.declare_queue(name, durable=True)
        exclusive = await holder.declare_queue(exclusive=True)
        for number in range(20):
            await reader.default_exchange.publish(aio_pika.Message(b"%d" % number), name)
        held = [await (await holder.get_queue(name)).get() for _ in range(10)]
        assert len(held) == 10
        publishing = Publishing(reader, f"{name}-other", 5)
        await asyncio.to_thread(broker.kill, "front-door", 0)
        with pytest.raises((aiormq.exceptions.AMQPError, RuntimeError, ConnectionError)):
            await asyncio.wait_for(holder.declare_queue(exclusive=True), PATIENCE_S)
        await wait_for(lambda: len(publishing.confirmed) > 0, "confirms on the other front door")
        await publishing.finish()
        await asyncio.wait_for(_until_gone(living, exclusive.name), PATIENCE_S)
        while (
            await reader.declare_queue(name, durable=True)
        ).declaration_result.message_count != 20:
            await asyncio.sleep(0.05)
        messages = [await queue.get(no_ack=True) for _ in range(20)]
        assert [int(message.body) for message in messages] == list(range(20))
        assert [message.redelivered for message in messages] == [True] * 10 + [False] * 10


async def test_publishers_and_consumers_on_different_doors_survive_the_death_of_either(
    broker: RealBroker, name: str
) -> None:
    """Each comes back to whatever door is there; what was confirmed arrives."""
    connections = [
        await aio_pika.connect_robust(broker.url, reconnect_interval=0.1) for _ in range(6)
    ]
    confirmed, arrived, going = set(), set(), True

    async def consume(connection: aio_pika.abc.AbstractRobustConnection) -> None:
        channel = await connection.channel()
        await channel.set_qos(20)
        queue = await channel.declare_queue(name, durable=True)

        async def collect(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            arrived.add(message.body)
            try:
                await message.ack()
            except (aiormq.exceptions.AMQPError, RuntimeError):
                pass  # its connection went: it comes again

        await queue.consume(collect)

    async def publish(connection: aio_pika.abc.AbstractRobustConnection, publisher: int) -> None:
        channel = await connection.channel()
        number = 0
        while going:
            number += 1
            body = b"%d-%d" % (publisher, number)
            try:
                async with asyncio.timeout(5):
                    await channel.default_exchange.publish(
                        aio_pika.Message(body, delivery_mode=2), name
                    )
                confirmed.add(body)
            except (aiormq.exceptions.AMQPError, RuntimeError, ConnectionError, TimeoutError):
                await asyncio.sleep(0.05)

    try:
        for connection in connections[:3]:
            await consume(connection)
        tasks = [
            asyncio.create_task(publish(connection, n))
            for n, connection in enumerate(connections[3:])
        ]
        for door in (0, 1):
            await asyncio.sleep(0.4)
            await asyncio.to_thread(broker.kill, "front-door", door)
        before = len(confirmed)
        await wait_for(lambda: len(confirmed) > before + 50, "confirms after the deaths")
        going = False
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        await wait_for(lambda: confirmed <= arrived, "all that was confirmed")
    finally:
        for connection in connections:
            await connection.close()


async def test_the_supervisor_dies_and_a_new_broker_starts_on_the_same_data(
    broker: RealBroker, name: str
) -> None:
    """Its processes notice, drain and let go of the data; the new one waits for them."""
    async with connected(broker) as connection:
        channel = await connection.channel()
        await channel.declare_queue(name, durable=True)
        publishing = Publishing(channel, name, 20)
        await asyncio.sleep(0.5)
        pids = [int(child["pid"]) for child in broker.status()["children"]]
        broker.process.kill()
        broker.process.wait()
        began = time.monotonic()
        await asyncio.to_thread(broker.restart)
        assert time.monotonic() - began < PATIENCE_S
        assert not any(os.path.exists(f"/proc/{pid}") and _is_ours(pid) for pid in pids)
        with pytest.raises((aiormq.exceptions.AMQPError, RuntimeError, ConnectionError)):
            await publishing.finish()
    async with connected(broker) as connection:
        assert set(publishing.confirmed) <= set(await drained(await connection.channel(), name))


def _is_ours(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
