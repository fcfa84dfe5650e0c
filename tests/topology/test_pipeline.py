"""The order in which one channel's declares, binds and deletes are asked and answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import base, commands

from shardmq.broker.amqp.errors import ChannelException
from shardmq.broker.amqp.events import Binds
from shardmq.broker.front_door.hot_state import BindRun, BindRuns
from shardmq.broker.front_door.links.catalog_requests import RunWaits
from shardmq.broker.front_door.topology import pipeline
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    VhostPut,
)
from shardmq.broker.shared.control import (
    Answer,
    AnyRequest,
    Bind,
    BindMany,
)
from tests.support.catalogs import state
from tests.support.fake_binds_ahead import NOWHERE
from tests.topology.topology_play import PLAIN, SOURCE, Driver, FakeSession, run

Exchange, Queue = commands.Exchange, commands.Queue


def test_binds_of_what_exists_are_asked_without_waiting_for_answers() -> None:
    async def scenario() -> None:
        driver = Driver(FakeSession(SOURCE, PLAIN))
        driver.receive(
            *(Queue.Bind(queue="q", exchange="e", routing_key=str(n)) for n in range(100))
        )
        await driver.settle()
        assert [request.routing_key for request in driver.controller.asked] == [
            str(n) for n in range(100)
        ]  # type: ignore[union-attr]
        assert driver.replies == []
        driver.controller.answer_all()
        await driver.settle()
        assert driver.replies == ["Queue.BindOk"] * 100
        assert driver.idle == 1
        assert not driver.pipeline.busy

    run(scenario)


def test_a_run_of_binds_is_one_request() -> None:
    async def scenario() -> None:
        driver = Driver(FakeSession(SOURCE, PLAIN))
        ends = [("e", "q", str(n)) for n in range(100)]
        driver.receive(Binds(1, ends, nowait=False), Binds(1, ends, nowait=True))
        await driver.settle()
        assert driver.controller.asked == [BindMany("/", ends), BindMany("/", ends)]
        await driver.finish()
        assert driver.replies == ["Queue.BindOk"] * 100

    run(scenario)


def test_those_of_a_run_that_were_done_are_answered_before_the_failure() -> None:
    async def scenario() -> None:
        driver = Driver(FakeSession(SOURCE, PLAIN))
        driver.receive(
            Binds(1, [("e", "q", "a"), ("e", "q", "b")], False), Queue.Declare(queue="later")
        )
        driver.controller.catalog = Catalog()  # another connection was quicker
        for change in (VhostPut("/"), SOURCE):
            driver.controller.catalog.apply(change)
        await driver.finish()
        assert driver.replies == []
        (error,) = driver.failures
        assert isinstance(error, ChannelException)
        assert (error.code, error.text, error.class_id, error.method_id) == (
            404,
            "no queue 'q' in vhost '/'",
            50,
            20,
        )
        assert driver.session.catalog.queue("/", "later") is None

    run(scenario)


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_run_that_ends_early_is_answered_as_far_as_it_went(done: int) -> None:
    async def scenario() -> None:
        driver = Driver(FakeSession(SOURCE, PLAIN))
        driver.receive(Binds(1, [("e", "q", "a"), ("e", "q", "b"), ("e", "q", "c")], False))
        (_, outcome) = driver.controller.open.pop()
        outcome.set_result(Answer(1, 404, "no queue", {"done": done}))
        await driver.settle()
        assert driver.replies == ["Queue.BindOk"] * done
        (error,) = driver.failures
        assert str(error.text) == "no queue"  # type: ignore[attr-defined]

    run(scenario)


def test_who_binds_more_than_may_wait_is_not_read() -> None:
    async def scenario() -> None:
        driver = Driver(FakeSession(SOURCE, PLAIN))
        run_of = Binds(1, [("e", "q", str(n)) for n in range(256)], nowait=False)
        sent = 0
        while not driver.pipeline.full:
            driver.receive(run_of)
            sent += 1
        assert sent * 256 <= pipeline.PIPELINED_MAX + pipeline.WAITING_MAX + 512
        await driver.finish()
        assert driver.replies == ["Queue.BindOk"] * 256 * sent

    run(scenario)


def test_new_queues_and_their_binds_overlap() -> None:
    async def scenario() -> None:
        driver = Driver(FakeSession(SOURCE))
        for name in ("a", "b"):
            driver.receive(
                Queue.Declare(queue=name), Queue.Bind(queue=name, exchange="e", nowait=True)
            )
        await driver.settle()
        assert len(driver.controller.asked) == 4
        await driver.finish()
        assert driver.replies == ["Queue.DeclareOk"] * 2

    run(scenario)


def test_nothing_that_follows_a_failed_method_happens() -> None:
    async def scenario() -> None:
        driver = Driver(FakeSession(SOURCE, PLAIN))
        driver.receive(
            Queue.Bind(queue="q", exchange="e"),
            Queue.Bind(queue="q", exchange="missing"),
            Queue.Declare(queue="later"),
        )
        await driver.finish()
        assert driver.replies == ["Queue.BindOk"]
        assert [error.code for error in driver.failures] == [404]  # type: ignore[attr-defined]
        assert driver.session.catalog.queue("/", "later") is None
        assert driver.idle == 0

    run(scenario)


def test_the_next_method_waits_for_the_name_the_server_gives() -> None:
    async def scenario() -> None:
        driver = Driver(FakeSession(SOURCE))
        driver.receive(Queue.Declare(queue="", nowait=True), Queue.Bind(queue="", exchange="e"))
        await driver.finish()
        assert driver.controller.asked[1] == Bind(
            "/", "e", "queue", "amq.gen-made", "amq.gen-made", {}
        )
        assert driver.replies == ["Queue.BindOk"]

    run(scenario)


def test_after_close_nothing_more_is_asked_or_replied() -> None:
    async def scenario() -> None:
        driver = Driver(FakeSession(SOURCE, PLAIN))
        driver.receive(
            Queue.Purge(queue="missing"), *(Queue.Bind(queue="q", exchange="e") for _ in range(3))
        )
        driver.pipeline.close()
        await driver.settle()
        assert (driver.controller.asked, driver.replies, driver.failures, driver.idle) == (
            [],
            [],
            [],
            0,
        )
        driver.receive(Queue.Bind(queue="q", exchange="e"))
        assert not driver.pipeline.busy

    run(scenario)


def test_names_may_be_of_any_letters() -> None:
    async def scenario() -> None:
        driver = Driver(FakeSession(SOURCE, PLAIN))
        driver.receive(Queue.Declare(queue="mine"))
        await driver.finish()
        method = Queue.Declare()
        method.queue = "grüße 你好"
        driver.receive(method)
        await driver.finish()
        assert driver.replies[-1] == "Queue.DeclareOk" and driver.failures == []

    run(scenario)


class Ahead:
    """Binds that are put in force ahead, all of which outlive the broker."""

    epoch = 0

    def __init__(self) -> None:
        self.runs = BindRuns()
        self.runs.first = lambda run: None
        self.runs.waited_pipe = NOWHERE
        self.run: BindRun | None = None

    def may_bind(self, vhost: str, source: str, queue: str) -> bool:
        return True

    def outlive(self, vhost: str, source: str, queue: str) -> bool:
        return True

    def bind(
        self, vhost: str, ends: list[Any], owner: str, user: str, waits: RunWaits
    ) -> BindRun | None:
        self.run = BindRun(self.runs, vhost, ends)
        self.run.go_on(lambda: (b"head", b"tail"))
        self.run.waits = waits
        return self.run

    def queue_is_there(self, vhost: str, name: str) -> None: ...

    def answer(self, count: int, bound: int, code: int = 0) -> None:
        """Answer the first binds of the run; so many of them are recorded."""
        assert self.run is not None and self.run.waits is not None
        self.run.answered(count)
        self.run.waits.came(bound, code, "no queue")


def waiting_driver() -> tuple[Driver, Ahead]:
    driver, ahead = Driver(FakeSession(SOURCE, PLAIN)), Ahead()
    driver.controller.ahead = ahead  # type: ignore[assignment]
    return driver, ahead


ENDS = [("e", "q", "a"), ("e", "q", "b"), ("e", "q", "c")]


def test_binds_of_a_run_are_answered_when_they_are_recorded_and_in_order() -> None:
    async def scenario() -> None:
        driver, ahead = waiting_driver()
        assert driver.pipeline.bind_at_once(ENDS[:], False) and driver.pipeline.busy
        assert driver.waits == 1 and driver.replies == []
        assert driver.pipeline.bind_at_once(ENDS[:], False) is None
        driver.receive(
            Binds(1, ENDS[:1], False), Queue.Declare(queue="new"), Queue.Purge(queue="q")
        )
        await driver.settle()
        driver.controller.answer_all()  # before the run is
        await driver.settle()
        assert driver.replies == [] and driver.pipeline.busy and driver.idle == 0
        ahead.answer(1, 1)
        assert driver.replies == [] and driver.pipeline.busy
        ahead.answer(2, 2)
        await driver.finish()
        assert driver.replies == [*["Queue.BindOk"] * 4, "Queue.DeclareOk", "Queue.PurgeOk"]
        assert driver.idle == 1 and driver.failures == []

    run(scenario)


def test_a_run_goes_on_when_its_binds_are_answered() -> None:
    async def scenario() -> None:
        driver, ahead = waiting_driver()
        made = driver.pipeline.bind_at_once(ENDS[:1], False)
        assert made is not None and not made.bind(b"early")
        for at in range(1, 4):
            ahead.answer(1, 1)
            assert driver.replies == ["Queue.BindOk"] * at and driver.idle == at
            assert not driver.pipeline.busy
            assert made.bind(b"k") and driver.pipeline.busy and driver.waits == at + 1
        driver.pipeline.close()
        ahead.answer(1, 1)
        assert len(driver.replies) == 3 and driver.idle == 3

    run(scenario)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_run_that_is_refused_is_answered_as_far_as_it_went(bound: int) -> None:
    async def scenario() -> None:
        driver, ahead = waiting_driver()
        made = driver.pipeline.bind_at_once(ENDS[:], False)
        driver.receive(Queue.Declare(queue="later", arguments={"x": 1}))
        ahead.answer(3, bound, 404)
        await driver.settle()
        assert driver.replies == ["Queue.BindOk"] * bound and driver.idle == 0
        (error,) = driver.failures
        assert str(error.text) == "no queue"  # type: ignore[attr-defined]
        assert driver.controller.asked == [] and made is not None and not made.bind(b"k")

    run(scenario)


def test_a_channel_that_has_ended_leaves_no_run_to_the_next_of_its_number() -> None:
    async def scenario() -> None:
        driver, ahead = waiting_driver()
        made = driver.pipeline.bind_at_once(ENDS[:1], False)
        ahead.answer(1, 1)
        driver.pipeline.close()
        assert made is not None and not made.bind(b"k") and driver.replies == ["Queue.BindOk"]

    run(scenario)


def test_who_wants_no_answer_goes_the_usual_way() -> None:
    async def scenario() -> None:
        driver, _ = waiting_driver()
        assert driver.pipeline.bind_at_once(ENDS[:], True) is None and not driver.pipeline.busy

    run(scenario)


def in_runs(history: list[base.Frame]) -> list[base.Frame | Binds]:
    """As the codec tells them."""
    told: list[base.Frame | Binds] = []
    for method in history:
        if not isinstance(method, Queue.Bind):
            told.append(method)
        elif told and isinstance(told[-1], Binds) and told[-1].nowait == method.nowait:
            told[-1].ends.append((method.exchange, method.queue, method.routing_key))
        else:
            told.append(
                Binds(1, [(method.exchange, method.queue, method.routing_key)], method.nowait)
            )
    return told


def singly(asked: list[AnyRequest]) -> list[AnyRequest]:
    return [
        each
        for request in asked
        for each in (
            [
                Bind(request.vhost, source, "queue", queue, key, {})
                for source, queue, key in request.binds
            ]
            if isinstance(request, BindMany)
            else [request]
        )
    ]


names = st.sampled_from(["q", "new", "other", "missing", ""])
exchanges = st.sampled_from(["e", "missing", "new"])
methods = st.one_of(
    st.builds(Queue.Declare, queue=names, passive=st.booleans(), nowait=st.booleans()),
    st.builds(Exchange.Declare, exchange=exchanges, passive=st.booleans()),
    st.builds(
        Queue.Bind,
        queue=names,
        exchange=exchanges,
        routing_key=st.sampled_from(["", "k"]),
        nowait=st.booleans(),
    ),
    st.builds(
        Queue.Bind,
        queue=st.just("q"),
        exchange=st.just("e"),
        routing_key=st.sampled_from(["a", "b"]),
    ),
    st.builds(Exchange.Bind, destination=exchanges, source=exchanges),
    st.builds(Queue.Delete, queue=names),
    st.builds(Exchange.Delete, exchange=exchanges),
    st.builds(Queue.Unbind, queue=names, exchange=exchanges),
    st.builds(Queue.Purge, queue=names),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(methods, max_size=12))
def test_pipelined_methods_end_as_if_each_had_waited_for_the_one_before(
    history: list[base.Frame],
) -> None:
    async def overlapping() -> tuple[Any, ...]:
        driver = Driver(FakeSession(SOURCE, PLAIN))
        driver.receive(*in_runs(history))
        await driver.finish()
        return (
            singly(driver.controller.asked),
            driver.replies,
            [str(e) for e in driver.failures],
            state(driver.session.catalog),
        )

    async def one_by_one() -> tuple[Any, ...]:
        driver = Driver(FakeSession(SOURCE, PLAIN))
        for method in history:
            driver.receive(method)
            await driver.finish()
        return (
            driver.controller.asked,
            driver.replies,
            [str(e) for e in driver.failures],
            state(driver.session.catalog),
        )

    assert asyncio.run(overlapping()) == asyncio.run(one_by_one())
