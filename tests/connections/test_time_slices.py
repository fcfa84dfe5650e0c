"""No client waits long for another one's work, and work in slices gives the same result."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.broker.amqp import Event, Publishes, copies_by_channel, things_in
from shardmq.broker.front_door.connection.connection import ClientConnection
from shardmq.broker.front_door.publish.dedup_service import DedupAnswers
from shardmq.broker.front_door.publish.effects import Published
from shardmq.broker.front_door.publish.replies import Reply
from shardmq.broker.front_door.publish.transactions import Transaction
from shardmq.broker.front_door.time_slices import ROUND_S, SLICE_S_MAX, SLICE_S_MIN, TimeSlices
from shardmq.broker.model.changes import BindingPut, ExchangePut, QueuePut
from tests.support.fake_publishing import (
    NOW_MS,
    Links,
    Publisher,
    catalog,
    events_of,
    publishing_of,
)

# -- the length of slices --------------------------------------------------------------------------


class Loop:
    """An event loop without sockets.

    It runs callbacks in order, and only work takes time.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.ready: deque[Callable[[], None]] = deque()

    def clock(self) -> float:
        return self.now

    def run_round(self) -> None:
        for _ in range(len(self.ready)):
            self.ready.popleft()()


class Busy:
    """A client that always has more to do: steps of a fixed time, as many as its slice lets."""

    def __init__(self, loop: Loop, slices: TimeSlices, step_s: float) -> None:
        self.loop, self.slices, self.step_s = loop, slices, step_s
        self.served_s = 0.0
        self.is_gone = False
        loop.ready.append(self.work)

    def work(self) -> None:
        if self.is_gone:
            return
        self.slices.begin()
        while True:
            self.loop.now += self.step_s
            self.served_s += self.step_s
            if self.slices.is_over():
                break
        self.loop.ready.append(self.work)


@given(st.lists(st.floats(1e-6, 2e-4), min_size=1, max_size=60))
def test_a_round_over_busy_clients_takes_about_what_it_should(steps_s: list[float]) -> None:
    loop = Loop()
    slices = TimeSlices(loop.clock, loop.ready.append)
    clients = [Busy(loop, slices, step_s) for step_s in steps_s]
    for _ in range(3):
        loop.run_round()
    begun, served = loop.now, [client.served_s for client in clients]
    loop.run_round()
    # Each slice may end one step late.
    assert loop.now - begun <= max(ROUND_S, len(clients) * SLICE_S_MIN) + sum(steps_s) + 1e-9
    for client, before in zip(clients, served, strict=True):
        had = client.served_s - before
        assert (
            min(SLICE_S_MAX, ROUND_S / len(clients)) - 1e-9
            <= had
            <= SLICE_S_MAX + client.step_s + 1e-9
        )


def test_a_client_that_is_alone_again_has_long_slices_again() -> None:
    loop = Loop()
    slices = TimeSlices(loop.clock, loop.ready.append)
    others = [Busy(loop, slices, 1e-5) for _ in range(40)]
    for _ in range(3):
        loop.run_round()
    for other in others:
        other.is_gone = True
    alone = Busy(loop, slices, 1e-5)
    for _ in range(3):
        loop.run_round()
    before = alone.served_s
    loop.run_round()
    assert alone.served_s - before >= SLICE_S_MAX - 1e-9


# -- what is published slice by slice --------------------------------------------------------------

NOW_NS = NOW_MS * 1_000_000

MESSAGE = st.tuples(
    st.sampled_from([1, 2, 3]),
    st.sampled_from(
        [
            ("", "a"),
            ("", "nobody"),
            ("direct", "k1"),
            ("direct", "k2"),
            ("direct", "k3"),
            ("headers", ""),
        ]
    ),
    st.sampled_from(
        [{}, {"headers": {"one": 1}}, {"headers": {"CC": ["k2"]}}, {"headers": {"CC": 5}}]
    ),
    st.booleans(),
)


