"""The front door follows the controller in step and in order, over a real unix socket.

It is whole again after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardmq.broker.front_door.links import catalog_link, catalog_requests
from shardmq.broker.front_door.links.catalog_link import CatalogLink
from shardmq.broker.front_door.links.catalog_requests import Reply
from shardmq.broker.model.changes import (
    AnyChange,
    ExchangePut,
    QueueDelete,
    QueuePut,
    UserDelete,
    VhostPut,
)
from shardmq.broker.shared.control import (
    Alarmed,
    Answer,
    AnyControl,
    Applied,
    Ask,
    AssignmentOrder,
    Bind,
    Changes,
    CloseConnection,
    ConnectionDown,
    ConnectionInfo,
    ConnectionsPassed,
    ConnectionUp,
    ConsumerHere,
    ConsumersHere,
    DoorHello,
    DoorReport,
    OtherVersion,
    Outlived,
    Query,
    QueueDeclare,
    Snapshot,
    SnapshotPart,
    Span,
    SpansEnded,
)
from shardmq.cluster.versions import Range
from shardmq.shardd.wire.messages import WIRE_VERSION

WITHIN_S = 60  # a wait that takes this long has failed; none is expected to


class FakeController:
    """One end of the socket, said and heard by hand."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()

    async def __aenter__(self) -> FakeController:
        self._server = await asyncio.start_unix_server(self._accepted, self.path)
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._server.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.streams.put_nowait(Stream(reader, writer))

    async def door(self) -> Stream:
        return await asyncio.wait_for(self.streams.get(), WITHIN_S)


