"""Random histories of one queue, everything that may happen to it, against lists."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardmq.shardd.queues import Allotment, Consumer, Getter, Queue, Window, limits_of
from tests.support.dict_store import DictArrival, DictStore
from tests.support.model_queue import Message, ModelConsumer, ModelQueue

START = 1000
HEAD_BYTES = 10  # of a stored message with empty names


def stored(message: Message, properties: bytes = b"") -> bytes:
    head = struct.pack("<IIBB", message.size, len(properties), 0, 0) + properties
    return (head + struct.pack("<I", message.id)).ljust(len(head) + message.size, b".")


def no_properties(message: Message) -> bytes:
    return b""


class Both:
    """A queue and its model, told the same."""

    def __init__(
        self,
        arguments: dict[str, Any],
        properties: Callable[[Message], bytes] = no_properties,
    ) -> None:
        self.arguments = arguments
        self.properties = properties
        self.store = DictStore()
        self.queue = Queue(1, self.store, limits_of(arguments), now=START)
        self.model = ModelQueue(limits_of(arguments))
        self.model.last_used = START
        self.now = START
        self.last = 0
        self.entry_of: dict[int, int] = {}
        self.pairs: list[tuple[Consumer, ModelConsumer]] = []
        self.getter = Getter()
        self.got: dict[int, Message] = {}
        self.given: list[tuple[int, int, bool, int]] = []
        self.reports: list[tuple[int, int, bool]] = []
        self.times: dict[int, int] = {}  # how often what was given had come back, if that was said

    # Outlet
    def deliver(
        self,
        consumer: Consumer,
        first: int,
        redelivered: bool,
        count: int,
        blob: bytes | memoryview,
    ) -> None:
        at = 0
        for i in range(count):
            size, props = struct.unpack_from("<II", blob, at)
            (number,) = struct.unpack_from("<I", blob, at + HEAD_BYTES + props)
            self.given.append((consumer.number, first + i, redelivered, number))
            at += HEAD_BYTES + props + size
        assert at == len(blob)

    def deliver_again(
        self, consumer: Consumer, first: int, times: int, count: int, blob: bytes | memoryview
    ) -> None:
        before = len(self.given)
        self.deliver(consumer, first, True, count, blob)
        self.times.update((number, times) for *_, number in self.given[before:])

    def passed(self, consumer: Consumer, offset: int) -> None:
        raise AssertionError("no stream")

    def report(self, allotment: Allotment) -> None:
        self.reports.append(allotment.report)

    # -- acts --------------------------------------------------------------------------------------

    def publish(self, a: int, b: int) -> None:
        messages = []
        for i in range(1 + a % 6):
            self.last += 1
            expires = self.now + (b * (i + 1)) % 30 if (a + i) % 4 == 0 else 0
            messages.append(
                Message(self.last, 4 + (a * b + i) % 9, (b + i) % 7 if a % 2 else 0, expires)
            )
        facts = array("Q", [each.priority << 56 | each.expires for each in messages])
        entries = array(
            "Q", [self.store.put([1], stored(each, self.properties(each))) for each in messages]
        )
        self.entry_of.update(zip((each.id for each in messages), entries, strict=True))
        size = sum(each.size for each in messages)
        indexes = array("I", range(10, 10 + len(messages)))
        arrival = DictArrival(
            1,
            entries,
            size,
            facts if any(facts) else None,
            indexes,
            kinds=self.kinds_of(messages),
        )
        refused = [i + 10 for i in self.model.publish(messages, self.now)]
        assert (self.queue.publish(arrival, self.now) or []) == refused

    def kinds_of(self, messages: list[Message]) -> int:
        return 0

    def turn(self, a: int, b: int) -> None:
        self.given.clear()
        self.reports.clear()
        self.times.clear()
        while self.queue.deliver(self.now, self, 1 << 20):
            pass
        self.model.deliver(self.now)
        # Each consumer's deliveries in order; between consumers only who gets what counts.
        assert sorted(self.given) == sorted(self.model.given)
        assert self.reports == self.model.reports
        assert self.times == self.model.times_given
        due = self.queue.next_due()
        assert due is None or due > self.now or self.queue.expired_itself(self.now)

    def wait(self, a: int, b: int) -> None:
        self.now += 1 + a % 12
        assert self.queue.expired_itself(self.now) == self.model.expired_itself(self.now)

    def attach(self, a: int, b: int) -> None:
        exclusive = a % 11 == 0
        assert self.queue.consumers.refuses(exclusive) == self.model.refuses(exclusive)
        if self.model.refuses(exclusive) or len(self.model.consumers) > 4:
            return
        number = len(self.pairs)
        more: dict[str, Any] = {
            "no_ack": b % 5 == 0,
            "priority": (0, 0, 0, 3, -1)[a % 5],
            "prefetch": (0, 1, 2, 5)[b % 4],
            "exclusive": exclusive,
        }
        allotment = Allotment(number) if (a + b) % 6 == 0 else None
        consumer = Consumer(self.queue, None, number, Window(1 << 30), allotment=allotment, **more)
        model = ModelConsumer(number, allowed=None if allotment is None else 0, **more)
        self.queue.attach(consumer)
        self.model.attach(model)
        self.pairs.append((consumer, model))

    def detach(self, a: int, b: int) -> None:
        if self.pairs:
            consumer, model = self.pairs[a % len(self.pairs)]
            self.queue.detach(consumer, self.now)
            self.model.detach(model, self.now)

    def release(self, a: int, b: int) -> None:
        if self.pairs:
            consumer, model = self.pairs[a % len(self.pairs)]
            self.queue.release(consumer, self.now)
            self.model.release(model, self.now)

    def allow(self, a: int, b: int) -> None:
        """Give credit to consumers with a shared limit."""
        for consumer, model in self.pairs:
            if model.allowed is not None and not model.detached and (a + model.number) % 2:
                assert consumer.allotment is not None
                model.allowed = max(model.allowed, model.used) + b % 5
                model.drains = b % 3 == 0
                assert not consumer.allotment.allow(
                    model.allowed, model.drains
                )  # its queue says so later

    def limit(self, a: int, b: int) -> None:
        """Let a shared limit come, take credit back, or let the limit go."""
        if not self.pairs:
            return
        consumer, model = self.pairs[a % len(self.pairs)]
        if consumer.allotment is None:
            consumer.allotment = Allotment(consumer.number, used=consumer.delivered)
            self.queue.consumers.has_allotments = True
        if b % 2 == 0:
            # The front door has not heard of the last deliveries yet.
            model.allowed = (
                model.used - min(a % 3, model.used) if model.allowed is None else model.allowed
            )
            model.used, model.said, model.drains = max(model.used, model.allowed), False, False
            consumer.allotment.stop(model.allowed)
            assert consumer.allotment.report == (model.number, model.used, False)
        else:
            model.allowed, model.drains = None, False
            consumer.allotment.allow(None, False)

    def settle(self, a: int, b: int) -> None:
        """Settle a range of the deliveries of one consumer; some may be settled already."""
        holding = [pair for pair in self.pairs if pair[1].held]
        if not holding:
            return
        consumer, model = holding[a % len(holding)]
        first = sorted(model.held)[b % len(model.held)]
        numbers = [number for number in sorted(model.held) if first <= number <= first + a % 4]
        entries, size = consumer.unacked.settle(first, first + a % 4)
        self.end(entries, size, [model.held.pop(number) for number in numbers], a + b)

    def get(self, a: int, b: int) -> None:
        expected = self.model.get(self.now)
        got = self.queue.get(self.getter if a % 3 else None, self.now)
        if expected is None:
            assert got is None
            return
        assert got is not None
        assert (got[0], got[2]) == (
            stored(expected, self.properties(expected)),
            expected.redelivered,
        )
        assert got[3] == (expected.returns if self.model.counts_returns else 0)
        if a % 3:
            self.got[got[1]] = expected

    def settle_got(self, a: int, b: int) -> None:
        if self.got:
            number = sorted(self.got)[a % len(self.got)]
            ((_, entries, size),) = self.getter.settle(number, number)
            self.end(entries, size, [self.got.pop(number)], a + b)

    def end(self, entries: array[int], size: int, messages: list[Message], how: int) -> None:
        act = ("ack", "ack", "reject", "requeue", "requeue", "give_back")[how % 6]
        getattr(self.queue, act)(entries, size)
        getattr(self.model, act)(messages)

    def purge(self, a: int, b: int) -> None:
        if a % 4 == 0:
            assert self.queue.purge() == self.model.purge()

    def change(self, a: int, b: int) -> None:
        more = {"x-max-length": b, "x-single-active-consumer": a % 2 == 0, "x-expires": 1 + b}
        arguments = self.arguments if a % 3 == 0 else self.arguments | more
        if a % 7 == 0:
            arguments = arguments | {"x-delayed-retry-type": "disabled"}
        self.queue.change(limits_of(arguments), self.now)
        self.model.change(limits_of(arguments), self.now)

    def depart(self, a: int, b: int) -> None:
        """Hand over some departing messages.

        The messages come back in their old order, or they arrive: all of them, or all but those
        that were not taken.
        """
        departures = self.queue.backlog.departures
        if departures is None or not departures.waits:
            return
        reason, entries = departures.first(1 + a % 4)
        departures.hand_over(1, len(entries))
        assert {why for _, why in self.model.departed[: len(entries)]} == {reason}
        if b % 3 == 0:
            departures.take_back()
            return
        left = [(0, 0)] if b % 3 == 1 else []
        self.store.settle(1, departures.take_off(1, left), True)
        self.model.departed[len(left) : len(entries)] = []

    # -- the same ----------------------------------------------------------------------------------

    def compare(self) -> None:
        queue, model = self.queue, self.model
        held = [each for _, consumer in self.pairs for each in consumer.held.values()] + list(
            self.got.values()
        )
        held += model.resting
        backlog, departures = queue.backlog, queue.backlog.departures
        assert (backlog.ready_count, backlog.ready_bytes) == (len(model.ready), model.ready_bytes)
        assert (backlog.unacked_count, backlog.unacked_bytes) == (
            len(held),
            sum(each.size for each in held),
        )
        assert (queue.counters.let_go, queue.counters.acked) == (model.let_go, model.acked)
        marks = {self.entry_of[each.id] | each.redelivered for each in model.ready}
        marks |= {self.entry_of[each.id] | 1 for each in held}
        departed = [self.entry_of[number] for number, _ in model.departed]
        assert [entry & ~1 for entry in (departures.entries() if departures else [])] == departed
        marks |= {entry | 1 for entry in departed}
        assert list(queue.live()) == sorted(marks)
        assert self.store.live.get(1, set()) == {entry & ~1 for entry in marks}


def some(name: str, *values: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.sampled_from([{}, {}, *({name: value} for value in values)])


ARGUMENTS = st.builds(
    lambda *parts: {name: value for part in parts for name, value in part.items()},
    some("x-message-ttl", 0, 5, 20),
    some("x-max-length", 0, 1, 4),
    some("x-max-length-bytes", 10, 40),
    some("x-overflow", "reject-publish", "drop-head", "reject-publish-dlx"),
    some("x-dead-letter-exchange", "dlx"),
    some("x-max-priority", 2, 5),
    some("x-delivery-limit", 0, 2),
    some("x-delayed-retry-min", 1, 7, 40),
    some("x-delayed-retry-max", 20),
    some("x-delayed-retry-type", "failed", "disabled"),
    some("x-delayed-retry-multiplier", 1, 3),
    some("x-single-active-consumer", True),
    some("x-expires", 15),
)
ACTS = [
    *["publish", "turn", "settle"] * 4,
    *["wait", "attach", "allow", "get", "settle_got"] * 2,
    *["detach", "release", "purge", "change", "limit", "depart"],
]
STEPS = st.lists(
    st.tuples(st.sampled_from(ACTS), st.integers(0, 30), st.integers(0, 30)),
    min_size=10,
    max_size=60,
)


# Of two messages in one round the first needs no ack, and the second comes back: it still expires.
NO_ACK_FIRST = [
    ("publish", 0, 0),
    ("attach", 1, 1),
    ("attach", 1, 0),
    ("turn", 0, 0),
    ("publish", 0, 0),
    ("publish", 0, 0),
]
NO_ACK_FIRST += [("settle", 0, 0), ("turn", 0, 0), ("settle", 0, 3), ("get", 0, 0)]
# Handed out by priority, given up by age.
BY_PRIORITY = [
    *[("publish", 0, 0)] * 6,
    ("publish", 1, 0),
    ("attach", 0, 2),
    ("turn", 0, 0),
    ("release", 0, 0),
]


@settings(max_examples=200, deadline=None)
@given(ARGUMENTS, STEPS)
@example({}, NO_ACK_FIRST)
@example({"x-dead-letter-exchange": "dlx", "x-max-priority": 2, "x-delivery-limit": 0}, BY_PRIORITY)
def test_a_queue_does_what_lists_do(
    arguments: dict[str, Any], steps: list[tuple[str, int, int]]
) -> None:
    with patch("shardmq.shardd.queues.entry.FACT_RUNS_MIN", 3):
        both = Both(arguments)
        for act, a, b in steps:
            getattr(both, act)(a, b)
            both.compare()
        both.queue.drop()
        departures = both.queue.backlog.departures
        assert both.store.live.get(1, set()) == (
            {entry & ~1 for entry in departures.entries()} if departures else set()
        )


@settings(max_examples=100, deadline=None)
@given(STEPS, st.lists(st.integers(1, 60), min_size=1, max_size=3), st.integers(1, 80))
def test_windows_hold_back_but_lose_and_double_nothing(
    steps: list[tuple[str, int, int]], rooms: list[int], bytes_max: int
) -> None:
    """Windows and passes are narrow.

    Any consumer may get a message, but the order of each and the bounds hold.
    """
    both = Both({})
    queue = both.queue
    windows = [Window(room) for room in rooms]
    consumers = [Consumer(queue, None, number, window) for number, window in enumerate(windows)]
    for consumer in consumers:
        queue.attach(consumer)
    seen: list[int] = []
    for act, a, b in steps:
        if act == "publish":
            both.publish(1, b)
            continue
        both.given.clear()
        before = [window.room for window in windows]
        more = queue.deliver(START, both, bytes_max)
        for number, window in enumerate(windows):
            mine = [message for who, _, _, message in both.given if who == number]
            assert mine == sorted(mine)
            assert before[number] > 0 or not mine
            assert window.room > -HEAD_BYTES - 13  # one message beyond
        seen += [message for *_, message in both.given]
        assert more or not queue.backlog.ready_count or all(window.room <= 0 for window in windows)
        windows[a % len(windows)].free(b * 4)
    for window in windows:
        window.full = window.room = 1 << 20
    both.given.clear()
    while queue.deliver(START, both, 1 << 20):
        pass
    assert sorted(seen + [message for *_, message in both.given]) == list(range(1, both.last + 1))
