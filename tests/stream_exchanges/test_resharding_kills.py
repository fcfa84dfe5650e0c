"""The number of shards changes under load while processes die.

Each key stays in order, and no message is lost.
"""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.request
from typing import Any

import aio_pika
import pytest

from tests.consumer_groups.test_kills import Group
from tests.support import virtual_load
from tests.support.brokers import killable_broker
from tests.support.crash_clients import got_from
from tests.support.real_broker import PATIENCE_S, RealBroker
from tests.support.virtual_load import LOST, Publisher

pytestmark = pytest.mark.crash
broker = killable_broker

KEYS = 12
PAUSE_S = 0.02  # of each publisher: consumers that take one message at a time are to keep up
SETTLED_WITHIN_S = 60.0
BACKLOG_S = 1.0  # of publishing that nobody consumes, so that there is something to be overtaken
UNDER_LOAD_S = 0.5
HANDOVER_MS = 10_000


def ask(broker: RealBroker, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{broker.http}/api/{path}", data, method=method)
    request.add_header("Authorization", "Basic " + base64.b64encode(b"guest:guest").decode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None


class Sharded:
    def __init__(self, broker: RealBroker, name: str) -> None:
        self.broker, self.name = broker, name

    async def declare(self, kind: str, shards: int, **arguments: Any) -> None:
        said = {f"x-{key.replace('_', '-')}": value for key, value in arguments.items()} | {
            "x-shards": shards
        }
        async with await aio_pika.connect(self.broker.url) as connection:
            channel = await connection.channel()
            await channel.declare_exchange(self.name, kind, durable=True, arguments=said)

    async def ask(self, method: str = "GET", rest: str = "", body: Any = None) -> Any:
        return await asyncio.to_thread(
            ask, self.broker, method, f"exchanges/%2F/{self.name}/shards{rest}", body
        )

    async def set(self, number: int) -> None:
        await self.ask("PUT", body={"number": number})

    async def settles(self) -> None:
        """Until messages of before are waited for."""
        end = asyncio.get_running_loop().time() + SETTLED_WITHIN_S
        while (found := await self.ask())["step"] != "settling":
            assert asyncio.get_running_loop().time() < end, found
            await asyncio.sleep(0.05)

    async def reaches(self, number: int, within_s: float = SETTLED_WITHIN_S) -> dict[str, Any]:
        """Until so many are bound and no change is under way."""
        end = asyncio.get_running_loop().time() + within_s
        found: dict[str, Any] = {}
        while asyncio.get_running_loop().time() < end:
            try:
                found = await self.ask()
            except OSError:  # the controller is away
                found = {}
            if (
                found
                and found["step"] == "none"
                and sum(queue["bound"] for queue in found["queues"]) == number
            ):
                return found
            await asyncio.sleep(0.1)
        raise AssertionError(f"after {within_s:g} s: {found}")


@pytest.mark.row("E1.12", "E1.13", "E2.13", "E2.14")
@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        pytest.param("x-consistent-hash", "nobody", marks=pytest.mark.torture),
        ("x-consistent-hash", "shard"),
        ("x-consistent-hash", "front-door"),
        pytest.param("x-consistent-hash", "controller", marks=pytest.mark.torture),
        ("x-modulus-hash", "nobody"),
        pytest.param("x-modulus-hash", "shard", marks=pytest.mark.torture),
    ],
)
async def test_keys_stay_in_order_from_2_to_5_to_3_shards(
    broker: RealBroker,
    name: str,
    request: pytest.FixtureRequest,
    kind: str,
    victim: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(virtual_load, "PAUSE_S", PAUSE_S)
    sharded = Sharded(broker, name)
    await sharded.declare(kind, 2)
    group = Group(broker, name, request.config.option.seed)
    # A client that is slow to look at what it has got is not to be overtaken by who gets it next.
    group.arguments["x-handover-timeout"] = HANDOVER_MS
    publishers = [Publisher(broker, name, f"key-{number}", group.ledger) for number in range(KEYS)]
    for number in (5, 3):
        for member in list(group.members):
            await group.members.pop(member).leave("close")
        await asyncio.sleep(BACKLOG_S)
        await sharded.set(number)
        await asyncio.sleep(UNDER_LOAD_S)
        for index in (0, 1) if victim == "shard" else (0,):
            if victim != "nobody":
                await group.kill(victim, index)
        for _ in range(3):
            await group.join()
        if victim == "shard":
            await group.kill("shard", 0)
        await sharded.reaches(number)
        await group.is_balanced()
        await asyncio.sleep(UNDER_LOAD_S)
        group.ledger.check()
    await group.end(publishers)
    assert group.ledger.deliveries > 10 * KEYS
    print(
        f"{group.ledger.deliveries} deliveries, {group.ledger.repeats} again, "
        f"{len(group.ledger.doubtful)} in doubt"
    )


async def test_what_is_never_acknowledged_is_waited_for(broker: RealBroker, name: str) -> None:
    found = await _with_a_stuck_key(Sharded(broker, name), wait_s=2.0)
    assert found["step"] == "settling"
    assert found["to_settle"] == 1


async def test_what_is_never_acknowledged_may_cost_the_order_at_the_deadline(
    broker: RealBroker, name: str
) -> None:
    sharded = Sharded(broker, name)
    choice = {"shards_change_deadline": 1000, "shards_change_at_deadline": "break-order"}
    await _with_a_stuck_key(sharded, wait_s=0.0, **choice)
    await sharded.reaches(3)


async def test_what_is_never_acknowledged_may_be_dead_lettered_at_the_deadline(
    broker: RealBroker, name: str
) -> None:
    sharded = Sharded(broker, name)
    dead = {"x-dead-letter-exchange": "amq.fanout"}
    choice = {
        "shards_change_deadline": 1000,
        "shards_change_at_deadline": "dead-letter",
        "shard_arguments": dead,
    }
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        graves = await channel.declare_queue(f"{name}-dead", durable=True)
        await graves.bind("amq.fanout")
        await _with_a_stuck_key(sharded, wait_s=0.0, **choice)
        message = await got_from(graves)
    assert message.body == b"stuck"
    (death,) = message.headers["x-death"]  # type: ignore[misc] # an array of tables
    assert death["reason"] == "resharded"  # type: ignore[index,call-overload]
    assert death["routing-keys"] == ["key"]  # type: ignore[index,call-overload]


async def test_without_a_dead_letter_exchange_nothing_is_lost_at_the_deadline(
    broker: RealBroker, name: str
) -> None:
    sharded = Sharded(broker, name)
    choice = {"shards_change_deadline": 0, "shards_change_at_deadline": "dead-letter"}
    await sharded.declare("x-consistent-hash", 2, **choice)
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel(publisher_confirms=True)
        exchange = await channel.get_exchange(sharded.name, ensure=False)
        await exchange.publish(aio_pika.Message(b"waits"), "key")
        await sharded.set(3)
        await sharded.settles()
        await asyncio.sleep(0.5)
        assert (await sharded.ask())["step"] == "settling"
        queue = await channel.get_queue(sharded.name, ensure=False)
        message = await got_from(queue)
        assert message.body == b"waits"
    await sharded.reaches(3)


async def test_shards_of_a_cleared_policy_drain_into_one_in_order(
    broker: RealBroker, name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual_load, "PAUSE_S", PAUSE_S)
    definition = {"shards-per-node": 3, "shards-when-gone": "merge", "routing-key": "3"}
    policy = {"pattern": f"^{name}$", "definition": definition, "apply-to": "exchanges"}
    await asyncio.to_thread(ask, broker, "PUT", f"policies/%2F/{name}", policy)
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await channel.declare_exchange(name, "x-consistent-hash", durable=True)
    group = Group(broker, name, request.config.option.seed)
    group.arguments["x-handover-timeout"] = HANDOVER_MS
    publishers = [Publisher(broker, name, f"key-{number}", group.ledger) for number in range(KEYS)]
    await asyncio.sleep(BACKLOG_S)
    await asyncio.to_thread(ask, broker, "DELETE", f"policies/%2F/{name}")
    for _ in range(2):
        await group.join()
    found = await Sharded(broker, name).reaches(1)
    assert all(
        queue["state"] == ("active" if queue["bound"] else "draining") for queue in found["queues"]
    )
    await asyncio.sleep(UNDER_LOAD_S)
    await group.end(publishers)


async def _with_a_stuck_key(sharded: Sharded, wait_s: float, **arguments: Any) -> dict[str, Any]:
    """Change the number of shards while a consumer keeps a message.

    Return the report about the change.
    """
    await sharded.declare("x-consistent-hash", 2, **arguments)
    connection = await aio_pika.connect(sharded.broker.url)
    try:
        channel = await connection.channel(publisher_confirms=True)
        exchange = await channel.get_exchange(sharded.name, ensure=False)
        await exchange.publish(aio_pika.Message(b"stuck"), "key")
        queue = await channel.get_queue(sharded.name, ensure=False)
        got: asyncio.Queue[Any] = asyncio.Queue()
        await queue.consume(got.put)
        await asyncio.wait_for(got.get(), PATIENCE_S)
        await sharded.set(3)
        if wait_s:
            await sharded.settles()
        await asyncio.sleep(wait_s)
        found: dict[str, Any] = await sharded.ask()
        if arguments:
            await sharded.reaches(3)
        return found
    finally:
        try:
            await connection.close()
        except LOST:
            connection.close_callbacks.clear()


async def test_a_plan_says_what_would_move(broker: RealBroker, name: str) -> None:
    sharded = Sharded(broker, name)
    await sharded.declare("x-consistent-hash", 2)
    planned = await sharded.ask("POST", "/plan", {"number": 4})
    assert planned["share_moving"] == 0.5
    assert (planned["shards"], planned["new_shards"], len(planned["coming"]), planned["going"]) == (
        2,
        4,
        2,
        [],
    )
    # nothing has happened
    assert sum(queue["bound"] for queue in (await sharded.ask())["queues"]) == 2
