"""The numbers of a queue that somebody asks for are those of lists, whatever happened to it."""

from __future__ import annotations

import struct
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardmq.shardd import stats
from shardmq.shardd.queues import Queue, Window, limits_of
from shardmq.shardd.queues.allotment import Allotment
from shardmq.shardd.queues.consumers import Consumer
from shardmq.shardd.queues.entry import LASTING_KIND, TRANSIENT_KIND
from shardmq.shardd.queues.heads import MIXED_MAX
from tests.queues.test_queue_history import ARGUMENTS, BY_PRIORITY, STEPS, Both
from tests.support.dict_store import DictArrival, DictStore
from tests.support.model_queue import Message

KINDS = st.sampled_from(["persistent", "transient", "mixed"])
HALF_LIFE_MS = 1000.0


class Numbers(Both):
    """A queue and its model, with properties of messages and with the time that passes."""

    def __init__(self, arguments: dict[str, Any], kind: str, is_durable: bool) -> None:
        self.kind = kind
        super().__init__(arguments, self._properties)
        self.is_durable = is_durable
        self.queue.backlog.durable = is_durable
        self.published_at: dict[int, int] = {}
        self.share, self.is_stuck, self.had_consumers = 1.0, False, False

    def _is_persistent(self, message: Message) -> bool:
        return self.kind == "persistent" or (self.kind == "mixed" and message.id % 3 > 0)

    def _timestamp(self, message: Message) -> int | None:
        return message.id * 7 % 50 + 100 if message.id % 4 else None

    def _properties(self, message: Message) -> bytes:
        mode, timestamp = 1 + self._is_persistent(message), self._timestamp(message)
        if timestamp is None:
            return struct.pack(">HB", 0x1000, mode)
        return struct.pack(">HBQ", 0x1040, mode, timestamp)

    def kinds_of(self, messages: list[Message]) -> int:
        self.published_at.update((each.id, self.now) for each in messages)
        kinds = 0
        for each in messages:
            kinds |= LASTING_KIND if self._is_persistent(each) else TRANSIENT_KIND
        return kinds

    def wait(self, a: int, b: int) -> None:
        self.store.note_time(self.now)
        before = self.now
        super().wait(a, b)
        for _ in range(self.now - before):
            weight = 0.5 ** (1 / HALF_LIFE_MS)
            self.share = self.share * weight + (0.0 if self.is_stuck else 1 - weight)

    def turn(self, a: int, b: int) -> None:
        super().turn(a, b)
        if self.model.consumers:
            self.is_stuck = bool(self.model.ready)

    def compare(self) -> None:
        super().compare()
        if self.model.consumers and not self.had_consumers:
            self.share, self.is_stuck = 1.0, False
        self.had_consumers = bool(self.model.consumers)
        held = [each for _, consumer in self.pairs for each in consumer.held.values()]
        held += [*self.got.values(), *self.model.resting]
        there = [*self.model.ready, *held]
        told = stats.of_queue(self.queue, self.now)
        firsts = [*self.model.ready[:1], *sorted(held, key=lambda each: each.id)[:1]]
        timestamps = [self._timestamp(each) for each in firsts]
        assert told.head_timestamp == min(
            (each for each in timestamps if each is not None), default=None
        )
        ages = [self.now - self.published_at[each.id] for each in there]
        assert told.oldest_ms == max(ages, default=None)
        persistent = [each for each in there if self.is_durable and self._is_persistent(each)]
        if self.kind != "mixed" or len(there) <= MIXED_MAX:
            size = sum(each.size for each in persistent)
            assert (told.persistent, told.persistent_bytes) == (len(persistent), size)
        share = self.share if self.model.consumers else 0.0
        assert abs(told.utilisation - share) < 1e-9


@settings(max_examples=200, deadline=None)
@given(ARGUMENTS, STEPS, KINDS, st.booleans())
@example({"x-max-priority": 2}, BY_PRIORITY, "mixed", True)
def test_a_queue_tells_what_its_messages_are(
    arguments: dict[str, Any],
    steps: list[tuple[str, int, int]],
    kind: str,
    is_durable: bool,
) -> None:
    both = Numbers(arguments, kind, is_durable)
    for act, a, b in steps:
        getattr(both, act)(a, b)
        both.compare()


