"""Requests to the controller and the bytes they travel in, without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.broker.front_door.hot_state import BindRun, BindRuns
from shardmq.broker.front_door.links import catalog_requests, control_stream
from shardmq.broker.front_door.links.catalog_requests import CatalogRequests, Reply
from shardmq.broker.front_door.links.control_stream import ControlStream
from shardmq.broker.shared.control import (
    CONTROL_BYTES_MAX,
    Answer,
    AnyControl,
    Applied,
    Ask,
    BindMany,
    ConnectionDown,
    QueueDeclare,
)


class Scene:
    """Requests whose controller is played by hand."""

    def __init__(self) -> None:
        self.sent: list[Ask] = []
        self.requests = CatalogRequests(self.sent.append, lambda ask: None, BindRuns())

    def ask(self, name: str, owner: str = "a") -> Reply:
        reply = Reply()
        self.requests.add(QueueDeclare("/", name, False, False, False, {}), owner, "u", reply)
        return reply

    def names(self) -> list[str]:
        return [ask.what.name for ask in self.sent]  # type: ignore[union-attr]


def test_requests_wait_until_the_controller_is_there() -> None:
    scene = Scene()
    reply = scene.ask("q")
    assert scene.sent == []
    scene.requests.ask_again()
    assert scene.names() == ["q"]
    scene.requests.answered(Answer(scene.sent[0].id, 0, ""))
    assert reply.done() and reply.result().code == 0


def test_connections_take_turns_when_more_is_asked_than_may_be_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog_requests, "SENT_MAX", 2)
    scene = Scene()
    scene.requests.ask_again()
    for number in range(5):
        scene.ask(f"a{number}", "a")
    scene.ask("b0", "b")
    assert scene.names() == ["a0", "a1"]
    for at in range(4):
        scene.requests.answered(Answer(scene.sent[at].id))
    assert scene.names() == ["a0", "a1", "a2", "b0", "a3", "a4"]


def test_many_binds_count_as_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_requests, "SENT_MAX", 2)
    scene = Scene()
    scene.requests.ask_again()
    scene.requests.add(BindMany("/", [("e", "q", str(n)) for n in range(3)]), "a", "u", Reply())
    scene.ask("q")
    assert len(scene.sent) == 1
    scene.requests.answered(Answer(scene.sent[0].id))
    assert len(scene.sent) == 2


def test_too_many_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_requests, "WAITING_MAX", 1)
    scene = Scene()
    waits, refused = scene.ask("q"), scene.ask("r")
    assert not waits.done()
    assert refused.result().code == catalog_requests.RESOURCE_ERROR


def test_the_next_controller_is_asked_what_is_unanswered_and_not_what_is_cancelled() -> None:
    scene = Scene()
    scene.requests.ask_again()
    answered, open_, left = scene.ask("answered"), scene.ask("open"), scene.ask("left")
    scene.requests.answered(Answer(scene.sent[0].id))
    left.cancel()
    scene.requests.up = False
    scene.ask("waits").cancel()
    scene.ask("later")
    scene.sent.clear()
    scene.requests.ask_again()
    assert answered.done() and not open_.done()
    assert scene.names() == ["open", "later"]


def test_a_request_that_ends_controllers_is_given_up() -> None:
    scene = Scene()
    reply = scene.ask("q")
    for _ in range(catalog_requests.DEATHS_MAX):
        assert not reply.done()
        scene.requests.up = False
        scene.requests.ask_again()
    scene.requests.ask_again()
    assert reply.result().code == catalog_requests.INTERNAL_ERROR


def test_who_cannot_take_an_answer_harms_no_other() -> None:
    scene = Scene()
    scene.requests.ask_again()

    def fail(reply: Reply) -> None:
        raise RuntimeError

    scene.ask("bad").add_done_callback(fail)
    good = scene.ask("good")
    for ask in list(scene.sent):
        scene.requests.answered(Answer(ask.id))
    assert good.done()
    scene.requests.answered(Answer(99))  # nobody asked


# -- the stream -----------------------------------------------------------------------------------


class Transport:
    def __init__(self) -> None:
        self.log: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *what: self.log.append((name, *what))


def stream_of(taken: list[AnyControl]) -> tuple[ControlStream, Transport]:
    stream, transport = ControlStream(lambda stream: taken.extend(stream.messages())), Transport()
    stream.connection_made(transport)  # type: ignore[arg-type]
    return stream, transport


def encoded(*messages: AnyControl) -> bytes:
    payloads = [msgspec.msgpack.encode(message) for message in messages]
    return b"".join(len(payload).to_bytes(4, "little") + payload for payload in payloads)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**40), max_size=8), st.randoms(use_true_random=False))
def test_messages_arrive_whole_wherever_the_bytes_are_cut(versions: list[int], random: Any) -> None:
    async def play() -> None:
        taken: list[AnyControl] = []
        stream, _ = stream_of(taken)
        data = encoded(*map(Applied, versions))
        cuts = sorted(random.choices(range(len(data) + 1), k=5))
        for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
            stream.data_received(data[start:stop])
        assert taken == [Applied(version) for version in versions]

    asyncio.run(play())


def test_much_is_left_to_the_task_that_waits_and_nothing_is_read_meanwhile() -> None:
    async def play() -> None:
        taken: list[AnyControl] = []
        stream, transport = stream_of(taken)
        many = [Applied(number) for number in range(control_stream.FEW_BYTES // 10)]
        stream.data_received(encoded(*many))
        stream.data_received(encoded(Applied(1)))
        assert taken == [] and transport.log == [("pause_reading",)] * 2
        await stream.heard()
        assert list(stream.messages()) == [*many, Applied(1)]
        stream.go_on()
        assert transport.log[-1] == ("resume_reading",)
        stream.data_received(encoded(Applied(2)))
        assert taken == [Applied(2)]

    asyncio.run(play())


@pytest.mark.parametrize(
    "data",
    [(CONTROL_BYTES_MAX + 1).to_bytes(4, "little"), b"\1\0\0\0\xc1"],
    ids=["too long", "damaged"],
)
def test_what_cannot_be_read_ends_the_stream(data: bytes) -> None:
    async def play() -> None:
        stream, _ = stream_of([])
        stream.data_received(data)
        with pytest.raises(msgspec.DecodeError):
            await stream.heard()

    asyncio.run(play())


def test_what_is_said_in_one_turn_leaves_in_one_write() -> None:
    async def play() -> None:
        stream, transport = stream_of([])
        stream.send(Applied(1))
        stream.send(ConnectionDown("a"))
        assert transport.log == []
        await asyncio.sleep(0)
        assert transport.log == [("write", encoded(Applied(1), ConnectionDown("a")))]
        stream.hold()
        stream.send(Applied(2))
        await asyncio.sleep(0)
        assert len(transport.log) == 1
        stream.flush()
        assert transport.log[1] == ("write", encoded(Applied(2)))
        stream.send(Applied(3))
        stream.connection_lost(None)
        await asyncio.sleep(0)
        assert len(transport.log) == 2
        with pytest.raises(ConnectionResetError):
            await stream.heard()

    asyncio.run(play())


def test_an_answer_to_binds_that_cannot_be_taken_leaves_nothing_unanswered() -> None:
    runs = BindRuns()
    runs.first = lambda run: None

    def send(ask: Ask) -> BindRun:
        assert isinstance(ask.what, BindMany)
        return BindRun(runs, ask.what.vhost, ask.what.binds)

    def fail(run: BindRun, count: int, bound: int, answer: Answer) -> None:
        raise ValueError("a fault of ours")

    requests = CatalogRequests(lambda ask: None, send, runs)
    requests.answered_ahead = fail
    requests.ask_again()
    run = requests.add_ahead(BindMany("/", [("e", "q", key) for key in "abc"], True), "a", "u")
    assert run is not None and runs.unanswered == 3
    requests.answered(Answer(1, result={"binds": 1}))
    assert run.ends == [("e", "q", "b"), ("e", "q", "c")] and requests.runs() == [run]
    requests.answered(Answer(1))
    assert runs.unanswered == 0 and requests.runs() == []
