"""Test consumers of a virtual queue that come, go and die, while processes of the broker die too.

Every shard soon has an owner again, and each key stays in order. No message is missing, and none
comes twice without being marked as redelivered.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal

import aio_pika
import pytest

from tests.support.brokers import killable_broker
from tests.support.real_broker import START_TIMEOUT_S, RealBroker, wait_until
from tests.support.virtual_load import Ledger, Member, Publisher, balanced

pytestmark = pytest.mark.crash
broker = killable_broker

SHARDS = 6
KEYS = 12
STEPS = 16
OWNED_WITHIN_S = 60.0
OWNED_SOON_S = 3.0  # also on a crowded machine: a quarter of all times
DRAINED_WITHIN_S = 60.0


async def declare(broker: RealBroker, name: str, shards: int) -> None:
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await channel.declare_exchange(
            name, "x-modulus-hash", durable=True, arguments={"x-shards": shards}
        )


class Group:
    def __init__(self, broker: RealBroker, name: str, seed: int, affinity: bool = False) -> None:
        self.broker, self.name, self.affinity = broker, name, affinity
        self.arguments: dict[str, object] = {"x-key-affinity": True} if affinity else {}
        self.random = random.Random(seed)
        self.ledger = Ledger()
        self.members: dict[str, Member] = {}
        self.joined = 0
        self.took_s: list[float] = []

    async def join(self) -> None:
        self.joined += 1
        who = f"member-{self.joined}"
        member = Member(who, self.random.randrange(1 << 30), self.ledger)
        await member.join(self.broker, self.name, self.arguments)
        self.members[who] = member

    async def leave(self, how: str) -> None:
        if self.members:
            await self.members.pop(self.random.choice(sorted(self.members))).leave(how)

    async def kill(self, kind: str, index: int) -> None:
        old = self.broker.pid(kind, index)
        os.kill(old, signal.SIGKILL)
        # Named for the line below.
        back = lambda: self.broker.is_replaced(kind, index, old)  # noqa: E731
        await asyncio.to_thread(wait_until, back, f"{kind} {index} to come back", START_TIMEOUT_S)
        await asyncio.sleep(0.1)
        for who in [who for who, member in self.members.items() if member.is_gone]:
            await self.members.pop(who).leave("gone")

    async def is_balanced(self, within_s: float = OWNED_WITHIN_S) -> None:
        self.took_s.append(
            await balanced(self.broker, self.name, set(self.members), within_s, self.affinity)
        )

    async def end(self, publishers: list[Publisher]) -> None:
        for publisher in publishers:
            await publisher.finish()
        if not self.members:
            await self.join()
        end = asyncio.get_running_loop().time() + DRAINED_WITHIN_S
        while not self.ledger.complete and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)
        self.ledger.check()
        assert self.ledger.seen == self.ledger.published
        for member in self.members.values():
            await member.leave("cancel")


async def play(
    broker: RealBroker, name: str, seed: int, acts: list[str], steps: int, affinity: bool = False
) -> Group:
    """With `affinity` there are few shards, which members share."""
    await declare(broker, name, 2 if affinity else SHARDS)
    group = Group(broker, name, seed, affinity)
    publishers = [Publisher(broker, name, f"key-{number}", group.ledger) for number in range(KEYS)]
    for _ in range(2):
        await group.join()
    for _ in range(steps):
        act = group.random.choice(acts)
        if act == "join":
            await group.join()
        elif act in ("cancel", "channel", "close", "cut"):
            await group.leave(act)
        else:
            await group.kill(act, 0 if act == "controller" else group.random.randrange(2))
        if group.random.random() < 0.6:  # else the next comes while shards still move
            await group.is_balanced()
        group.ledger.check()
    await group.is_balanced()
    await group.end(publishers)
    assert sorted(group.took_s)[len(group.took_s) // 4] < OWNED_SOON_S
    print(
        f"{group.ledger.deliveries} deliveries, {group.ledger.repeats} again, "
        f"{len(group.ledger.doubtful)} published again, {group.joined} members, balanced after "
        f"{max(group.took_s):.2f} s at the most"
    )
    return group


@pytest.mark.row("E2.7", "E2.18")
@pytest.mark.parametrize("affinity", [False, True], ids=["own shards", "key affinity"])
async def test_members_come_and_go(
    broker: RealBroker, name: str, request: pytest.FixtureRequest, affinity: bool
) -> None:
    acts = ["join", "join", "join", "cancel", "channel", "close", "cut"]
    group = await play(broker, name, request.config.option.seed, acts, STEPS, affinity)
    assert group.ledger.deliveries > KEYS


@pytest.mark.parametrize(
    "victim", ["shard", "front-door", pytest.param("controller", marks=pytest.mark.torture)]
)
async def test_processes_of_the_broker_die(
    broker: RealBroker, name: str, request: pytest.FixtureRequest, victim: str
) -> None:
    acts = ["join", "join", "cancel", "cut", victim]
    group = await play(broker, name, request.config.option.seed, acts, STEPS // 2)
    assert group.ledger.deliveries > KEYS
