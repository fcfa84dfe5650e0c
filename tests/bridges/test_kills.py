"""On-confirm loses nothing, whatever process of either broker is killed while messages move.

Shovels push messages to the second broker, and links of federation pull them to the second one.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from itertools import count

import pika.exceptions
import pytest

from tests.bridges.moving import (
    bind,
    call,
    connected,
    delete_shovel,
    federate,
    federate_exchange,
    fill,
    set_shovel,
    uri,
    wait_for_keys,
)
from tests.support.real_broker import PATIENCE_S, RealBroker, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.crash]

MESSAGES = 4000
PREFETCH = 50
SOURCE, DESTINATION = 0, 1
# The broker and the process that dies; "" for all processes of the broker, which is started again.
USUAL_VICTIMS = [
    (SOURCE, "bridges"), (SOURCE, "shard"), (DESTINATION, "front-door"), (DESTINATION, ""),
]  # fmt: skip
VICTIMS = [
    *USUAL_VICTIMS, (SOURCE, "controller"), (SOURCE, "front-door"), (SOURCE, ""),
    (DESTINATION, "shard"),
]  # fmt: skip
Brokers = tuple[RealBroker, RealBroker]
_numbers = count()


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    """Return the broker that has the shovel and the source, and the one of the destination."""
    made = [RealBroker(tmp_path_factory.mktemp(name) / "data", shards=1) for name in ("from", "to")]
    yield made[0], made[1]
    for broker in made:
        broker.stop()


def waiting(broker: RealBroker, queue: str) -> int:
    """Return how many messages are in a queue, 0 while the broker cannot tell."""
    try:
        with connected(broker) as connection:
            declared = connection.channel().queue_declare(queue, durable=True)
            return int(declared.method.message_count)
    except (pika.exceptions.AMQPError, OSError):
        return 0


def arrived(broker: RealBroker, queue: str, wanted: set[bytes]) -> set[bytes]:
    """Take messages out of a queue until all that are wanted came, or for PATIENCE_S."""
    found: set[bytes] = set()
    end = time.monotonic() + PATIENCE_S
    while not wanted <= found and time.monotonic() < end:
        try:
            with connected(broker) as connection:
                channel = connection.channel()
                channel.queue_declare(queue, durable=True)
                for method, _, body in channel.consume(queue, inactivity_timeout=1.0):
                    if method is not None:
                        found.add(body)
                        channel.basic_ack(method.delivery_tag)
                    if wanted <= found or time.monotonic() > end:
                        break
        except (pika.exceptions.AMQPError, OSError):
            continue
    return found


def play_round(brokers: Brokers, victim: tuple[int, str], after: int, ack_mode: str) -> set[bytes]:
    """Kill a process when about `after` messages have moved; return what never arrived."""
    source, destination = brokers
    name = f"round-{next(_numbers)}"
    bodies = [b"%d" % number for number in range(MESSAGES)]
    fill(source, name, bodies)
    set_shovel(
        source, name, src_queue=name, dest_uri=uri(destination), dest_queue=name,
        src_prefetch_count=PREFETCH, ack_mode=ack_mode,
    )  # fmt: skip
    wait_until(lambda: waiting(destination, name) >= after, "messages move")
    dies, kind = brokers[victim[0]], victim[1]
    if kind:
        dies.kill(kind)
    else:
        dies.kill_all()
        dies.start()
    missing = set(bodies) - arrived(destination, name, set(bodies))
    wait_until(lambda: waiting(source, name) == 0, "the source is empty")
    delete_shovel(source, name)
    return missing


@pytest.mark.row("J8")
@pytest.mark.parametrize("victim", USUAL_VICTIMS)
def test_no_message_is_lost(brokers: Brokers, victim: tuple[int, str]) -> None:
    missing = play_round(brokers, victim, 200, "on-confirm")
    assert not missing, f"{len(missing)} lost, such as {sorted(missing)[:5]}"


# The broker and the process that dies while a link moves messages; the destination has the link.
VICTIMS_OF_LINKS = [
    (DESTINATION, "bridges"), (SOURCE, ""),
    *(pytest.param((DESTINATION, kind), marks=pytest.mark.torture)
      for kind in ("controller", "front-door", "shard")),
]  # fmt: skip


@pytest.mark.row("J11")
@pytest.mark.parametrize("victim", VICTIMS_OF_LINKS)
def test_no_message_of_a_federated_queue_is_lost(brokers: Brokers, victim: tuple[int, str]) -> None:
    source, destination = brokers
    name = f"link-{next(_numbers)}"
    wanted = {b"%d" % number for number in range(MESSAGES)}
    fill(source, name, sorted(wanted))
    fill(destination, name, [])
    federate(destination, name, uri=uri(source), prefetch_count=PREFETCH)
    found: set[bytes] = set()
    connection = connected(destination)
    try:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=PREFETCH)
        for method, _, body in channel.consume(name, inactivity_timeout=PATIENCE_S):
            assert method is not None, "messages move"
            found.add(body)
            channel.basic_ack(method.delivery_tag)
            if len(found) == 200:
                break
        dies, kind = brokers[victim[0]], victim[1]
        if kind:
            dies.kill(kind)
        else:
            dies.kill_all()
            dies.start()
    finally:
        with contextlib.suppress(pika.exceptions.AMQPError, OSError):
            connection.close()
    found |= arrived(destination, name, wanted - found)
    missing = wanted - found
    assert not missing, f"{len(missing)} lost, such as {sorted(missing)[:5]}"
    for path in (f"policies/%2F/{name}", f"parameters/federation-upstream/%2F/{name}"):
        assert call(destination, "DELETE", path)[0] == 204


# The same for a link of exchanges.
VICTIMS_OF_EXCHANGES = [
    (DESTINATION, "bridges"),
    *(pytest.param((DESTINATION, kind), marks=pytest.mark.torture)
      for kind in ("controller", "front-door", "shard", "")),
    pytest.param((SOURCE, "shard"), marks=pytest.mark.torture),
    pytest.param((SOURCE, ""), marks=pytest.mark.torture),
]  # fmt: skip


@pytest.mark.row("J12", "P2")
@pytest.mark.parametrize("victim", VICTIMS_OF_EXCHANGES)
def test_no_message_of_a_federated_exchange_is_lost(
    brokers: Brokers, victim: tuple[int, str]
) -> None:
    """Messages are published before and behind the death, because bindings must outlive it."""
    source, destination = brokers
    for number, broker in enumerate(brokers):
        call(broker, "PUT", "cluster-name", {"name": f"broker-{number}"})
    name = f"exchange-{next(_numbers)}"
    federate_exchange(destination, "/", name, uri=uri(source), prefetch_count=PREFETCH)
    bind(destination, "/", name, name, "k.#")
    wait_for_keys(source, "/", name, {"k.#"})
    first, then = ([b"%d" % number for number in range(MESSAGES)][part::2] for part in (0, 1))
    publish_all(source, name, first)
    wait_until(lambda: waiting(destination, name) >= 200, "messages move")
    dies, kind = brokers[victim[0]], victim[1]
    if kind:
        dies.kill(kind)
    else:
        dies.kill_all()
        dies.start()
    publish_all(source, name, then)
    wanted = {*first, *then}
    missing = wanted - arrived(destination, name, wanted)
    assert not missing, f"{len(missing)} lost, such as {sorted(missing)[:5]}"
    for path in (f"policies/%2F/{name}", f"parameters/federation-upstream/%2F/{name}"):
        assert call(destination, "DELETE", path)[0] == 204


def publish_all(broker: RealBroker, exchange: str, bodies: list[bytes]) -> None:
    """Publish persistent messages, again and again until one transaction has all of them."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            with connected(broker) as connection:
                channel = connection.channel()
                channel.tx_select()
                given = pika.BasicProperties(delivery_mode=2)
                for body in bodies:
                    channel.basic_publish(exchange, "k.x", body, given)
                channel.tx_commit()
            return
        except (pika.exceptions.AMQPError, OSError):
            if time.monotonic() > end:
                raise


@pytest.mark.torture
def test_rounds_of_kills_lose_nothing(brokers: Brokers, pytestconfig: pytest.Config) -> None:
    chance = random.Random(pytestconfig.option.seed)
    for played in range(pytestconfig.option.rounds):
        victim, after = chance.choice(VICTIMS), chance.randrange(1, MESSAGES // 2)
        missing = play_round(brokers, victim, after, "on-confirm")
        assert not missing, (played, pytestconfig.option.seed, victim, after, len(missing))
