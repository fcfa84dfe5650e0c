"""The controller finds the links that are asked for, and tells the process of bridges of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from shardmq.broker.controller import bridging, demand
from shardmq.broker.controller.bridging import Bridges
from shardmq.broker.controller.management.resources.federation import restart, row
from shardmq.broker.model import federation
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    CLUSTER_NAME,
    GLOBAL,
    AnyChange,
    BindingPut,
    ExchangeDelete,
    ExchangePut,
    ParameterDelete,
    ParameterPut,
    QueueDelete,
    QueuePut,
    VhostDelete,
    VhostPut,
)
from shardmq.broker.model.federation import UPSTREAM, UPSTREAM_SET, ExchangeLink, QueueLink
from shardmq.broker.model.shovels import PAUSED, SHOVEL, Shovel
from shardmq.broker.shared.bridging import (
    RUNNING,
    STARTING,
    TERMINATED,
    BridgeState,
    Key,
    Pull,
    Run,
    Told,
    key_of,
)


def federated(catalog: Catalog, vhost: str, *upstreams: str) -> None:
    """Make a vhost whose queues are all federated from these upstreams."""
    policy = {"pattern": "", "definition": {UPSTREAM_SET: "all"}, "apply-to": "queues"}
    catalog.apply(VhostPut(vhost))
    catalog.apply(ParameterPut(vhost, "policy", "p", policy))
    for name in upstreams:
        catalog.apply(ParameterPut(vhost, UPSTREAM, name, {"uri": "amqp://h"}))


def bridges_of(catalog: Catalog) -> Bridges:
    return Bridges(cast(Any, SimpleNamespace(catalog=catalog)), str, cast(Any, None))


def listed(bridges: Bridges) -> list[tuple[str, str, str]]:
    return [(link.vhost, link.queue, state.state) for link, state in bridges.links()]


@pytest.mark.row("J11")
async def test_no_more_links_are_made_than_run_and_one_says_that_there_are_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bridging, "LINKS_MAX", 2)
    catalog = Catalog()
    federated(catalog, "v", "u")
    made = []
    link_of = federation._queue_link
    monkeypatch.setattr(
        federation, "_queue_link", lambda *given: made.append(given[0].name) or link_of(*given)
    )
    for id, name in enumerate("abcd", 1):
        catalog.apply(QueuePut("v", name, id, 0))
    bridges = bridges_of(catalog)
    assert len(await bridges._orders()) == 2
    assert made == ["a", "b", "c"]
    assert listed(bridges) == [("v", "a", STARTING), ("v", "b", STARTING), ("v", "c", TERMINATED)]
    assert "more than 2 links" in bridges.links()[-1][1].error
    federated(catalog, "before", "u")
    catalog.apply(QueuePut("before", "q", 5, 0))
    bridges.changed([ParameterPut("before", UPSTREAM, "u", {})])
    assert len(await bridges._orders()) == 2
    assert listed(bridges)[1:] == [("v", "a", STARTING), ("v", "b", TERMINATED)], "b ran before"
    for name in "ab":
        catalog.apply(QueueDelete("v", name))
    catalog.apply(QueueDelete("v", "c"))
    bridges.changed([ParameterPut("v", UPSTREAM, "u", {})])
    await bridges._orders()
    assert listed(bridges) == [("before", "q", STARTING), ("v", "d", STARTING)]


@pytest.mark.row("J11")
def test_others_get_the_processor_while_many_upstreams_make_links_of_one_queue() -> None:
    catalog = Catalog()
    federated(catalog, "v", *map(str, range(250)))
    catalog.apply(QueuePut("v", "q", 1, 0))
    found = list(federation.walk(catalog))
    pauses = [at for at, link in enumerate(found) if link is None]
    longest = max(
        after - before for before, after in zip([0, *pauses], [*pauses, len(found)], strict=True)
    )
    assert len(found) - len(pauses) == 250
    assert longest <= federation.STEPS_AT_A_TIME + 1


@pytest.mark.row("J5", "J11")
async def test_bridges_whose_uris_no_key_decrypts_do_not_run_and_say_why() -> None:
    catalog = Catalog()
    federated(catalog, "v", "u", "sealed")
    both = {"pattern": "^[qe]$", "definition": {UPSTREAM_SET: "all"}, "apply-to": "all"}
    catalog.apply(ParameterPut("v", "policy", "p", both))
    catalog.apply(QueuePut("v", "q", 1, 0))
    catalog.apply(ExchangePut("v", "e", "topic"))
    sealed = "encrypted:gAAAA"
    catalog.apply(ParameterPut("v", UPSTREAM, "sealed", {"uri": ["amqp://h", sealed]}))
    value = {"src-uri": "amqp://", "src-queue": "q", "dest-uri": sealed, "dest-queue": "r"}
    for name, dest in (("s", "amqp://h"), ("sealed", sealed)):
        catalog.apply(ParameterPut("v", SHOVEL, name, value | {"dest-uri": dest}))
    bridges = bridges_of(catalog)
    bridged = [order.bridge for order in await bridges._orders()]
    assert [each.name for each in bridged if isinstance(each, Shovel)] == ["s"]
    links = [each for each in bridged if isinstance(each, QueueLink | ExchangeLink)]
    assert sorted(bool(link.source.obstacle) for link in links) == [False, False, True, True]
    assert len(bridges._queue_links) == 1
    states = {(type(link).__name__, link.source.upstream): state for link, state in bridges.links()}
    assert len(states) == 4
    for (_, upstream), state in states.items():
        assert state.state == (TERMINATED if upstream == "sealed" else STARTING)
        assert ("no key for it" in state.error) == (upstream == "sealed")
    shown = [row(link, state, "n") for link, state in bridges.links()]
    assert sealed not in repr(shown)
    assert {each["uri"] for each in shown if each["upstream"] == "sealed"} == {""}
    found = {put.name: bridges.state(put) for put in bridges.parameters()}
    assert (found["s"].state, found["sealed"].state) == (STARTING, TERMINATED)
    assert "no key for it" in found["sealed"].error
    # The URI is set anew.
    catalog.apply(ParameterPut("v", UPSTREAM, "sealed", {"uri": "amqp://other"}))
    catalog.apply(ParameterPut("v", SHOVEL, "sealed", value | {"dest-uri": "amqp://h"}))
    bridges.changed([ParameterPut("v", UPSTREAM, "sealed", {})])
    assert len(await bridges._orders()) == 6


class Process:
    """The process of bridges, which notes what it is told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[Run | Pull] = asyncio.Queue()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while text := await reader.readline():
                self.told.put_nowait(msgspec.json.decode(text, type=Run | Pull))

    async def hears(self, kind: type[Run | Pull]) -> Any:
        """Return what it is told next of this kind."""
        while True:
            told = await asyncio.wait_for(self.told.get(), 30)
            if isinstance(told, kind):
                return told