def outcome(messages: list[Any], is_over: Callable[[], bool] | None) -> tuple[Any, ...]:
    """Publish them, at once or in slices between which the bytes that were read are overwritten."""
    links = Links()
    publishing = publishing_of(catalog(), links)
    client = Publisher(publishing)
    for event in events_of(messages):
        read = bytearray(event.buffer)
        event = Publishes(memoryview(read), event.table, event.count)
        if is_over is None:
            client.publish(event)
            continue
        while event.done < event.count:
            before = event.done
            client.publish(event, is_over)
            assert event.done > before  # a slice that is over at once gets on all the same
            event.keep()
            read[:] = bytes(len(read))
    for waiting in links.waiting:
        waiting.confirmed()
    client.answer_confirms()
    counts = publishing._counts
    published = [channel.published for channel in client.channels.values()]
    return links.stored(), client.said, client.failed, published, counts.received, counts.returned


@settings(max_examples=150)
@given(st.lists(MESSAGE, max_size=12), st.lists(st.booleans(), min_size=1, max_size=5))
def test_what_is_published_in_slices_is_what_is_published_at_once(
    messages: list[Any], overs: list[bool]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: NOW_NS)
        turns = iter(overs * 100)
        whole, sliced = outcome(messages, None), outcome(messages, lambda: next(turns))
    stored, said, *rest = whole
    assert sliced[0] == stored
    assert b"".join(sliced[1]) == b"".join(said)
    assert [*sliced[2:]] == rest


def test_a_slice_ends_when_enough_went_to_many_queues() -> None:
    links, made = Links(), catalog()
    made.apply(ExchangePut("/", "fan", "fanout"))
    for number in range(200):
        made.apply(QueuePut("/", f"fan.{number}", 10 + number, number % 2))
        made.apply(BindingPut("/", "fan", "queue", f"fan.{number}", ""))
    publishing = publishing_of(made, links)
    client = Publisher(publishing)
    (event,) = events_of([(1, ("fan", ""), {}, False)] * 500)
    slices = 0
    while event.done < event.count:
        before, slices = event.done, slices + 1
        client.publish(event, lambda: False)
        assert 0 < event.done - before <= 1 + (64 << 10) // (4 * 2 * 99)
    assert slices >= 500 // 84
    assert len(links.stored()) == 2 * 500


def test_the_read_that_a_begun_event_lies_in_may_be_overwritten() -> None:
    """The comparison above would notice an event that was not kept."""
    messages = [(1, ("headers", ""), {"headers": {"one": 1}}, False)] * 4
    whole = outcome(messages, None)
    keep, Publishes.keep = Publishes.keep, lambda event: None  # type: ignore[method-assign,assignment]
    try:
        with pytest.raises(Exception):  # noqa: B017 # zeroes are no message, whatever that leads to
            assert outcome(messages, lambda: True) == whole
    finally:
        Publishes.keep = keep  # type: ignore[method-assign]


class Requester:
    """A consumer of direct replies at this front door.

    It takes a reply (True) or leaves it to its shard (False), as it is told.
    """

    def __init__(self, *takes: bool) -> None:
        self._takes = iter(takes)

    def takes(self, wanted: bool = True) -> bool:
        return next(self._takes)


REPLY_QUEUE = "amq.rabbitmq.reply-to.1"


