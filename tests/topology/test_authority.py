"""The authority keeps order and makes one sync for many changes.

It answers when a change is in force, and has RabbitMQ's refusals.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import example, given
from hypothesis import strategies as st

from shardmq.broker.controller import authority
from shardmq.broker.controller.access import hash_new_password
from shardmq.broker.controller.authority import Authority
from shardmq.broker.controller.peers.presence import Presence
from shardmq.broker.controller.requests import Drained, Restore
from shardmq.broker.controller.stored.definitions import Definitions
from shardmq.broker.controller.stored.room import GrowingLog
from shardmq.broker.model import passwords
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    ParameterDelete,
    ParameterPut,
    PermissionPut,
    ShardOf,
    TopicPermissionPut,
    UserDelete,
    UserPut,
    VhostDelete,
    VhostPut,
)
from shardmq.broker.model.passwords import DEFAULT_ALGORITHM
from shardmq.broker.routing.placement import Placement
from shardmq.broker.shared.control import (
    Answer,
    Bind,
    BindMany,
    ExchangeDeclare,
    ExchangeRemove,
    QueueDeclare,
    QueueRemove,
    Unbind,
)
from shardmq.shardd.store.files import OsFiles
from shardmq.shardd.wire import messages as wire
from tests.support.catalogs import state
from tests.support.fake_controller_peers import FakeShards
from tests.support.fake_doors import FakeDoors

ME, YOU = "0.1.1", "0.1.2"
NEVER_S = 3600.0


class CountingDefinitions(Definitions):
    """Definitions that count their syncs, each of which takes `sync_s` seconds longer."""

    syncs = 0
    sync_s = 0.0

    def sync_job(self, catalog: Catalog) -> Any:
        job = super().sync_job(catalog)
        if job is None:
            return None
        self.syncs += 1

        def sync() -> None:
            time.sleep(self.sync_s)
            job()

        return sync


class World:
    def __init__(self, directory: Path) -> None:
        self.definitions = CountingDefinitions(directory, "boot")
        self.catalog = self.definitions.load()
        put = VhostPut("/")
        self.definitions.add(put, self.catalog)
        self.catalog.apply(put)
        self.doors, self.shards, self.presence = FakeDoors(self.catalog), FakeShards(), Presence()
        self.authority = Authority(
            self.catalog,
            self.definitions,
            self.doors,
            self.shards,
            self.presence,
            Placement([0]),
        )

    async def ask(self, request: Any, owner: str = ME) -> Answer:
        return await asyncio.wait_for(self.authority.ask(request, owner), 60)

    def agree(self) -> bool:
        return state(self.doors.copy) == state(self.catalog)


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    task = asyncio.create_task(world.authority.run())
    yield world
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    world.definitions.close()


def declare(name: str = "q", **other: Any) -> QueueDeclare:
    fields: dict[str, Any] = {
        "durable": True,
        "auto_delete": False,
        "exclusive": False,
        "arguments": {},
    } | other
    return QueueDeclare("/", name, **fields)


def exchange(name: str, type: str = "topic", **other: Any) -> ExchangeDeclare:
    fields: dict[str, Any] = {
        "durable": True,
        "auto_delete": False,
        "internal": False,
        "arguments": {},
    } | other
    return ExchangeDeclare("/", name, type, **fields)


async def turn() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("what", ["removal", "answer"])
async def test_a_request_whose_end_fails_is_answered_and_no_other_one_fails(
    world: World, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    await world.ask(declare("bad"))
    await world.ask(declare("good"))
    remove, answers = world.authority._orders.remove, dict[str, list[int]]()
    answered = asyncio.Event()

    def removes(pending: Any) -> None:
        if what == "removal" and pending.request.name == "bad":
            raise RuntimeError("a fault of ours")
        remove(pending)

    def answer(name: str, code: int, text: str, result: dict[str, Any]) -> None:
        answers.setdefault(name, []).append(code)
        answered.set()
        if (what, name, code) == ("answer", "bad", 0):
            raise RuntimeError("a fault of ours")

    monkeypatch.setattr(world.authority._orders, "remove", removes)
    for name in ("good", "bad", "other"):
        request = declare(name) if name == "other" else QueueRemove("/", name, False, False)
        world.authority.submit(request, "", partial(answer, name))  # all in one batch
    async with asyncio.timeout(60):
        while sum(map(len, answers.values())) < 3 + (what == "answer"):
            await answered.wait()
            answered.clear()
    faults = [541] if what == "removal" else [0, 541]
    assert answers == {"good": [0], "bad": faults, "other": [0]}
    assert (await world.ask(declare("more"))).code == 0


async def test_a_declared_queue_is_at_its_shard_and_at_the_door(world: World) -> None:
    answer = await world.ask(declare())
    assert answer == Answer(0, result={"name": "q", "messages": 0, "consumers": 0})
    assert world.doors.copy.queue("/", "q") is not None
    assert [spec.name for spec in world.shards.queues.values()] == ["q"]


async def test_the_next_controller_knows_the_id_of_each_queue_that_a_shard_was_told_of(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if this one is killed before it has synced anything or answered."""
    request, told, known = world.shards.request, list[int](), list[int]()

    def asked(shard: int, message: Any, *more: Any) -> Any:
        if isinstance(creation := message(0), wire.CreateQueues):
            told.append(max(spec.id for spec in creation.queues))
            following = Definitions(tmp_path, "boot")
            following.read()
            known.append(following.last_queue_id)
        return request(shard, message, *more)

    monkeypatch.setattr(world.shards, "request", asked)
    # The second declare of a name is asked of the shard at once, behind the creation.
    declares = [declare(), declare(), declare("r", durable=False)]
    await asyncio.gather(*map(world.ask, declares))
    assert told == [1, 2]
    assert all(last >= id for id, last in zip(told, known, strict=True))