@pytest.mark.row("J11")
async def test_a_fault_while_shards_are_asked_makes_a_new_call_and_a_run_is_told_with_a_pull(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(demand, "ASK_S", 0.001)
    monkeypatch.setattr(bridging, "AGAIN_S", 0.001)
    catalog = Catalog()
    federated(catalog, "v", "u")
    catalog.apply(QueuePut("v", "q", 1, 0))
    bridges = Bridges(
        cast(Any, SimpleNamespace(catalog=catalog)), lambda: str(tmp_path), cast(Any, None)
    )
    process = Process()
    faults = ["once"]

    async def pulling(links: Iterable[QueueLink]) -> list[Key]:
        if faults:
            raise RuntimeError(faults.pop())
        return [key_of(link) for link in links]

    monkeypatch.setattr(bridges._demand, "pulling", pulling)
    server = await asyncio.start_unix_server(process.talk, tmp_path / bridging.SOCKET_NAME)
    running = asyncio.create_task(bridges.run())
    try:
        first = await process.hears(Pull)
        assert len(first.keys) == 1 and "RuntimeError: once" in caplog.text
        catalog.apply(ParameterPut("v", UPSTREAM, "u", {"uri": "amqp://other"}))
        bridges.changed([ParameterPut("v", UPSTREAM, "u", {})])
        assert (await process.hears(Run)).bridges[0].life == 1
        assert await process.hears(Pull) == first
    finally:
        running.cancel()
        server.close()


@pytest.mark.row("J11")
async def test_the_process_hears_that_nothing_is_to_run_before_the_call_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    catalog = Catalog()
    federated(catalog, "v", "u")
    catalog.apply(QueuePut("v", "q", 1, 0))
    bridges = Bridges(
        cast(Any, SimpleNamespace(catalog=catalog)), lambda: str(tmp_path), cast(Any, None)
    )

    async def pulling(links: Iterable[QueueLink]) -> list[Key]:
        return []

    monkeypatch.setattr(bridges._demand, "pulling", pulling)
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while text := await reader.readline():
            told = msgspec.json.decode(text, type=Run | Pull)
            if isinstance(told, Run) and told.bridges:
                catalog.apply(QueueDelete("v", "q"))
                bridges.changed([ParameterPut("v", UPSTREAM, "u", {})])
        with contextlib.closing(writer):  # the controller still listens
            writer.write(bridging.bridging.line(Told([])))
            await writer.drain()
            ended.set_result(len(told.bridges) if isinstance(told, Run) else -1)

    server = await asyncio.start_unix_server(talk, tmp_path / bridging.SOCKET_NAME)
    running = asyncio.create_task(bridges.run())
    try:
        assert await asyncio.wait_for(ended, 30) == 0, "the last word"
    finally:
        running.cancel()
        server.close()


@pytest.mark.row("J11")
async def test_links_whose_ids_are_equal_all_run_and_are_started_anew_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(QueueLink, "id", "0badcafe")
    catalog = Catalog()
    federated(catalog, "v", "u")
    for id, name in enumerate("ab", 1):
        catalog.apply(QueuePut("v", name, id, 0))
    bridges = bridges_of(catalog)
    assert [order.life for order in await bridges._orders()] == [0, 0]
    call = SimpleNamespace(
        vhost_to_change=lambda: SimpleNamespace(name="v"),
        part=lambda name: "0badcafe",
        context=SimpleNamespace(bridges=bridges),
    )
    await restart(cast(Any, call))
    assert [order.life for order in await bridges._orders()] == [1, 1]


async def test_links_are_looked_for_after_changes_that_matter_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    catalog = Catalog()
    federated(catalog, "v", "u")
    catalog.apply(VhostPut("other"))
    looks = []
    walk = bridging.walk
    monkeypatch.setattr(bridging, "walk", lambda catalog: looks.append(1) or walk(catalog))
    bridges = bridges_of(catalog)
    await bridges._orders()
    federates = {"pattern": "", "definition": {UPSTREAM: "u"}}
    limits = {"pattern": "", "definition": {"max-length": 1}}

    async def found(*changes: AnyChange) -> tuple[bool, bool]:
        """Return whether the bridges are told anew at once, and links are looked for."""
        looks.clear()
        bridges._wake.clear()
        bridges.changed(list(changes))
        if bridges._later is not None:
            while not bridges._wake.is_set():
                await asyncio.sleep(0)
        wakes = bridges._wake.is_set()
        await bridges._orders()
        return wakes, bool(looks)

    monkeypatch.setattr(bridging, "REST_SHARE", 0)
    await found(ParameterPut("v", UPSTREAM, "u", {}))
    assert [
        await found(ParameterPut("other", "policy", "p", limits)),
        await found(ParameterDelete("other", "policy", "p")),
        await found(ParameterPut("v", "vhost-limits", "limits", {})),
        await found(ParameterPut("", GLOBAL, "any", 1)),
        await found(QueuePut("other", "q", 1, 0)),
        await found(BindingPut("v", "e", "queue", "q", "")),
    ] == [(False, False)] * 6
    assert [
        await found(ParameterPut("other", SHOVEL, "s", {})),
        await found(ParameterDelete("other", PAUSED, "s")),
        await found(ParameterPut("", GLOBAL, CLUSTER_NAME, "c")),
        await found(VhostDelete("other")),
    ] == [(True, False)] * 4
    assert [
        await found(ParameterPut("v", "policy", "p", limits)),
        await found(ParameterPut("other", "policy", "p", federates)),
        await found(ParameterDelete("v", "policy", "p")),
        await found(ParameterDelete("other", UPSTREAM_SET, "s")),
        await found(ParameterPut("other", UPSTREAM, "u", {})),
        await found(QueuePut("v", "q", 1, 0)),
        await found(QueueDelete("v", "q")),
        await found(ExchangeDelete("v", "e")),
        await found(VhostDelete("v")),
    ] == [(True, True)] * 9


@pytest.mark.row("J11")
async def test_a_link_that_runs_shows_its_connection_and_why_the_broker_takes_nothing() -> None:
    catalog = Catalog()
    federated(catalog, "v", "u")
    catalog.apply(QueuePut("v", "q", 1, 0))
    bridges = bridges_of(catalog)
    [order] = await bridges._orders()
    key = key_of(order.bridge)
    shown = []
    for word in (RUNNING, STARTING):
        bridges._states[key] = BridgeState(
            key=key, life=0, state=word, blocked="low on disk", local_connection="<door.1>"
        )
        [(link, state)] = bridges.links()
        found = row(link, state, "node")
        shown.append((found["blocked"], found.get("local_connection")))
    assert shown == [("low on disk", "<door.1>"), ("", None)]


async def test_upstreams_with_faults_are_named_when_the_controller_starts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    catalog = Catalog()
    federated(catalog, "v", "good")
    catalog.apply(ParameterPut("v", UPSTREAM, "bad", {"uri": "http://me:secret@h"}))
    catalog.apply(ParameterPut("v", UPSTREAM_SET, "set", {}))
    bridges_of(catalog)._log_faults()
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(" makes no links: ")[0] for line in said] == [
        "federation-upstream 'bad' in vhost 'v'", "federation-upstream-set 'set' in vhost 'v'",
    ]  # fmt: skip
    assert "secret" not in caplog.text