def _queue_of(store: DictStore, messages: list[bytes], kinds: int) -> Queue:
    queue = Queue(1, store, limits_of({}))
    for message in messages:
        arrival = DictArrival(1, array_of(store.put([1], message)), 1)
        arrival.kinds = kinds
        queue.publish(arrival, 0)
    return queue


def array_of(*entries: int) -> Any:
    from array import array

    return array("Q", entries)


def _message(properties: bytes, body: bytes = b"x") -> bytes:
    return struct.pack("<IIBB", len(body), len(properties), 0, 0) + properties + body


def test_many_messages_of_both_kinds_are_not_counted_one_by_one() -> None:
    store = DictStore()
    queue = _queue_of(store, [_message(b"")] * (MIXED_MAX + 1), TRANSIENT_KIND | LASTING_KIND)
    told = stats.of_queue(queue, 0)
    assert (told.persistent, told.persistent_bytes) == (None, None)
    queue.purge()
    assert stats.of_queue(queue, 0).persistent == 0


def test_a_timestamp_is_found_behind_all_other_properties() -> None:
    headers = b"\0\0\2\0" + b"h" * 512  # longer than the first look
    before = b"\4text\4gzip" + headers + b"\2\5" + b"\2id" + b"\5reply" + b"\00260" + b"\3mid"
    properties = struct.pack(">H", 0xFFC0) + before + struct.pack(">Q", 1_700_000_000)
    for end, timestamp in ((len(properties), 1_700_000_000), (len(properties) - 1, None)):
        store = DictStore()
        queue = _queue_of(store, [_message(properties[:end], b"")], LASTING_KIND)
        assert stats.of_queue(queue, 0).head_timestamp == timestamp


def test_a_message_that_cannot_be_read_has_no_timestamp() -> None:
    store = DictStore()
    queue = _queue_of(store, [_message(struct.pack(">HQ", 0x40, 9))], LASTING_KIND)
    store.messages = dict.fromkeys(store.messages, b"")
    assert stats.of_queue(queue, 0).head_timestamp is None


def test_the_first_message_is_read_once() -> None:
    store = DictStore()
    queue = _queue_of(store, [_message(struct.pack(">HQ", 0x40, 9))] * 2, LASTING_KIND)
    assert [stats.of_queue(queue, now).head_timestamp for now in (0, 1)] == [9, 9]
    store.messages.clear()  # reading again would fail
    assert stats.of_queue(queue, 2).head_timestamp == 9


def test_a_queue_was_last_used_when_it_counted_something_or_was_asked() -> None:
    store = DictStore()
    queue = _queue_of(store, [], LASTING_KIND)
    assert stats.of_queue(queue, 50).used_at == 0
    queue.publish(DictArrival(1, array_of(store.put([1], _message(b""))), 1), 60)
    assert stats.of_queue(queue, 70).used_at == 70, "since the last look"
    assert stats.of_queue(queue, 90).used_at == 70
    queue.get(None, 95)
    assert stats.of_queue(queue, 99).used_at == 99
    consumer = Consumer(queue, None, 1, Window(1 << 20))
    queue.attach(consumer)
    queue.detach(consumer, 200)
    assert stats.of_queue(queue, 300).used_at == 200


def test_a_consumer_is_busy_while_its_prefetch_its_window_or_its_limit_is_used_up() -> None:
    queue = Queue(1, DictStore(), limits_of({}))
    held = array_of(1 << 4), array_of(1)
    free = Consumer(queue, None, 1, Window(1), prefetch=1)
    assert not free.is_busy
    free.unacked.add(*held)
    assert free.is_busy
    free.unacked.settle(1, 1)
    assert not free.is_busy
    assert Consumer(queue, None, 2, Window(0)).is_busy
    limited = Consumer(queue, None, 3, Window(1), allotment=Allotment(1))
    assert not limited.is_busy, "it gets credit when a message comes"
    limited.unacked.add(*held)
    assert limited.is_busy
    assert limited.allotment is not None
    limited.allotment.allow(1, False)
    assert not limited.is_busy