def test_a_reply_that_goes_by_its_shard_goes_before_the_slice_ends_and_takes_no_other_with_it() -> (
    None
):
    """A publish of another client in between would go by the shard unasked.

    The next reply of that client would then overtake it.
    """
    links, handed_over = Links(), []

    def hand_over(requester: Requester, event: Publishes, first: int, count: int) -> Reply:
        handed_over.append((bytes(event.buffer).count(b"second"), first, count))
        return Reply(requester, b"")  # type: ignore[arg-type]

    made = catalog()
    made.apply(QueuePut("/", REPLY_QUEUE, 3, 0))
    replies = SimpleNamespace(here={3: Requester(True, False, True)}, hand_over=hand_over)
    publishing = publishing_of(made, links, replies=replies)
    clients = Publisher(publishing), Publisher(publishing)
    one_and_a_reply = [(1, ("direct", "k2"), {}, False), (1, ("", REPLY_QUEUE), {}, False)]
    (learnt,), (first,) = events_of(one_and_a_reply), events_of(one_and_a_reply)
    (second,) = events_of([(1, ("", REPLY_QUEUE), {"message_id": "second"}, False)])
    clients[0].publish(learnt)
    clients[0].publish(first, lambda: True)
    assert first.done == 2
    clients[1].publish(second, lambda: True)
    assert handed_over == [(0, 1, 1), (1, 0, 1)]
    stored = [(queues, message) for _, queues, message in links.stored() if queues == (3,)]
    assert len(stored) == 1 and b"second" not in stored[0][1]


# -- what is counted of it -------------------------------------------------------------------------


class Reader:
    """As much of a client and its front door as the handling of a read needs."""

    def __init__(self, events: list[Event], messages: int) -> None:
        """Make a connection each of whose slices publishes `messages` messages."""
        self.came = 0
        self.slices_taken = 0
        self.messages = messages
        self.published = False
        self._begun: Publishes | None = None
        amqp = SimpleNamespace(next_event=iter([*events, None]).__next__, opened=0, reopening=False)
        self.socket = SimpleNamespace(
            amqp=amqp, lost=False, paused=0, end_slice=lambda: None, gather=lambda: None
        )
        self.session = self.route_cache = None
        self.channels = SimpleNamespace(by_number={})
        self.work = SimpleNamespace(waiting=set())
        self.begin_slice, self.slice_is_over = lambda: None, lambda: False
        self.services = SimpleNamespace(
            publishing=SimpleNamespace(publish=self.publish),
            alarms=SimpleNamespace(text=""),
            loop=SimpleNamespace(pace=SimpleNamespace(came=self._come)),
        )

    def _come(self, things: int) -> None:
        self.came += things

    def publish(
        self, session: Any, cache: Any, channels: Any, event: Publishes, now_ms: int, is_over: Any
    ) -> Published:
        event.done = min(event.count, event.done + self.messages)
        return Published()

    def carry_out(self, published: Published) -> None: ...

    def _on_publishes(self, event: Publishes) -> None:
        ClientConnection._on_publishes(self, event)  # type: ignore[arg-type]

    def _handle(self, event: Event) -> None: ...

    def handle(self) -> None:
        """Handle all events, slice by slice."""
        while not self.slices_taken or self._begun is not None:
            self.slices_taken += 1
            ClientConnection.handle_events(self)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [1, 2, 3, 7, 100])