async def test_a_batch_looks_once_whether_the_disk_is_full(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is written in parts, for the shards that are asked about its new queues."""
    looks, has_room, written = list[str](), OsFiles.has_room, list[int]()

    def look(files: OsFiles, path: str, size: int) -> bool:
        looks.append(path)
        return has_room(files, path, size)

    def append(data: bytes) -> None:
        written.append(len(data))
        GrowingLog.append(world.definitions._log, data)

    monkeypatch.setattr(OsFiles, "has_room", look)
    monkeypatch.setattr(world.definitions._log, "append", append)
    # The second declare of each name is asked of the shard at once, behind the creation.
    await asyncio.gather(*(world.ask(declare(name)) for name in "ppqqrr"))
    assert len(written) == 3 and len(looks) == 1
    await world.ask(declare("s"))
    assert len(looks) == 2


async def test_redeclare_answers_with_the_shards_counts(world: World) -> None:
    await world.ask(declare())
    assert (await world.ask(declare(), YOU)).result == {"name": "q", "messages": 7, "consumers": 2}
    refused = await world.ask(declare(durable=False))
    assert (refused.code, refused.text) == (
        406,
        "inequivalent arg 'durable' for queue 'q' in vhost '/': received 'false' but current is "
        "'true'",
    )


async def test_no_answer_before_every_door_has_applied(world: World) -> None:
    world.doors.hold = True
    asking = asyncio.create_task(world.ask(declare()))
    while not world.doors.told:
        await asyncio.sleep(0)
    await turn()
    assert not asking.done()
    world.doors.apply_all()
    assert (await asking).code == 0


async def test_no_answer_to_a_declare_of_a_stream_exchange_before_its_shards_are_there(
    world: World,
) -> None:
    world.shards.hold = True
    asking = asyncio.create_task(world.ask(exchange("e", "x-random", arguments={"x-shards": 5})))
    while not world.doors.told:
        await asyncio.sleep(0)
    await turn()
    assert not asking.done()
    # where publishes wait for their shard
    assert len(world.doors.copy.vhosts["/"].shard_queues("e")) == 5
    world.shards.release()
    assert (await asking).code == 0
    assert len(world.shards.queues) == 5
    assert world.agree()


async def test_a_policy_makes_and_ends_shard_queues_at_their_shards(world: World) -> None:
    await world.ask(exchange("e", "x-random"))
    value = {"pattern": "^e$", "definition": {"shards-per-node": 3, "shards-when-gone": "delete"}}
    assert (await world.ask(ParameterPut("/", "policy", "p", value))).code == 0
    assert len(world.shards.queues) == 3
    assert world.agree()
    assert (await world.ask(ParameterDelete("/", "policy", "p"))).code == 0
    assert not world.shards.queues
    assert not world.catalog.vhosts["/"].queues
    assert world.agree()


async def test_a_shard_queue_that_is_wanted_again_while_it_goes_is_made_anew(world: World) -> None:
    await world.ask(exchange("e", "x-modulus-hash"))

    async def shards_per_node(number: int) -> None:
        value = {"pattern": "^e$", "definition": {"shards-per-node": number}}
        assert (await world.ask(ParameterPut("/", "policy", "p", value))).code == 0

    await shards_per_node(2)
    await shards_per_node(1)
    going = world.catalog.vhosts["/"].parts("e")[1]
    world.shards.hold = True
    goes = asyncio.create_task(world.ask(Drained(going.id), ""))
    await turn()
    await shards_per_node(2)
    assert not [
        b for b in world.doors.copy.vhosts["/"].bindings_from("e") if b.destination == going.name
    ]
    world.shards.hold = False
    world.shards.release()
    assert (await goes).code == 0
    await world.ask(Restore("/", "e"), "")
    new = world.catalog.vhosts["/"].parts("e")[1]
    assert (new.name, new.part) == (going.name, ShardOf("e", 1, ""))
    assert new.id != going.id
    assert new.id in world.shards.queues
    assert going.id not in world.shards.queues
    assert world.agree()


async def test_a_shard_queue_that_is_wanted_again_does_not_go(world: World) -> None:
    await world.ask(exchange("e", "x-modulus-hash", arguments={"x-shards": 2}))
    active = world.catalog.vhosts["/"].parts("e")[1]
    assert (await world.ask(Drained(active.id), "")).code == 0
    assert world.catalog.queue_by_id(active.id) is active


async def test_no_answer_to_a_bind_before_its_queue_is_at_its_shard(world: World) -> None:
    world.shards.hold = True
    asking = [
        asyncio.create_task(world.ask(declare())),
        asyncio.create_task(world.ask(Bind("/", "amq.topic", "queue", "q", "k", {}))),
        asyncio.create_task(world.ask(declare(), YOU)),
    ]
    while not world.doors.told:
        await asyncio.sleep(0)
    await turn()
    assert not any(task.done() for task in asking)
    world.shards.release()
    assert [(await task).code for task in asking] == [0, 0, 0]


async def test_pipelined_requests_share_one_sync_and_one_message(world: World) -> None:
    before = world.definitions.syncs
    asks = [world.ask(declare(f"q{n}")) for n in range(300)]
    asks += [world.ask(Bind("/", "amq.topic", "queue", f"q{n}", "k", {})) for n in range(300)]
    answers = await asyncio.gather(*asks)
    assert all(answer.code == 0 for answer in answers)
    assert world.definitions.syncs - before <= 2
    assert len(world.doors.told) <= 2
    assert world.agree()


async def test_many_binds_are_one_request_that_ends_at_the_first_that_is_refused(
    world: World,
) -> None:
    await world.ask(declare())
    before = len(world.doors.told)
    binds = [("amq.topic", "q", str(n)) for n in range(200)]
    assert await world.ask(BindMany("/", binds)) == Answer(0)
    assert len(world.doors.told) == before + 1
    refused = await world.ask(
        BindMany("/", [("amq.direct", "q", "a"), ("no", "q", "b"), ("amq.direct", "q", "c")])
    )
    assert refused == Answer(0, 404, "no exchange 'no' in vhost '/'", {"done": 1})
    bound = {binding.routing_key for binding in world.catalog.vhosts["/"].bindings_to("queue", "q")}
    assert bound == {str(n) for n in range(200)} | {"a"}
    assert world.agree()


def bind_in_force(world: World, key: str, seen: list[tuple[int, int]]) -> None:
    """Submit a bind that a front door has answered; `seen` gets the code and the batches told."""
    world.authority.submit(
        BindMany("/", [("amq.topic", "q", key)], True),
        ME,
        lambda code, text, result: seen.append((code, len(world.doors.told))),
    )


async def test_binds_in_force_at_the_door_share_a_batch_and_are_answered_before_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authority, "IN_FORCE_WAITS_S", NEVER_S)
    await world.ask(declare(durable=False))
    before, seen = len(world.doors.told), list[tuple[int, int]]()
    for key in "abc":
        bind_in_force(world, key, seen)
        await turn()
    assert seen == []
    await world.authority.caught_up()
    assert seen == [(0, before)] * 3
    await turn()
    assert len(world.doors.told) == before + 1
    assert world.agree()


async def test_what_front_doors_have_told_of_is_taken_in_by_who_catches_up(world: World) -> None:
    await world.ask(declare(durable=False))
    seen = list[tuple[int, int]]()
    world.doors.read_binds = lambda: bind_in_force(world, "a", seen)  # type: ignore[method-assign]
    await world.authority.caught_up()
    assert [b.routing_key for b in world.catalog.vhosts["/"].bindings_to("queue", "q")] == ["a"]


async def test_who_waits_for_an_answer_does_not_wait_for_binds_in_force(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.ask(declare(durable=False))
    before, seen = len(world.doors.told), list[tuple[int, int]]()
    with monkeypatch.context() as patch:
        patch.setattr(authority, "IN_FORCE_WAITS_S", NEVER_S)
        bind_in_force(world, "a", seen)
        assert await world.ask(Bind("/", "amq.topic", "queue", "q", "b", {})) == Answer(0)
    assert seen == [(0, before)]
    assert len(world.doors.told) == before + 1
    bind_in_force(world, "c", seen)
    async with asyncio.timeout(10):  # nobody asks
        while len(seen) < 2:
            await asyncio.sleep(authority.IN_FORCE_WAITS_S)
    assert len(seen) == 2


async def test_changes_are_of_binds_in_force_only_if_nothing_else_changed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authority, "IN_FORCE_WAITS_S", NEVER_S)
    await world.ask(declare(durable=False))
    seen = list[tuple[int, int]]()
    for key in "ab":
        bind_in_force(world, key, seen)
    await world.authority.caught_up()
    await turn()
    assert world.doors.told_by[-1] == {ME} and len(world.doors.told[-1]) == 2
    bind_in_force(world, "c", seen)
    await world.ask(Bind("/", "amq.topic", "queue", "q", "d", {}))
    assert world.doors.told_by[-1] == set() and len(world.doors.told[-1]) == 2
    bind_in_force(world, "e", seen)
    many = BindMany("/", [("amq.topic", "q", "f"), ("amq.topic", "gone", "f")], True)
    world.authority.submit(many, ME, lambda code, text, result: seen.append((code, 0)))
    await world.authority.caught_up()
    await turn()
    assert seen[-1] == (404, 0)
    assert world.doors.told_by[-1] == set() and len(world.doors.told[-1]) == 2


async def test_a_bind_in_force_is_kept_without_room_and_refused_without_its_queue(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.ask(declare(durable=False))
    monkeypatch.setattr(world.definitions, "lacks_room", lambda changes, grows=True: "full")
    seen = list[tuple[int, int]]()
    bind_in_force(world, "a", seen)
    await world.authority.caught_up()
    await turn()
    assert world.agree()
    assert [b.routing_key for b in world.catalog.vhosts["/"].bindings_to("queue", "q")] == ["a"]
    await world.ask(QueueRemove("/", "q", False, False))
    bind_in_force(world, "a", seen)
    await world.authority.caught_up()
    assert [code for code, _ in seen] == [0, 404]


def bind_waited(world: World, keys: str, seen: list[tuple[int, str, dict[str, Any]]]) -> None:
    """Submit binds that are in force at a front door, whose client waits for the answer."""
    world.authority.submit(
        BindMany("/", [("amq.topic", "q", key) for key in keys], True, True),
        ME,
        lambda *answer: seen.append(answer),
    )


async def test_who_waits_for_binds_in_force_hears_when_they_are_synced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authority, "IN_FORCE_WAITS_S", NEVER_S)
    await world.ask(declare())
    before, seen, synced = len(world.doors.told), list[Any](), list[int]()
    make_last = world.definitions._make_last

    def sync(*what: Any) -> None:
        if not synced:  # binds that come meanwhile share the next sync
            for key in "bcd":
                bind_waited(world, key, seen)
        make_last(*what)
        synced.append(len(seen))

    monkeypatch.setattr(world.definitions, "_make_last", sync)
    world.authority._usual_sync_s = 0.0  # the loop itself waits for the disk
    bind_waited(world, "a", seen)
    async with asyncio.timeout(60):
        while len(seen) < 4:
            await turn()
    assert seen == [(0, "", {})] * 4 and synced == [0, 1]
    await turn()
    assert world.doors.told_by[before:] == [{ME}, {ME}] and world.agree()


async def test_who_waits_for_binds_in_force_hears_of_the_first_that_is_refused(
    world: World,
) -> None:
    await world.ask(declare())
    seen = list[Any]()
    many = [("amq.topic", "q", "a"), ("amq.topic", "gone", "b"), ("amq.topic", "q", "c")]
    world.authority.submit(BindMany("/", many, True, True), ME, lambda *each: seen.append(each))
    async with asyncio.timeout(60):
        while not seen:
            await turn()
    assert seen == [(404, "no queue 'gone' in vhost '/'", {"done": 1})]
    assert [b.routing_key for b in world.catalog.vhosts["/"].bindings_to("queue", "q")] == ["a"]
    await turn()
    assert world.doors.told_by[-1] == set() and len(world.doors.told[-1]) == 1


async def test_binds_in_force_that_a_client_waits_for_are_refused_without_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.ask(declare())
    monkeypatch.setattr(world.definitions, "lacks_room", lambda changes, grows=True: "full")
    seen = list[Any]()
    bind_waited(world, "a", seen)
    async with asyncio.timeout(60):
        while not seen:
            await turn()
    assert seen == [(507, "full", {})] and not list(world.catalog.vhosts["/"].bindings())


async def test_a_bind_in_force_whose_answer_fails_ends_no_other_request(world: World) -> None:
    await world.ask(declare(durable=False))
    codes = list[int]()

    def answer(code: int, text: str, result: dict[str, Any]) -> None:
        codes.append(code)
        if code == 0:
            raise RuntimeError("a fault of ours")

    world.authority.submit(BindMany("/", [("amq.topic", "q", "bad")], True), ME, answer)
    seen = list[tuple[int, int]]()
    bind_in_force(world, "good", seen)
    await world.authority.caught_up()
    assert (codes, [code for code, _ in seen]) == ([0, 541], [0])
    assert (await world.ask(declare("more"))).code == 0 and world.agree()


async def test_requests_of_a_batch_are_bounded_by_what_they_ask_for(world: World) -> None:
    await world.ask(declare())
    before = len(world.doors.told)
    asks = [
        world.ask(BindMany("/", [("amq.topic", "q", f"{m}.{n}") for n in range(256)]))
        for m in range(40)
    ]
    assert all(answer.code == 0 for answer in await asyncio.gather(*asks))
    assert len(world.doors.told) - before == 5  # of 2,048 binds each
    assert world.agree()


async def test_transient_things_cost_no_sync(world: World) -> None:
    await world.ask(declare())
    before = world.definitions.syncs
    await world.ask(declare("t", durable=False))
    await world.ask(Bind("/", "amq.topic", "queue", "t", "", {}))
    assert world.definitions.syncs == before


async def test_server_named_queues_are_22_characters_after_the_prefix(world: World) -> None:
    name = (await world.ask(declare(""))).result["name"]
    assert name.startswith("amq.gen-")
    assert len(name) == len("amq.gen-") + 22


async def test_missing_ends_of_a_binding_are_named(world: World) -> None:
    missing = await world.ask(Bind("/", "e", "queue", "q", "", {}))
    assert (missing.code, missing.text) == (404, "no exchange 'e' in vhost '/'")
    missing = await world.ask(Bind("/", "amq.topic", "queue", "q", "", {}))
    assert (missing.code, missing.text) == (404, "no queue 'q' in vhost '/'")
    assert (await world.ask(Bind("/", "", "queue", "q", "", {}))).code == 403


async def test_unbind_of_what_is_not_bound_is_fine(world: World) -> None:
    await world.ask(declare())
    assert (await world.ask(Unbind("/", "amq.topic", "queue", "q", "no", {}))).code == 0
    assert (await world.ask(Unbind("/", "amq.topic", "queue", "no", "k", {}))).code == 0
    assert (await world.ask(Unbind("/", "no", "queue", "q", "k", {}))).code == 0
    assert (await world.ask(Unbind("/", "no", "exchange", "amq.topic", "k", {}))).code == 0


async def test_auto_delete_exchanges_go_with_their_last_binding_and_take_others_along(
    world: World,
) -> None:
    await world.ask(exchange("up", auto_delete=True))
    await world.ask(exchange("down", auto_delete=True))
    await world.ask(declare())
    await world.ask(Bind("/", "up", "exchange", "down", "", {}))
    await world.ask(Bind("/", "down", "queue", "q", "", {}))
    assert (await world.ask(QueueRemove("/", "q", False, False))).result == {"messages": 3}
    assert world.catalog.exchange("/", "down") is None
    assert world.catalog.exchange("/", "up") is None
    assert not world.shards.queues
    assert world.agree()


async def test_exchange_delete_knows_use_and_system_exchanges(world: World) -> None:
    await world.ask(exchange("e"))
    await world.ask(declare())
    await world.ask(Bind("/", "e", "queue", "q", "", {}))
    used = await world.ask(ExchangeRemove("/", "e", True))
    assert (used.code, used.text) == (406, "exchange 'e' in vhost '/' in use")
    assert (await world.ask(ExchangeRemove("/", "e", False))).code == 0
    assert (await world.ask(ExchangeRemove("/", "e", False))).code == 0
    assert (await world.ask(ExchangeRemove("/", "amq.topic", False))).code == 403


async def test_a_conditional_delete_is_the_shards_decision(world: World) -> None:
    await world.ask(declare())
    (id,) = world.shards.queues
    world.shards.refuse[id] = wire.Refused(0, 406, "not empty")
    refused = await world.ask(QueueRemove("/", "q", False, True))
    assert (refused.code, refused.text) == (406, "queue 'q' in vhost '/' not empty")
    assert world.catalog.queue("/", "q") is not None
    world.shards.refuse.clear()
    assert (await world.ask(QueueRemove("/", "q", False, True))).result == {"messages": 3}
    assert world.catalog.queue("/", "q") is None


async def test_what_a_connection_asks_after_a_conditional_delete_comes_after_it(
    world: World,
) -> None:
    await world.ask(declare())
    world.shards.hold = True
    removing = asyncio.create_task(world.ask(QueueRemove("/", "q", True, False)))
    declaring = asyncio.create_task(world.ask(declare(durable=False)))
    await turn()
    world.shards.hold = False
    world.shards.release()
    assert (await removing).code == 0
    assert (await declaring).code == 0
    queue = world.catalog.queue("/", "q")
    assert queue is not None
    assert (queue.durable, queue.id) == (False, 2)


async def test_exclusive_queues_are_locked_and_go_with_their_connection(world: World) -> None:
    await world.ask(declare("x", exclusive=True))
    for request in (
        declare("x"),
        QueueRemove("/", "x", False, False),
        Bind("/", "amq.topic", "queue", "x", "", {}),
    ):
        refused = await world.ask(request, YOU)
        assert refused.code == 405
        assert refused.text.startswith(
            "cannot obtain exclusive access to locked queue 'x' in vhost '/'. It could"
        )
    world.authority.connection_gone(ME)
    await world.ask(declare("other"), YOU)
    assert world.catalog.queue("/", "x") is None
    assert [spec.name for spec in world.shards.queues.values()] == ["other"]


async def test_the_queues_of_a_connection_go_also_if_their_declares_are_not_decided_yet(
    world: World,
) -> None:
    answers: list[int] = []

    def answered(code: int, text: str, result: dict[str, Any]) -> None:
        answers.append(code)

    world.authority.connection_gone(YOU)  # had none
    world.authority.submit(declare("mine", exclusive=True), ME, answered)
    world.authority.connection_gone(ME)
    await world.ask(declare("other"), YOU)
    assert answers == [0] and world.catalog.queue("/", "mine") is None
    # Also behind a conditional delete that its shard has not answered.
    world.shards.hold = True
    world.authority.submit(QueueRemove("/", "other", True, False), ME, answered)
    world.authority.submit(declare("mine", exclusive=True), ME, answered)
    await asyncio.sleep(0.01)
    world.authority.connection_gone(ME)
    world.shards.hold = False
    world.shards.release()
    await world.ask(declare("another"), YOU)
    assert answers == [0, 0, 0] and world.catalog.queue("/", "mine") is None


async def test_an_expired_queue_leaves_the_catalog_before_its_shard_deletes_it(
    world: World,
) -> None:
    await world.ask(declare())
    (id,) = world.shards.queues
    world.doors.hold = True
    world.authority.queue_gone(id, "expired")
    while len(world.doors.told) < 2:
        await asyncio.sleep(0)
    assert id in world.shards.queues
    world.doors.apply_all()
    assert id not in world.shards.queues


async def test_deleting_a_vhost_drops_it_at_every_shard(world: World) -> None:
    await world.ask(VhostPut("v"), "")
    await world.ask(QueueDeclare("v", "q", True, False, False, {}), "")
    assert (await world.ask(VhostDelete("v"), "")).code == 0
    drops = [shard for shard, sent in world.shards.received if isinstance(sent, wire.DropVhost)]
    assert drops == [0, 1]
    assert not world.shards.queues
    assert (await world.ask(VhostDelete("v"), "")).code == 404


async def test_users_and_permissions_are_in_force_when_answered(world: World) -> None:
    user = UserPut("u", *hash_new_password("secret", DEFAULT_ALGORITHM), ["management"])
    assert (await world.ask(user, "")).code == 0
    assert (await world.ask(PermissionPut("/", "u", "^a", "", ".*"), "")).code == 0
    assert passwords.matches(world.doors.copy.users.get("u"), "secret")
    assert world.doors.copy.permissions.may("u", "/", "configure", "abc")
    assert (await world.ask(PermissionPut("/", "u", "(", "", ""), "")).code == 400
    assert (await world.ask(PermissionPut("/", "nobody", "", "", ""), "")).code == 400
    assert (await world.ask(UserDelete("u"), "")).code == 0
    assert not world.doors.copy.permissions.may("u", "/", "configure", "abc")


@pytest.mark.parametrize(
    ("user", "regex", "why"),
    [
        ("u", "a" * 4097, "longer than 4096 characters"),
        ("u", r"(?!a)(a+)+$", "it may take too long, and RE2 does not match it"),
        ("u", r"(a+)\1", "it may take too long, and RE2 does not match it"),
        ("long" * 60, "{username}" * 30, "longer than 4096 characters"),
        ("1", r"(?!{username})x{username}{1,{username}}", ""),
        ("a-b c.*\n[x]", r"^{username}\.", ""),
    ],
    ids=range(6),
)
async def test_permissions_are_refused_that_could_not_be_matched_in_bounded_time(
    world: World, user: str, regex: str, why: str
) -> None:
    await world.ask(UserPut(user, *hash_new_password("secret", DEFAULT_ALGORITHM), []), "")
    asks = [TopicPermissionPut("/", user, "amq.topic", "", regex)]
    if "{" not in regex:
        asks += [PermissionPut("/", user, "", regex, "")]
    for ask in asks:
        answer = await world.ask(ask, "")
        assert answer.code == (400 if why else 0), answer
        assert why in answer.text
        assert len(answer.text) < 400
    if "^" in regex:
        assert world.catalog.permissions.may_topic(user, "/", "read", "amq.topic", f"{user}.x")
        assert not world.catalog.permissions.may_topic(user, "/", "read", "amq.topic", "a-b.x")


@pytest.mark.row("A4.12")
async def test_a_vhosts_queue_limit_is_kept(world: World) -> None:
    await world.ask(ParameterPut("/", "vhost-limits", "limits", {"max-queues": 1}), "")
    assert (await world.ask(declare("a"))).code == 0
    refused = await world.ask(declare("b"))
    assert (refused.code, refused.text) == (406, "queue limit in vhost '/' (1) is reached")
    assert (await world.ask(declare("a"))).code == 0


async def test_what_was_answered_is_there_after_a_restart(world: World, tmp_path: Path) -> None:
    await asyncio.gather(*(world.ask(declare(f"q{n}")) for n in range(20)))
    await world.ask(Bind("/", "amq.topic", "queue", "q3", "k", {"x": 1.5}))
    copy = Definitions(tmp_path, "another")
    assert state(copy.load()) == state(world.catalog)
    copy.close()


# -- policies --------------------------------------------------------------------------------------


def policy(
    definition: dict[str, Any], component: str = "policy", pattern: str = "^q"
) -> ParameterPut:
    value = {"pattern": pattern, "definition": definition, "priority": 0, "apply-to": "all"}
    return ParameterPut("/", component, "p", value)


@pytest.mark.row("C3.7")
async def test_shards_know_the_effective_arguments_before_a_policy_is_answered(
    world: World,
) -> None:
    await world.ask(declare("q", arguments={"x-max-length": 5}))
    await world.ask(declare("other"))
    world.shards.hold = True
    asking = asyncio.create_task(world.ask(policy({"max-length": 3, "message-ttl": 9})))
    await turn()
    assert not asking.done()
    world.shards.release()
    assert (await asking).code == 0
    told = {spec.name: spec.arguments for spec in world.shards.queues.values()}
    assert told == {"q": {"x-max-length": 3, "x-message-ttl": 9}, "other": {}}
    assert world.agree()


@pytest.mark.row("C3.7")
async def test_only_queues_that_change_are_told(world: World) -> None:
    await world.ask(declare("q", arguments={"x-max-length": 1}))
    before = len(world.shards.received)
    assert (await world.ask(policy({"max-length": 3}))).code == 0
    assert (await world.ask(policy({"alternate-exchange": "a"}))).code == 0
    assert len(world.shards.received) == before


@pytest.mark.row("C3.7")
async def test_a_cleared_policy_gives_back_what_was_declared(world: World) -> None:
    await world.ask(declare("q", arguments={"x-max-length": 5}))
    await world.ask(policy({"max-length": 3}))
    assert (await world.ask(ParameterDelete("/", "policy", "p"))).code == 0
    assert [spec.arguments for spec in world.shards.queues.values()] == [{"x-max-length": 5}]
    assert (await world.ask(ParameterDelete("/", "policy", "p"))).code == 404


async def test_a_queue_declared_under_a_policy_has_its_limits_from_the_start(world: World) -> None:
    await world.ask(policy({"max-length": 3}))
    await world.ask(declare("q"))
    assert [spec.arguments for spec in world.shards.queues.values()] == [{"x-max-length": 3}]
    assert [
        spec.arguments
        for spec in world.authority.queues_of_shard(0) + world.authority.queues_of_shard(1)
    ] == [{"x-max-length": 3}]
    assert (await world.ask(declare("q"))).code == 0, "a declare compares what was declared"


async def test_a_policy_does_not_bring_a_queue_back_that_its_shard_is_deleting(
    world: World,
) -> None:
    await world.ask(declare("q"))
    world.shards.hold = True
    deleting = asyncio.create_task(world.ask(QueueRemove("/", "q", False, True)))
    await turn()
    before = len(world.shards.received)
    setting = asyncio.create_task(world.ask(policy({"max-length": 3}), YOU))
    await turn()
    assert not any(
        isinstance(sent, wire.CreateQueues) for _, sent in world.shards.received[before:]
    )
    world.shards.release()
    assert [(await deleting).code, (await setting).code] == [0, 0]
    assert world.shards.queues == {}
    assert world.agree()


async def test_a_queue_whose_delete_is_refused_hears_of_the_policy_then(world: World) -> None:
    await world.ask(declare("q"))
    (id,) = world.shards.queues
    world.shards.refuse[id] = wire.Refused(0, 406, "not empty")
    world.shards.hold = True
    deleting = asyncio.create_task(world.ask(QueueRemove("/", "q", False, True)))
    await turn()
    setting = asyncio.create_task(world.ask(policy({"max-length": 3}), YOU))
    await turn()
    world.shards.hold = False
    world.shards.release()
    assert [(await deleting).code, (await setting).code] == [406, 0]
    assert [spec.arguments for spec in world.shards.queues.values()] == [{"x-max-length": 3}]


@pytest.mark.parametrize(
    "ask",
    [
        declare("big", arguments={"a": 1 << 64}),
        declare("key", arguments={"k" * 256: 1}),
        exchange("big", arguments={"a": [1 << 70]}),
        Bind("/", "amq.direct", "queue", "q", "k", {"a": 1 << 64}),
        ParameterPut("/", "federation", "p", {"a": [10**30]}),
    ],
    ids=lambda ask: type(ask).__name__,
)
async def test_what_cannot_be_kept_is_refused_and_the_others_go_on(world: World, ask: Any) -> None:
    await world.ask(declare("q"))
    refused = await world.ask(ask)
    assert refused.code == 406
    assert refused.text.startswith("invalid arguments: a")
    assert (await world.ask(declare("r"))).code == 0


async def test_a_timestamp_that_no_calendar_has_is_kept(world: World, tmp_path: Path) -> None:
    assert (await world.ask(declare("t", arguments={"when": (1 << 64) - 1}))).code == 0
    again = Definitions(tmp_path, "boot").load()
    queue = again.queue("/", "t")
    assert queue is not None and queue.arguments == {"when": (1 << 64) - 1}


async def test_a_request_that_nobody_foresaw_is_the_only_one_that_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = world.authority._decisions.decide

    def trips(request: Any, owner: str, asked_at: str) -> Any:
        if request.name == "trap":
            raise ZeroDivisionError
        return decide(request, owner, asked_at)

    monkeypatch.setattr(world.authority._decisions, "decide", trips)
    answers = await asyncio.gather(*(world.ask(declare(name)) for name in ("a", "trap", "b")))
    assert [answer.code for answer in answers] == [0, 541, 0]
    assert world.agree()


# -- queues that go by themselves ------------------------------------------------------------------


class Leaving(World):
    """A shard that answers late, and whose queue "q" goes by itself."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.shards.hold = True
        self.declared: list[asyncio.Task[Answer]] = []
        self.deletes: list[asyncio.Task[Answer]] = []
        self.since_gone = 0  # how many were declared before it went last

    async def do(self, what: str) -> None:
        match what:
            case "declare":
                self.declared.append(
                    asyncio.create_task(
                        self.ask(declare(auto_delete=True), f"0.1.{len(self.declared)}")
                    )
                )
            case "last consumer goes":
                for id in self.shards.queues.keys() - self.shards.closed:
                    self.shards.closed.add(id)
                    self.since_gone = len(self.declared)
                    self.authority.queue_gone(id, "auto-delete")
            case "delete if unused":
                self.since_gone = len(self.declared)
                owner, ask = f"0.1.delete.{len(self.deletes)}", QueueRemove("/", "q", True, False)
                self.deletes.append(asyncio.create_task(self.ask(ask, owner)))
            case "shard answers":
                self.shards.release()
            case "turn":
                await asyncio.sleep(0)

    async def settle(self) -> None:
        while not all(task.done() for task in [*self.declared, *self.deletes]):
            self.shards.release()
            await asyncio.sleep(0)
        # A removal may still be on its way to the disk. What is asked behind it is answered behind
        # it.
        await self.ask(Unbind("/", "amq.topic", "queue", "no", "k", {}))


STEPS = ["declare", "last consumer goes", "delete if unused", "shard answers", "turn", "turn"]


# The list that was found: the last consumer goes twice, each time in a pass of its own.
FOUND = ["turn", "shard answers", "declare", "shard answers", "turn", "turn", "turn"]
FOUND += ["shard answers", "turn", "last consumer goes", "turn", "last consumer goes", "turn"]


@example(FOUND, 0.01)
@given(st.lists(st.sampled_from(STEPS), max_size=25), st.sampled_from([0.0, 0.002]))
def test_who_declares_a_queue_that_is_going_gets_one_that_stays(
    steps: list[str], sync_s: float
) -> None:
    async def play(directory: str) -> None:
        world = Leaving(Path(directory))
        world.definitions.sync_s = sync_s
        task = asyncio.create_task(world.authority.run())
        for step in steps:
            await world.do(step)
        await world.settle()
        assert all(asked.result().code == 0 for asked in world.declared)
        if len(world.declared) > world.since_gone:
            queue = world.catalog.queue("/", "q")
            assert queue is not None
            assert queue.id in world.shards.queues.keys() - world.shards.closed
        assert world.agree()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        world.definitions.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(play(directory))


async def test_a_queue_that_its_shard_does_not_know_is_not_declared_for_ever(world: World) -> None:
    """It does not happen; if it did, the controller must go on."""
    await world.ask(declare())
    world.shards.queues.clear()
    assert (await world.ask(declare(), YOU)).result == {"name": "q", "messages": 0, "consumers": 0}