class Stream:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def hear(self) -> AnyControl:
        """Return the next message that does not say that a front door has no consumers."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                length = int.from_bytes(await self._reader.readexactly(4), "little")
                said: AnyControl = msgspec.msgpack.decode(
                    await self._reader.readexactly(length), type=AnyControl
                )
                if said != ConsumersHere([]):
                    return said

    def say(self, *messages: AnyControl) -> None:
        payloads = [msgspec.msgpack.encode(message) for message in messages]
        self._writer.write(b"".join(len(p).to_bytes(4, "little") + p for p in payloads))

    def say_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    def close(self) -> None:
        self._writer.close()


class Heard:
    """What the link told its front door."""

    def __init__(self) -> None:
        self.changes: list[list[AnyChange] | None] = []
        self.closed: list[tuple[str, int, str]] = []
        self.passes: list[str] = []
        self.looks: list[tuple[str, int]] = []  # at what is not acknowledged
        self.alarm, self.is_outlived = asyncio.Event(), asyncio.Event()

    def alarmed(self, reason: str) -> None:
        self.alarm.set()

    def outlived(self) -> None:
        self.is_outlived.set()

    def consumers_here(self) -> list[ConsumerHere]:
        return []

    def assignment_orders(self, orders: list[AssignmentOrder]) -> None:
        self.orders = orders

    def receiving(self) -> None:
        self.passes.append("begun")

    def received(self) -> None:
        self.passes.append("ended")

    def logins_change(self) -> None:
        pass

    def catalog_changed(self, changes: list[AnyChange] | None) -> None:
        self.changes.append(changes)

    def close_connection(self, owner: str, code: int, text: str) -> None:
        self.closed.append((owner, code, text))

    def report(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, float]]:
        return [{"owner": "0.1.1"}], [{"number": 1}], {"published": 2.0}

    def published(self) -> list[tuple[str, str, int, int]]:
        return [("/", "e", 3, 4)]

    def of_vhosts(self) -> dict[str, dict[str, int]]:
        return {"/": {"publish": 5}}

    def unacked(self, queue_id: int) -> list[dict[str, Any]]:
        self.looks.append(("unacked", queue_id))
        return [{"delivery_tag": 1}]

    def holders(self, queue_id: int) -> list[dict[str, Any]]:
        self.looks.append(("holders", queue_id))
        return [{"consumer_tag": "tag"}]


class Scene:
    def __init__(self, controller: FakeController, link: CatalogLink, heard: Heard) -> None:
        self.controller, self.link, self.heard = controller, link, heard

    def up(self, owner: str) -> None:
        self.link.connection_up(owner, lambda: info(owner))

    async def in_step(self, *changes: AnyChange) -> Stream:
        """Return a stream whose hello was answered by a snapshot of `changes`."""
        stream = await self.controller.door()
        assert isinstance(await stream.hear(), DoorHello)
        *first, rest = [
            list(changes[start : start + 2]) for start in range(0, len(changes), 2)
        ] or [[]]
        for part in first:
            stream.say(SnapshotPart(part))
        stream.say(Snapshot("boot", len(changes), rest))
        assert await stream.hear() == Applied(len(changes))
        return stream


@contextlib.asynccontextmanager
async def scene(directory: Path) -> AsyncIterator[Scene]:
    path = str(directory / "c.sock")
    heard = Heard()
    link = CatalogLink(path, door=3, incarnation=7, pid=42, listener=heard)
    async with FakeController(path) as controller:
        running = asyncio.create_task(link.run())
        try:
            yield Scene(controller, link, heard)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def run(directory: Path, play: Callable[[Scene], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(4 * WITHIN_S), scene(directory) as made:
            await play(made)

    asyncio.run(whole())


def declare(name: str) -> QueueDeclare:
    return QueueDeclare("/", name, True, False, False, {})


def info(owner: str) -> ConnectionInfo:
    return ConnectionInfo(
        owner,
        "n",
        "u",
        "/",
        "::1",
        1,
        "::1",
        2,
        "AMQP 0-9-1",
        "PLAIN",
        False,
        131072,
        2047,
        60,
        0,
        {"product": "p"},
    )


def test_the_snapshot_then_changes_in_order_are_in_force_before_applied_is_said(
    tmp_path: Path,
) -> None:
    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        await s.link.synced()
        assert s.link.catalog.vhost("/") is not None
        made, gone = QueuePut("/", "q", 1, 0), QueueDelete("/", "q")
        stream.say(Changes(2, [made]), Changes(3, [gone, QueuePut("/", "q", 2, 0)]))
        assert await stream.hear() == Applied(2)
        assert await stream.hear() == Applied(3)
        found = s.link.catalog.queue("/", "q")
        assert found is not None
        assert found.id == 2
        assert s.heard.changes == [None, [made], [gone, QueuePut("/", "q", 2, 0)]]

    run(tmp_path, play)


def test_a_change_is_in_force_when_the_answer_to_its_asker_arrives(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        answer = s.link.ask(declare("q"), "0.1.1", "u")
        asked = await stream.hear()
        assert asked == Ask(1, declare("q"), "0.1.1", "u")
        stream.say(Changes(2, [QueuePut("/", "q", 1, 0)]), Answer(1, result={"name": "q"}))
        assert (await answer).result == {"name": "q"}
        assert s.link.catalog.queue("/", "q") is not None

    run(tmp_path, play)


def test_spans_are_not_kept_for_a_controller_that_is_away_or_does_not_read(tmp_path: Path) -> None:
    span = Span("publish x", "consumer", b"1" * 16, b"2" * 8, b"", "", 1, 2, {"a": "b" * 9000}, "")

    async def play(s: Scene) -> None:
        assert not s.link.say_spans([span])
        stream = await s.in_step(VhostPut("/"))
        await s.link.synced()
        assert s.link.say_spans([span])
        assert await stream.hear() == SpansEnded([span])
        said = 0
        while s.link.say_spans([span] * 50):  # nobody hears: what the kernel takes is bounded, too
            said += 1
            assert said < 100
            await asyncio.sleep(0)
        assert said > 1

    run(tmp_path, play)


def test_who_is_called_with_an_answer_is_called_in_the_turn_that_has_it_and_harms_no_other(
    tmp_path: Path,
) -> None:
    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        called: list[tuple[int, str]] = []

        def fail(reply: Reply) -> None:
            raise RuntimeError("ours")

        replies = [s.link.request(declare(name), "0.1.1", "u") for name in "abcd"]
        replies[0].add_done_callback(fail)
        for reply in replies[1:]:
            reply.add_done_callback(
                lambda reply: called.append((reply.result().id, s.heard.passes[-1]))
            )
        replies[2].cancel()
        for number in (1, 2, 3, 4):
            asked = await stream.hear()
            assert isinstance(asked, Ask)
            assert asked.id == number
        waited = s.link.ask(declare("e"), "0.1.1", "u")
        await stream.hear()
        stream.say(*(Answer(number) for number in (1, 2, 3, 4, 5)))
        await waited
        assert called == [(2, "begun"), (4, "begun")]
        assert s.heard.passes[-1] == "ended"

    run(tmp_path, play)


def test_who_waits_for_queues_to_go_waits_for_all_of_them_but_not_for_a_controller_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_link, "REMOVED_S_MAX", WITHIN_S * 10.0)

    async def play(s: Scene) -> None:
        queues = [QueuePut("/", f"q{id}", id, 0) for id in (1, 2, 3)]
        stream = await s.in_step(VhostPut("/"), *queues)
        await s.link.synced()
        await s.link.removed([77])  # never there, or gone already
        waiting = asyncio.create_task(s.link.removed([1, 2, 77]))
        for version, gone in ((5, "q1"), (6, "q3"), (7, "q2")):
            await asyncio.sleep(0)
            assert not waiting.done()
            stream.say(
                Changes(version, [QueueDelete("/", gone), QueuePut("/", gone, version * 10, 0)])
            )
            assert await stream.hear() == Applied(version)
        await waiting
        waiting = asyncio.create_task(s.link.removed([50]))  # by a snapshot
        await asyncio.sleep(0)
        stream.close()
        again = await s.in_step(VhostPut("/"), QueuePut("/", "q2", 70, 0))
        await waiting
        again.close()
        while s.link.up:
            await asyncio.sleep(0.001)
        await s.link.removed([70])

    run(tmp_path, play)


def test_what_ends_one_controller_after_the_other_is_not_asked_for_ever(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        answer = s.link.ask(declare("trap"), "0.1.1", "u")
        for _ in range(catalog_requests.DEATHS_MAX):
            assert isinstance(await stream.hear(), Ask)
            assert not answer.done()
            stream.close()
            stream = await s.in_step(VhostPut("/"))
        assert (await answer).code == 541
        later = s.link.ask(declare("fine"), "0.1.1", "u")
        asked = await stream.hear()
        assert isinstance(asked, Ask) and asked.what == declare("fine")
        stream.say(Answer(asked.id))
        assert (await later).code == 0

    run(tmp_path, play)


def test_queues_that_do_not_go_are_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_link, "REMOVED_S_MAX", 0.01)

    async def play(s: Scene) -> None:
        await s.in_step(VhostPut("/"), QueuePut("/", "q", 1, 0))
        await s.link.synced()
        await s.link.removed([1])
        assert s.link.catalog.queue("/", "q") is not None

    run(tmp_path, play)


def test_that_changes_nobody_waits_for_are_in_force_is_said_soon(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        stream.say(Changes(2, [ExchangePut("/", "a", "direct")], waited=False))
        assert await stream.hear() == Applied(2)

    run(tmp_path, play)


def test_of_many_it_is_said_once_and_with_what_somebody_waits_for_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_link, "APPLIED_WAITS_S", 60.0)

    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        unwaited = [
            Changes(version, [ExchangePut("/", f"e{version}", "direct")], waited=False)
            for version in (2, 3)
        ]
        stream.say(*unwaited, Alarmed("x"))
        await s.heard.alarm.wait()
        asking = s.link.ask(declare("q"), "3.7.1", "guest")
        assert isinstance(await stream.hear(), Ask)
        stream.say(Changes(4, [ExchangePut("/", "e4", "direct")]))
        assert await stream.hear() == Applied(4)
        asking.cancel()

    run(tmp_path, play)


def test_who_was_taken_for_gone_hears_of_it(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        stream.say(Outlived())
        await s.heard.is_outlived.wait()

    run(tmp_path, play)


def test_requests_leave_in_the_order_of_asking_and_no_more_than_bounded_are_on_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_requests, "SENT_MAX", 10)

    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        answers = [s.link.ask(declare(str(n)), "0.1.1", "u") for n in range(35)]
        heard: list[str] = []
        while len(heard) < 35:
            asked = await stream.hear()
            assert isinstance(asked, Ask)
            assert asked.id - sum(a.done() for a in answers) <= 10
            heard.append(asked.what.name)  # type: ignore[union-attr]
            stream.say(Answer(asked.id))
        assert heard == [str(n) for n in range(35)]
        assert {(await answer).code for answer in answers} == {0}

    run(tmp_path, play)


def test_who_asks_for_little_does_not_wait_behind_all_of_who_asks_for_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_requests, "SENT_MAX", 10)

    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        for owner in ("0.1.1", "0.1.2"):
            for n in range(100):
                s.link.ask(declare(f"{owner} {n}"), owner, "u")
        answer = s.link.ask(declare("little"), "0.1.3", "u")
        heard: list[str] = []
        while not answer.done():
            asked = await stream.hear()
            assert isinstance(asked, Ask)
            heard.append(asked.what.name)  # type: ignore[union-attr]
            stream.say(Answer(asked.id))
            await asyncio.sleep(0)
        assert heard.index("little") <= 10 + 3  # those on their way already, then one of each
        for owner in ("0.1.1", "0.1.2"):
            its = [name for name in heard if name.startswith(owner)]
            assert its == [f"{owner} {n}" for n in range(len(its))]

    run(tmp_path, play)


def test_a_request_beyond_the_bound_is_refused_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_requests, "WAITING_MAX", 1)

    async def play(s: Scene) -> None:
        kept, refused = s.link.ask(declare("a"), "o", "u"), s.link.ask(declare("b"), "o", "u")
        assert (await refused).code == 506
        assert not kept.done()

    run(tmp_path, play)


def test_what_was_asked_survives_a_restart_of_the_controller(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        answered, sent = s.link.ask(declare("a"), "o", "u"), s.link.ask(declare("b"), "o", "u")
        first, second = await stream.hear(), await stream.hear()
        assert isinstance(first, Ask)
        stream.say(Answer(first.id))
        await answered
        stream.close()
        stream = await s.controller.door()
        assert await stream.hear() == DoorHello(WIRE_VERSION, 3, 7, 42, "boot", 1, [])
        while_away = s.link.ask(declare("c"), "o", "u")
        stream.say(Changes(1, []))
        assert await stream.hear() == Applied(1)
        assert await stream.hear() == second
        third = await stream.hear()
        assert isinstance(third, Ask)
        assert third.what == declare("c")
        stream.say(Answer(third.id - 1), Answer(third.id, 406, "no"))
        assert (await sent).code == 0
        assert await while_away == Answer(third.id, 406, "no")

    run(tmp_path, play)


def test_a_request_nobody_waits_for_is_not_asked_again(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        sent = s.link.ask(declare("a"), "o", "u")
        await stream.hear()
        stream.close()
        stream = await s.controller.door()
        await stream.hear()
        waiting = s.link.ask(declare("b"), "o", "u")
        sent.cancel()
        waiting.cancel()
        last = s.link.ask(declare("c"), "o", "u")
        stream.say(Changes(1, []))
        assert await stream.hear() == Applied(1)
        asked = await stream.hear()
        assert isinstance(asked, Ask)
        assert asked.what == declare("c")
        stream.say(Answer(asked.id))
        await last

    run(tmp_path, play)


def test_a_snapshot_of_a_new_life_replaces_the_copy_and_the_old_one_serves_until_then(
    tmp_path: Path,
) -> None:
    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"), QueuePut("/", "old", 1, 0))
        stream.close()
        stream = await s.controller.door()
        await stream.hear()
        assert not s.link.up
        assert s.link.catalog.queue("/", "old") is not None
        stream.say(Snapshot("next boot", 1, [VhostPut("/")]))
        assert await stream.hear() == Applied(1)
        assert s.link.catalog.queue("/", "old") is None

    run(tmp_path, play)


def test_connections_are_made_known_once_whether_they_came_before_or_after_the_hello(
    tmp_path: Path,
) -> None:
    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        s.up("0.1.1")
        assert await stream.hear() == ConnectionUp(info("0.1.1"))
        s.up("0.1.2")
        assert await stream.hear() == ConnectionUp(info("0.1.2"))
        stream.close()
        stream = await s.controller.door()
        hello = await stream.hear()
        assert isinstance(hello, DoorHello)
        assert [c.owner for c in hello.connections] == ["0.1.1", "0.1.2"]
        s.up("0.1.3")
        s.link.connection_down("0.1.2")
        stream.say(Changes(1, []))
        assert await stream.hear() == Applied(1)
        assert await stream.hear() == ConnectionDown("0.1.2")
        assert await stream.hear() == ConnectionUp(info("0.1.3"))
        s.link.connection_down("0.1.3")
        assert await stream.hear() == ConnectionDown("0.1.3")

    run(tmp_path, play)


def test_connections_that_end_before_anything_else_is_said_are_only_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_link, "UP_WAITS_S", 60.0)

    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        for number in range(5):
            s.up(f"0.1.{number}")
        for number in (0, 3):
            s.link.connection_down(f"0.1.{number}")
        asking = s.link.ask(declare("q"), "0.1.4", "guest")
        for number in (1, 2, 4):
            assert await stream.hear() == ConnectionUp(info(f"0.1.{number}"))
        assert await stream.hear() == ConnectionsPassed(2)
        assert isinstance(await stream.hear(), Ask)
        s.link.connection_down("0.1.4")
        assert await stream.hear() == ConnectionDown("0.1.4")
        asking.cancel()

    run(tmp_path, play)


def test_connections_come_before_the_word_that_a_change_is_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who is let in by a user that is deleted at this moment would stay."""
    monkeypatch.setattr(catalog_link, "UP_WAITS_S", 60.0)

    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        s.up("0.1.1")
        stream.say(Changes(2, [UserDelete("u")]))
        assert await stream.hear() == ConnectionUp(info("0.1.1"))
        assert await stream.hear() == Applied(2)

    run(tmp_path, play)


