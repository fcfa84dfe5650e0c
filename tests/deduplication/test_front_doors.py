"""Each message passes once, over all front doors of a broker."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pamqp.commands import Basic, Channel, Confirm, Exchange, Queue, Tx

from tests.support.raw_client import RawClient, method, with_properties
from tests.support.real_broker import RealBroker, wait_until

pytestmark = pytest.mark.broker

ID = "x-deduplication-header"
ONCE = {"x-message-deduplication": True, "x-cache-size": 10_000}
CLIENTS = 6  # on both front doors, all but surely
IDS = 150
ANSWER_S_MAX = 60.0


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    broker = RealBroker(Path(tmp_path_factory.mktemp("doors")) / "data", front_doors=2, shards=2)
    yield broker
    broker.stop()
    broker.clean_up()


@pytest.fixture
def clients(doors: RealBroker) -> Iterator[list[RawClient]]:
    """Channel 1 hears confirms."""
    found = [RawClient(doors.port).shake_hands() for _ in range(CLIENTS)]
    for client in found:
        client.ask(1, Confirm.Select(), Confirm.SelectOk)
    yield found
    for client in found:
        client.sock.close()


def declare(client: RawClient, name: str, **arguments: Any) -> None:
    client.ask(1, Queue.Declare(queue=name, durable=True, arguments=arguments), Queue.DeclareOk)


def exchange(client: RawClient, name: str) -> None:
    client.ask(
        1,
        Exchange.Declare(exchange=name, exchange_type="fanout", arguments=ONCE),
        Exchange.DeclareOk,
    )
    declare(client, name)
    client.ask(1, Queue.Bind(queue=name, exchange=name), Queue.BindOk)


def message(exchange: str, key: str, body: str, id: str | None = None) -> bytes:
    headers = {} if id is None else {ID: id}
    return with_properties(1, exchange, key, body.encode(), headers=headers, delivery_mode=2)


def answers(client: RawClient, count: int) -> Counter[str]:
    """Return how many of `count` publishes are acked and nacked.

    An answer counts for one publish, or with `multiple` for all since the last.
    """
    found: Counter[str] = Counter()
    seen, client_timeout = 0, time.monotonic() + ANSWER_S_MAX
    while sum(found.values()) < count:
        assert time.monotonic() < client_timeout, found
        said = client.read()
        assert said is not None
        frame = said[1]
        assert isinstance(frame, Basic.Ack | Basic.Nack), frame
        tag = int(frame.delivery_tag or 0)
        found["ack" if isinstance(frame, Basic.Ack) else "nack"] += (
            tag - seen if frame.multiple else 1
        )
        seen = max(seen, tag)
    return found


def taken(client: RawClient, queue: str) -> list[str]:
    found = []
    while True:
        client.send(method(1, Basic.Get(queue=queue, no_ack=True)))
        said = client.read()
        assert said is not None
        if not isinstance(said[1], Basic.GetOk):
            return found
        found.append(client.message()[1].decode())


@pytest.mark.row("B1.13")
@pytest.mark.row("C1.12")
@pytest.mark.parametrize("what", ["exchange", "queue"])
def test_each_id_passes_once_whoever_publishes_it_and_all_are_confirmed(
    clients: list[RawClient], name: str, what: str
) -> None:
    if what == "exchange":
        exchange(clients[0], name)
        to = name
    else:
        declare(clients[0], name, **ONCE)
        to = ""
    for at, client in enumerate(clients):  # each in an order of its own, all at once
        ids = [str((n + at * 17) % IDS) for n in range(IDS)]
        client.send(b"".join(message(to, name, id, id) for id in ids))
    for client in clients:
        assert answers(client, IDS) == {"ack": IDS}
    assert Counter(taken(clients[0], name)) == Counter(map(str, range(IDS)))


@pytest.mark.row("B1.13")
def test_what_a_channel_sends_keeps_its_order_while_some_of_it_is_asked_about(
    clients: list[RawClient], name: str
) -> None:
    exchange(clients[0], name)
    client = clients[-1]
    parts = [message(name, "", str(n), str(n) if n % 3 == 0 else None) for n in range(300)]
    client.send(b"".join(parts[:100]))
    client.send(
        b"".join(parts[100:200])
        + message("", name, "by the default exchange")
        + b"".join(parts[200:])
    )
    assert answers(client, 301) == {"ack": 301}
    expected = [str(n) for n in range(300)]
    expected.insert(200, "by the default exchange")
    assert taken(client, name) == expected


@pytest.mark.row("B1.13")
def test_a_mistake_behind_what_is_asked_about_takes_effect_there(
    clients: list[RawClient], name: str
) -> None:
    exchange(clients[0], name)
    client = clients[1]
    bad = message(f"{name}-no-such", "", "x")
    client.send(
        message(name, "", "1", "1") + message(name, "", "2") + bad + message(name, "", "3", "3")
    )
    found = []
    while not found or not isinstance(found[-1], Channel.Close):
        said = client.read()
        assert said is not None
        found.append(said[1])
    assert found[-1].reply_code == 404
    there: list[str] = []  # nothing says when they are: the close is no answer to them

    def two_are_there() -> bool:
        there.extend(taken(clients[0], name))
        return len(there) >= 2

    wait_until(two_are_there, "two messages are there", ANSWER_S_MAX)
    assert there == ["1", "2"]


@pytest.mark.row("B1.13")
def test_a_transaction_counts_when_it_is_committed(
    clients: list[RawClient], doors: RealBroker, name: str
) -> None:
    exchange(clients[0], name)
    holders = [RawClient(doors.port).shake_hands() for _ in range(4)]
    for holder in holders:
        holder.ask(1, Tx.Select(), Tx.SelectOk)
        holder.send(message(name, "", "a", "a") + message(name, "", "b", "b"))
    holders[0].ask(1, Tx.Rollback(), Tx.RollbackOk)
    for holder in holders:
        holder.ask(1, Tx.Commit(), Tx.CommitOk)
        holder.sock.close()
    assert taken(clients[0], name) == ["a", "b"]


@pytest.mark.row("B1.13")
def test_an_exchange_declared_anew_has_seen_nothing(clients: list[RawClient], name: str) -> None:
    for round in range(2):
        exchange(clients[round], name)
        for client in clients:
            client.send(message(name, "", str(round), "a"))
            assert answers(client, 1) == {"ack": 1}
        clients[0].ask(1, Exchange.Delete(exchange=name), Exchange.DeleteOk)
    assert taken(clients[0], name) == ["0", "1"]


@pytest.mark.row("B1.13")
@pytest.mark.parametrize("victim", ["shard", "front-door"])
def test_whatever_dies_no_publish_is_lost_or_unanswered(
    clients: list[RawClient], doors: RealBroker, name: str, victim: str
) -> None:
    """What was remembered may be forgotten: copies may come twice then."""
    exchange(clients[0], name)
    batch = b"".join(message(name, "", str(n), str(n)) for n in range(IDS))
    for client in clients:
        client.send(batch)
    for index in range(2):
        doors.kill(victim, index)
        if victim == "shard":
            for client in clients:
                client.send(batch)
    if victim == "shard":  # a front door takes its connections with it
        for client in clients:
            assert sum(answers(client, 3 * IDS).values()) == 3 * IDS
    again = RawClient(doors.port).shake_hands()
    again.ask(1, Confirm.Select(), Confirm.SelectOk)
    wanted = set(range(IDS))
    give_up = time.monotonic() + ANSWER_S_MAX
    missing = list(map(str, wanted))
    # as a publisher does: again what was not confirmed
    while missing and time.monotonic() < give_up:
        again.send(b"".join(message(name, "", id, id) for id in missing))
        missing = missing if answers(again, len(missing))["nack"] else []
    assert not missing
    assert set(map(int, taken(again, name))) == wanted
    again.sock.close()
