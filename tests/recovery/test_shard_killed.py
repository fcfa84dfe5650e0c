"""A shard dies: publishers are answered and consumers keep their tags.

No connection and no channel ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.request
from functools import partial

import aio_pika
import aiormq
import pytest
from aio_pika.abc import AbstractIncomingMessage

from tests.support.brokers import killable_broker
from tests.support.crash_clients import (
    Publishing,
    connected,
    connected_to_both_doors,
    drained,
    wait_for,
)
from tests.support.real_broker import RealBroker

pytestmark = pytest.mark.crash
broker = killable_broker

ANSWER_S_MAX = 15.0  # two and what else the machine has to do
SHARDS = 2
KILLS_IN_A_ROW = 5


def _all_answered(publishing: list[Publishing]) -> bool:
    return all(each.nacked or each.confirmed for each in publishing)


def kill(broker: RealBroker, shard: int) -> int:
    pid = broker.pid("shard", shard)
    assert pid
    os.kill(pid, signal.SIGKILL)
    return pid


async def kill_and_wait(broker: RealBroker, shard: int) -> None:
    await asyncio.to_thread(broker.kill, "shard", shard)


async def test_no_publish_stays_without_an_answer(broker: RealBroker, name: str) -> None:
    async with connected(broker) as connection:
        channel = await connection.channel()
        queues = [f"{name}-{n}" for n in range(8)]  # on both shards
        for queue in queues:
            await channel.declare_queue(queue, durable=True)
        publishing = [Publishing(channel, queue, 20) for queue in queues]
        for shard in range(SHARDS):
            await asyncio.sleep(0.3)
            os.kill(broker.pid("shard", shard), signal.SIGSTOP)
            await wait_for(
                lambda: any(each.is_stuck() for each in publishing),
                "a shard that has messages unread",
            )
            await kill_and_wait(broker, shard)
        await asyncio.sleep(0.3)
        for each in publishing:
            await each.finish()
        assert max(each.slowest_s for each in publishing) < ANSWER_S_MAX
        assert sum(each.nacked for each in publishing) > 0, (
            "nothing was on its way: the test proves nothing"
        )
        for each, queue in zip(publishing, queues, strict=True):
            assert set(each.confirmed) <= set(await drained(channel, queue))


async def test_publishes_to_a_shard_that_stays_away_are_nacked_and_taken_again_when_it_is_back(
    broker: RealBroker, name: str
) -> None:
    """The process is stopped before it is ready, as in a recovery that takes long."""
    async with connected(broker) as connection:
        channel = await connection.channel()
        queues = [f"{name}-{n}" for n in range(8)]
        for queue in queues:
            await channel.declare_queue(queue, durable=True)
        old = kill(broker, 0)
        pid = await _stopped_at_birth(broker, old)
        try:
            publishing = [Publishing(channel, queue, 2) for queue in queues]
            await wait_for(
                partial(_all_answered, publishing),
                "an answer while the shard is away",
                ANSWER_S_MAX,
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        await wait_for(
            lambda: all(each.confirmed for each in publishing), "confirms from both shards"
        )
        for each in publishing:
            await each.finish()
        assert max(each.slowest_s for each in publishing) < ANSWER_S_MAX


async def test_each_vhosts_messages_are_in_it_though_their_shard_was_away_when_they_came(
    broker: RealBroker, name: str
) -> None:
    """A batch goes to the store of one vhost: those of two must not become one while they wait."""
    await asyncio.to_thread(_make_vhost, broker, name)
    async with contextlib.AsyncExitStack() as stack:
        channels = []
        for vhost in ("", name) * 3:  # on each front door there are both, most likely
            connection = await aio_pika.connect(broker.url + vhost)
            stack.push_async_callback(connection.close)
            channels.append(await connection.channel())
            for shard_queue in range(4):
                await channels[-1].declare_queue(
                    f"{name}-{len(channels)}-{shard_queue}", durable=True
                )
        for shard in range(SHARDS):
            kill(broker, shard)
        await asyncio.sleep(0.1)
        publishing = {
            (channel, queue): Publishing(channel, queue, 2, padding=at)
            for at, channel in enumerate(channels)
            for queue in (f"{name}-{at + 1}-{shard_queue}" for shard_queue in range(4))
        }
        await wait_for(
            lambda: all(len(each.confirmed) > 5 for each in publishing.values()), "confirms"
        )
        for each in publishing.values():
            await each.finish()
        for (channel, queue), each in publishing.items():
            found = await drained(channel, queue)
            assert set(each.confirmed) <= set(found) and len(found) == len(set(found))


def _make_vhost(broker: RealBroker, name: str) -> None:
    for path, body in ((f"vhosts/{name}", b"{}"), (f"permissions/{name}/guest", _ALL)):
        headers = {"Authorization": _GUEST, "Content-Type": "application/json"}
        request = urllib.request.Request(
            f"http://{broker.http}/api/{path}", body, headers, method="PUT"
        )
        urllib.request.urlopen(request, timeout=60).close()


_GUEST = "Basic Z3Vlc3Q6Z3Vlc3Q="
_ALL = b'{"configure": ".*", "write": ".*", "read": ".*"}'


async def _stopped_at_birth(broker: RealBroker, old: int, shard: int = 0) -> int:
    while True:
        await wait_for(lambda: broker.pid("shard", shard) not in (0, old), "the next life")
        os.kill(pid := broker.pid("shard", shard), signal.SIGSTOP)
        await asyncio.sleep(0.1)  # what it has said by now is known by then
        if not broker.is_replaced("shard", shard, old):
            return pid
        os.kill(old := pid, signal.SIGKILL)  # we came too late


async def test_consumers_keep_their_tag_and_get_what_they_had_not_acknowledged_again(
    broker: RealBroker, name: str
) -> None:
    async with connected(broker) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=10)
        queue = await channel.declare_queue(name, durable=True)
        for number in range(30):
            message = aio_pika.Message(
                b"%d" % number, delivery_mode=aio_pika.DeliveryMode.PERSISTENT
            )
            await channel.default_exchange.publish(message, name)
        got: list[AbstractIncomingMessage] = []
        tag = await queue.consume(_collector(got))
        await wait_for(lambda: len(got) == 10, "as many deliveries as the prefetch lets through")
        for message in got[:4]:
            await message.ack()
        await wait_for(lambda: len(got) == 14, "deliveries for the acks")
        for shard in range(SHARDS):  # one of them has the queue
            await kill_and_wait(broker, shard)
        await wait_for(lambda: len(got) >= 24, "redeliveries")
        again = got[14:]
        assert [message.consumer_tag for message in again] == [tag] * len(again)
        assert all(message.redelivered for message in again)
        # Acknowledgements of the last moments may be lost with the process; order never is.
        first = int(again[0].body)
        assert first <= 4 and [int(message.body) for message in again] == list(
            range(first, first + 10)
        )
        for message in got[4:14]:
            await message.ack()  # of deliveries the dead process made: no error, and no effect
        for message in again:
            await message.ack()
        # the window moves on
        await wait_for(lambda: any(int(message.body) == 29 for message in got), "the rest")


def _collector(got: list[AbstractIncomingMessage]) -> object:
    async def collect(message: AbstractIncomingMessage) -> None:
        got.append(message)
        if len(got) > 24:
            await message.ack()

    return collect


async def test_a_shard_that_dies_again_and_again_also_while_it_recovers_loses_nothing(
    broker: RealBroker, name: str
) -> None:
    """With the waits between its lives each takes longer than the one before."""
    async with connected(broker) as connection:
        channel = await connection.channel()
        queues = [f"{name}-{n}" for n in range(4)]
        for queue in queues:
            await channel.declare_queue(queue, durable=True)
        publishing = [Publishing(channel, queue, 10) for queue in queues]
        await asyncio.sleep(0.5)
        old = 0
        for round_number in range(KILLS_IN_A_ROW):
            await wait_for(lambda old=old: broker.pid("shard", 1) not in (0, old), "the next life")  # type: ignore[misc]
            # Some while it imports, some while it recovers, some at work.
            await asyncio.sleep((0.0, 0.25, 0.5)[round_number % 3])
            old = kill(broker, 1)
        await asyncio.to_thread(_until_ready, broker, old)
        confirmed_before = sum(len(each.confirmed) for each in publishing)
        await wait_for(
            lambda: sum(len(each.confirmed) for each in publishing) > confirmed_before, "confirms"
        )
        for each in publishing:
            await each.finish()
        assert max(each.slowest_s for each in publishing) < ANSWER_S_MAX
        for each, queue in zip(publishing, queues, strict=True):
            assert set(each.confirmed) <= set(await drained(channel, queue))


def _until_ready(broker: RealBroker, old: int) -> None:
    from tests.support.real_broker import wait_until

    wait_until(lambda: broker.is_replaced("shard", 1, old), "the shard to be back")


async def test_commit_ok_means_stored(broker: RealBroker, name: str) -> None:
    """A transaction that meets the death of a shard is answered.

    A commit-ok is always true.
    """
    async with connected(broker) as connection:
        setup = await connection.channel()
        queues = [f"{name}-{n}" for n in range(2)]
        for queue in queues:
            await setup.declare_queue(queue, durable=True)
        committed: list[bytes] = []
        number = 0
        killing = asyncio.create_task(asyncio.sleep(0))
        end = time.monotonic() + 2.0
        killed = False
        while time.monotonic() < end:
            channel = await connection.channel(publisher_confirms=False)
            try:
                while time.monotonic() < end:
                    if not killed and time.monotonic() > end - 1.5:
                        killed = True
                        killing = asyncio.create_task(kill_and_wait(broker, 0))
                    number += 1
                    transaction = channel.transaction()
                    await transaction.select()
                    for queue in queues:
                        message = aio_pika.Message(
                            b"%d" % number, delivery_mode=aio_pika.DeliveryMode.PERSISTENT
                        )
                        await channel.default_exchange.publish(message, queue)
                    await asyncio.wait_for(transaction.commit(), ANSWER_S_MAX)
                    committed.append(b"%d" % number)
            except (
                aiormq.exceptions.ChannelPreconditionFailed,
                aio_pika.exceptions.ChannelInvalidStateError,
            ):
                continue
        await killing
        assert committed
        for queue in queues:
            assert set(committed) <= set(await drained(setup, queue))


async def test_a_queue_deleted_while_its_shard_is_away_cancels_its_consumers(
    broker: RealBroker, name: str
) -> None:
    async with connected(broker) as connection:
        channel = await connection.channel()
        queues = [await channel.declare_queue(f"{name}-{n}") for n in range(6)]  # on both shards
        got: list[AbstractIncomingMessage] = []
        tags = [await queue.consume(_collector(got)) for queue in queues]
        consumers = (await channel.get_underlay_channel()).consumers
        for shard in range(SHARDS):
            kill(broker, shard)
        deleting = await connection.channel()
        for queue in queues:
            await asyncio.wait_for(deleting.queue_delete(queue.name), 60)
        await wait_for(lambda: not set(tags) & set(consumers), "basic.cancel of every consumer")


@pytest.mark.parametrize("kind", ["client", "front-door"])
async def test_an_auto_delete_queue_goes_though_its_last_consumer_left_while_its_shard_was_away(
    broker: RealBroker, name: str, kind: str
) -> None:
    """The next life of the shard has never seen a consumer there."""
    async with connected_to_both_doors(broker) as (leaving, staying):
        channel, looking = await leaving.channel(), await staying.channel()
        # on both shards
        queues = [await channel.declare_queue(f"{name}-{n}", auto_delete=True) for n in range(6)]
        kept = await looking.declare_queue(f"{name}-kept", auto_delete=True)
        for queue in queues:
            await queue.consume(_collector([]))
        await kept.consume(_collector([]))
        pids = [
            await _stopped_at_birth(broker, kill(broker, shard), shard) for shard in range(SHARDS)
        ]
        try:
            if kind == "client":
                await leaving.close()
            else:
                os.kill(broker.pid(kind, 0), signal.SIGKILL)
                await asyncio.sleep(0.2)  # heard of before the shards are back
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        gone_within_s = 60.0
        end = time.monotonic() + gone_within_s
        while left := {queue.name for queue in queues} & await asyncio.to_thread(
            _queue_names, broker
        ):
            assert time.monotonic() < end, f"still there: {left}"
            await asyncio.sleep(0.1)
        await looking.declare_queue(kept.name, passive=True)


def _queue_names(broker: RealBroker) -> set[str]:
    request = urllib.request.Request(
        f"http://{broker.http}/api/queues", headers={"Authorization": _GUEST}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return {queue["name"] for queue in json.load(answer)}


@pytest.mark.parametrize("kind", ["controller", "shard"])
async def test_what_was_declared_is_there_whatever_was_killed_meanwhile(
    broker: RealBroker, name: str, kind: str
) -> None:
    async with connected(broker) as connection:
        channel = await connection.channel()
        declared: list[str] = []

        async def declare() -> None:
            while len(declared) < 1000 and (time.monotonic() < end or len(declared) <= 20):
                queue = await channel.declare_queue(f"{name}-{len(declared)}", durable=True)
                await queue.bind("amq.topic", queue.name)
                declared.append(queue.name)

        end = time.monotonic() + 3.0
        declaring = asyncio.create_task(declare())
        for _ in range(2):
            await asyncio.sleep(0.4)
            await asyncio.to_thread(broker.kill, kind, 0)
        await asyncio.wait_for(declaring, 60)
        topic = await channel.get_exchange("amq.topic")
        for queue in declared[:: max(1, len(declared) // 20)]:
            await topic.publish(aio_pika.Message(b"", delivery_mode=2), queue)
            assert await drained(channel, queue) == [b""]