def test_what_comes_with_a_read_is_counted_once_however_often_it_is_cut(messages: int) -> None:
    events = events_of([(1, ("direct", "k1"), {}, False)] * 7)
    reader = Reader(list(events), messages)
    reader.handle()
    assert reader.slices_taken == -(-7 // messages)
    assert reader.came == sum(map(things_in, events)) == 7


def test_what_waits_for_its_channel_is_counted_with_the_read_it_came_with_and_not_again() -> None:
    publishing = publishing_of(catalog(), Links())
    client = Publisher(publishing)
    (event,) = events_of([(channel, ("direct", "k1"), {}, False) for channel in (1, 2, 1, 2, 2)])
    event.without = {2}  # its channel waits for another process
    client.publish(event)
    (copy,) = copies_by_channel(event, {2}).values()
    assert copy.count == 3
    client.publish(copy)
    assert [channel.published for channel in client.channels.values()] == [2, 3, 0]
    assert publishing._counts.received == 5
    assert sum(publishing._counts.sizes.classes) == 5


# -- what tasks do slice by slice ------------------------------------------------------------------


class Reservation:
    """Hears what a commit does with the room that was set aside for it."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def redeem(self) -> None:
        self.said.append("redeem")

    def rest(self) -> None:
        self.said.append("rest")

    def end(self) -> None:
        self.said.append("end")


class Transacting:
    """A client with a transaction that is about to be committed."""

    def __init__(self, messages: list[Any]) -> None:
        self.links = Links()
        self.publishing = publishing_of(catalog(), self.links)
        self.client = Publisher(self.publishing)
        self.channel = self.client.channels[1]
        self.channel.transaction = Transaction()
        for event in events_of(messages):
            self.client.publish(event)
        self.reservation = Reservation()
        self.stored: list[Any] = []
        self.client.between = self._let_others_go
        assert self.links.stored() == []

    def _let_others_go(self) -> None:
        assert not self.links.packer.take_touched()  # what leaves now is waited for
        assert self.reservation.said[-1] == "rest"  # what others publish is not of the transaction
        self.stored += self.links.stored()

    async def commit(self) -> bool:
        held = self.channel.transaction.take().publishes
        waits = await self.publishing.commit(
            self.client, self.channel, held, None, self.reservation, self.client
        )  # type: ignore[arg-type]
        self.stored += self.links.stored()
        assert not waits.done() or not self.links.waiting
        for waiting in self.links.waiting:
            waiting.confirmed()
        return await waits


@settings(max_examples=50)
@given(st.lists(MESSAGE, min_size=1, max_size=12), st.lists(st.booleans(), min_size=1, max_size=5))
def test_what_is_committed_in_slices_is_what_is_committed_at_once(
    messages: list[Any], overs: list[bool]
) -> None:
    messages = [(1, where, {}, False) for _, where, _, _ in messages]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: NOW_NS)
        whole, sliced = Transacting(messages), Transacting(messages)
        turns = iter(overs * 100)
        sliced.client.is_over = lambda: next(turns)
        assert asyncio.run(whole.commit()) and asyncio.run(sliced.commit())
    for shard in (0, 1):
        assert [one for one in sliced.stored if one[0] == shard] == [
            one for one in whole.stored if one[0] == shard
        ]
    assert whole.client.slices == 1
    assert whole.reservation.said == ["redeem", "end"]
    assert sliced.reservation.said == ["redeem", "rest"] * (sliced.client.slices - 1) + [
        "redeem",
        "end",
    ]
    assert sliced.client.slices == 1 + sum((overs * 100)[: len(messages) - 1])


def test_a_commit_goes_on_to_its_end_when_its_client_leaves() -> None:
    made = Transacting([(1, ("", "a"), {}, False)] * 10)
    made.client.is_over = lambda: True

    async def leave() -> None:
        task = asyncio.get_running_loop().create_task(made.commit())
        while made.client.slices < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while made.reservation.said[-1] != "end":
            await asyncio.sleep(0)

    asyncio.run(leave())
    assert len(made.stored) + len(made.links.stored()) == 10


def test_publishes_that_a_shard_is_asked_about_go_in_slices() -> None:
    async def publish_once(is_over: Callable[[], bool]) -> tuple[list[Any], int]:
        async def ask(wants: list[Any]) -> DedupAnswers:
            return DedupAnswers()

        links = Links()
        dedup = SimpleNamespace(ask=ask)
        publishing = publishing_of(catalog(), links, dedup=dedup)
        client = Publisher(publishing)
        client.is_over = is_over
        (event,) = events_of([(1, ("", "a"), {}, False)] * 10)
        await publishing.publish_deferred(
            client, client.channels, client.channels[1], event, client
        )
        return links.stored(), client.slices

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: NOW_NS)
        whole, few = asyncio.run(publish_once(lambda: False))
        sliced, many = asyncio.run(publish_once(lambda: True))
    assert sliced == whole and len(whole) == 10
    assert (few, many) == (3, 33)  # decided, asked about and sent: a slice for each message
