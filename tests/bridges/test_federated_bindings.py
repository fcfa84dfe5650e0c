"""The process of bridges knows the bindings of each federated exchange, and is told them once."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import msgspec
import pytest

from shardmq.broker.controller import federated_bindings
from shardmq.broker.controller.federated_bindings import FederatedBindings
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    AnyChange,
    BindingDelete,
    BindingPut,
    ExchangeDelete,
    ExchangePut,
    QueueDelete,
    QueuePut,
    VhostPut,
)
from shardmq.broker.model.federation import ExchangeLink, Source
from shardmq.broker.shared.bridging import Bindings

HISTORIES = 100
STEPS = 30
VHOSTS, EXCHANGES, QUEUES, KEYS = ("/", "v"), ("x", "y"), ("q", "r"), ("a", "b")


class Process:
    """The process of bridges, which knows what it was told of exchanges that are federated."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], list[str]] = {}
        self.federated: set[tuple[str, str]] = set()
        self.told = 0

    def write(self, text: bytes) -> None:
        told = msgspec.json.decode(text, type=Bindings)
        assert told.bindings is not None
        keys = [each.key for each in told.bindings]
        place = told.vhost, told.exchange
        assert place in self.federated, "it forgets others at once"
        assert self.known.get(place) != keys, "it knows that"
        self.known[place] = keys
        self.told += 1

    async def drain(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False


def link(vhost: str, exchange: str) -> ExchangeLink:
    return ExchangeLink(
        vhost=vhost, exchange=exchange, upstream_exchange=exchange, exchange_type="topic",
        source=Source(upstream="u", policy="p", consumer_tag="t", uris=["amqp://h"]),
    )  # fmt: skip


@pytest.mark.row("J12")
async def test_any_history_is_told_and_nothing_twice(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(federated_bindings, "REST_SHARE", 0)
    monkeypatch.setattr(federated_bindings, "AT_A_TIME", 1)
    for history in range(HISTORIES):
        chance = random.Random(pytestconfig.option.seed + history)
        catalog = Catalog()
        for vhost in VHOSTS:
            catalog.apply(VhostPut(vhost))
            for exchange in EXCHANGES:
                catalog.apply(ExchangePut(vhost, exchange, "topic"))
            for id, queue in enumerate(QUEUES):
                catalog.apply(QueuePut(vhost, queue, id, 0))
        bindings, process = FederatedBindings(catalog), Process()
        telling = asyncio.create_task(bindings.tell(cast(Any, process)))
        federated: list[ExchangeLink] = []
        try:
            for _ in range(STEPS):
                vhost, exchange = chance.choice(VHOSTS), chance.choice(EXCHANGES)
                queue, key = chance.choice(QUEUES), chance.choice(KEYS)
                binding = vhost, exchange, "queue", queue, key
                found = catalog.vhosts[vhost]
                changes: list[AnyChange] = []
                match chance.randrange(6):
                    case 0 | 1 if exchange in found.exchanges and queue in found.queues:
                        changes = [BindingPut(*binding)]
                    case 2 if found.has_binding(BindingDelete(*binding)):
                        changes = [BindingDelete(*binding)]
                    case 3 if chance.random() < 0.3 and queue in found.queues:
                        changes = [QueueDelete(vhost, queue)]
                    case 4 if chance.random() < 0.3 and exchange in found.exchanges:
                        changes = [ExchangeDelete(vhost, exchange)]
                    case 5:
                        federated = [
                            link(vhost, exchange)
                            for vhost in VHOSTS
                            for exchange in EXCHANGES
                            if chance.random() < 0.5
                        ]
                        process.federated = {(each.vhost, each.exchange) for each in federated}
                        process.known = {
                            place: keys
                            for place, keys in process.known.items()
                            if place in process.federated
                        }
                        bindings.federate(federated)
                for change in changes:
                    catalog.apply(change)
                bindings.changed(changes, set(map(type, changes)))
                for _ in range(chance.choice([0, 0, 1, 2, 3, 20])):
                    await asyncio.sleep(0)
            for _ in range(200):
                await asyncio.sleep(0)
            assert not telling.done()
            assert process.known == {
                (each.vhost, each.exchange): sorted(
                    {
                        put.routing_key
                        for put in catalog.vhosts[each.vhost].bindings_from(each.exchange)
                    }
                )
                for each in federated
            }, history
        finally:
            telling.cancel()


@pytest.mark.row("J12")
async def test_others_have_the_processor_while_many_bindings_are_read() -> None:
    catalog, parts = Catalog(), 10
    for change in (VhostPut("/"), ExchangePut("/", "x", "topic"), QueuePut("/", "q", 1, 0)):
        catalog.apply(change)
    keys = [f"{number:05}" for number in range(parts * federated_bindings.AT_A_TIME)]
    for key in reversed(keys):
        catalog.apply(BindingPut("/", "x", "queue", "q", key))
    bindings, process = FederatedBindings(catalog), Process()
    bindings.federate([link("/", "x")])
    process.federated = {("/", "x")}
    telling = asyncio.create_task(bindings.tell(cast(Any, process)))
    try:
        turns = 0
        while not process.told:
            turns += 1
            await asyncio.sleep(0)
    finally:
        telling.cancel()
    assert process.known == {("/", "x"): keys}
    assert turns > 2 * parts