def test_close_and_query_reach_the_front_door(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        stream.say(CloseConnection("0.1.1", 320, "CONNECTION_FORCED - bye"), Query(9))
        assert await stream.hear() == DoorReport(
            9,
            [{"owner": "0.1.1"}],
            [{"number": 1}],
            {"published": 2.0},
            exchanges=[("/", "e", 3, 4)],
            vhosts={"/": {"publish": 5}},
            door=3,
        )
        assert s.heard.closed == [("0.1.1", 320, "CONNECTION_FORCED - bye")]

    run(tmp_path, play)


def test_a_look_at_what_is_not_acknowledged_works_out_only_what_was_asked_for(
    tmp_path: Path,
) -> None:
    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        stream.say(Query(1, unacked_of=7), Query(2, holders_of=8))
        unacked, holders = [{"delivery_tag": 1}], [{"consumer_tag": "tag"}]
        assert await stream.hear() == DoorReport(1, [], [], {}, unacked=unacked)
        assert await stream.hear() == DoorReport(2, [], [], {}, holders=holders)
        assert s.heard.looks == [("unacked", 7), ("holders", 8)]

    run(tmp_path, play)


def test_a_controller_of_another_wire_version_is_told_of_once_and_the_copy_stays_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        stream.close()
        for _ in range(3):
            stream = await s.controller.door()
            assert isinstance(await stream.hear(), DoorHello)
            stream.say(OtherVersion(WIRE_VERSION + 1))
            stream.close()
        stream = await s.controller.door()
        assert "/" in s.link.catalog.vhosts and not s.link.up
        stream.close()
        await s.in_step(VhostPut("/"))

    run(tmp_path, play)
    said = [
        record.getMessage() for record in caplog.records if record.name == catalog_link.log.name
    ]
    assert said == [
        "the controller is gone (end of stream); serving from the copy of version 1",
        f"the controller speaks wire version {WIRE_VERSION + 1}, this process speaks "
        f"{WIRE_VERSION}: restart all of one release",
    ]


def test_with_an_older_controller_the_version_that_both_understand_is_spoken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = WIRE_VERSION - 1
    monkeypatch.setattr(catalog_link, "WIRE", Range(older, WIRE_VERSION))

    async def hello(stream: Any) -> tuple[int, int]:
        said = await stream.hear()
        assert isinstance(said, DoorHello)
        return said.wire_version, said.wire_least

    async def play(s: Scene) -> None:
        stream = await s.controller.door()
        assert await hello(stream) == (WIRE_VERSION, older)
        stream.say(OtherVersion(older))
        stream.close()
        stream = await s.controller.door()
        assert await hello(stream) == (older, 0)
        stream.say(Snapshot("boot", 1, [VhostPut("/")]))
        assert await stream.hear() == Applied(1)
        stream.close()
        stream = await s.controller.door()  # perhaps that of another release
        assert await hello(stream) == (WIRE_VERSION, older)
        stream.close()

    run(tmp_path, play)
    assert "speaks wire version" not in caplog.text


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\x03\0\0\0abc", b"\x01\0\0\0\x90"])
def test_garbage_from_the_controller_ends_the_stream_and_the_next_one_is_in_step(
    tmp_path: Path, garbage: bytes
) -> None:
    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        stream.say_bytes(garbage)
        stream = await s.in_step(VhostPut("/"), ExchangePut("/", "e", "direct"))
        assert s.link.catalog.exchange("/", "e") is not None

    run(tmp_path, play)


def test_a_large_snapshot_and_many_changes_arrive_whole(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        queues = [QueuePut("/", f"q{n}", n, 0) for n in range(1, 3000)]
        stream = await s.in_step(VhostPut("/"), *queues)
        stream.say(Changes(6000, [QueueDelete("/", queue.name) for queue in queues]))
        assert await stream.hear() == Applied(6000)
        assert len(s.link.catalog.vhosts["/"].queues) == 0
        assert sum(len(part) for part in s.heard.changes if part) == len(queues)

    run(tmp_path, play)


def test_arguments_of_every_kind_of_table_value_can_be_asked(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        stream = await s.in_step(VhostPut("/"))
        arguments = {
            "i": -1,
            "big": 2**63,
            "f": 1.5,
            "b": True,
            "n": None,
            "s": "x",
            "raw": b"\xff",
            "l": [{"t": 1}],
        }
        s.link.ask(Bind("/", "e", "queue", "q", "k", arguments), "o", "u")
        asked = await stream.hear()
        assert isinstance(asked, Ask)
        assert asked.what.arguments == arguments  # type: ignore[union-attr]

    run(tmp_path, play)


def test_thousands_of_changes_said_at_once_let_others_have_their_turn(tmp_path: Path) -> None:
    """Each is small: one read holds them all."""
    most = 3000

    async def play(scene: Scene) -> None:
        stream = await scene.in_step(VhostPut("/"))
        applied = []  # at each turn of another task

        async def another() -> None:
            while len(scene.heard.changes) < 1 + most:
                applied.append(len(scene.heard.changes))
                await asyncio.sleep(0)

        other = asyncio.create_task(another())
        stream.say(*(Changes(2 + n, [QueuePut("/", f"q{n}", n + 1, 0)]) for n in range(most)))
        await other
        steps = [after - before for before, after in itertools.pairwise([*applied, 1 + most])]
        assert max(steps) <= catalog_link.MESSAGES_MAX

    run(tmp_path, play)
