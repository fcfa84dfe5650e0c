"""Messages of one key go in order to the consumer that has an unsettled one of that key."""

from __future__ import annotations

import struct
from array import array
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.queues import Allotment, Consumer, Queue, Window, limits_of
from shardmq.shardd.queues.affinity import LOOK_MESSAGES, stored
from tests.support.dict_store import DictArrival, DictStore

KEYS = [b"a", b"bb", b"c" * 255, b""]
BODY = struct.Struct("<I")


class Delivery(NamedTuple):
    consumer: Consumer
    number: int
    key: bytes
    message: int


class Act(NamedTuple):
    what: str
    a: int
    b: int


class Bench:
    def __init__(self) -> None:
        self.store = DictStore()
        self.queue = Queue(1, self.store, limits_of({}))
        self.consumers: list[Consumer] = []
        self.unacked: list[Delivery] = []
        self.published: list[tuple[bytes, int]] = []
        self.seen: dict[bytes, int] = {}
        self.done: set[int] = set()
        self.numbers = 0

    # Outlet
    def deliver(
        self,
        consumer: Consumer,
        first: int,
        redelivered: bool,
        count: int,
        blob: bytes | memoryview,
    ) -> None:
        assert len(list(stored(blob))) == count
        for ordinal, message in enumerate(stored(blob)):
            (body,) = BODY.unpack(blob[message.end - BODY.size : message.end])
            others = [
                each
                for each in self.unacked
                if each.key == message.key and each.consumer is not consumer
            ]
            assert not others, f"{message.key!r} is with another"
            if not redelivered:
                assert body > self.seen.get(message.key, 0), "out of order"
            self.seen[message.key] = max(body, self.seen.get(message.key, 0))
            if consumer.no_ack:
                self.done.add(body)
            else:
                self.unacked.append(Delivery(consumer, first + ordinal, message.key, body))

    def deliver_again(
        self, consumer: Consumer, first: int, times: int, count: int, blob: bytes | memoryview
    ) -> None:
        raise AssertionError("it has no delivery limit")

    def passed(self, consumer: Consumer, offset: int) -> None:
        raise AssertionError("no stream")

    def report(self, allotment: Allotment) -> None:
        raise AssertionError("nobody has an allotment here")

    # -- acts --------------------------------------------------------------------------------------

    def play(self, act: Act) -> None:
        getattr(self, act.what)(act.a, act.b)
        while self.queue.deliver(0, self, 200 + act.b):
            pass
        self.check_nobody_waits_in_vain()

    def publish(self, a: int, b: int) -> None:
        entries = array("Q")
        for at in range(1 + a % 8):
            key, number = KEYS[(a + at * b) % len(KEYS)], len(self.published) + 1
            self.published.append((key, number))
            name = b"exchange"[: b % 9]
            head = struct.pack("<IIB", 4, 2, len(name)) + name + bytes([len(key)]) + key + b"\0\0"
            entries.append(self.store.put([1], head + BODY.pack(number)))
        self.queue.publish(DictArrival(1, entries, 4 * len(entries)), 0)

    def attach(self, a: int, b: int) -> None:
        self.numbers += 1
        asks = a % 3 > 0 or not self.consumers
        consumer = Consumer(
            self.queue,
            None,
            self.numbers,
            Window(1 << 20),
            prefetch=a % 4,
            no_ack=b % 7 == 0,
            affinity=asks,
        )
        if self.queue.consumers.affinity or asks:
            self.consumers.append(consumer)
            self.queue.attach(consumer)

    def detach(self, a: int, b: int) -> None:
        """Cancel a consumer, which keeps the messages it holds or gives them back.

        The last consumer that asked for affinity stays, so that affinity is kept.
        """
        going = [
            each
            for each in self.consumers
            if not each.affinity or sum(c.affinity for c in self.consumers) > 1
        ]
        if going:
            consumer = going[a % len(going)]
            self.consumers.remove(consumer)
            self.queue.detach(consumer, 0)
            if b % 2:
                self._settled([each for each in self.unacked if each.consumer is consumer])
                self.queue.release(consumer, 0)

    def ack(self, a: int, b: int) -> None:
        self._settle(a, b, requeue=False)

    def requeue(self, a: int, b: int) -> None:
        self._settle(a, b, requeue=True)

    def _settle(self, a: int, b: int, requeue: bool) -> None:
        if not self.unacked:
            return
        start = a % len(self.unacked)
        chosen = self.unacked[start : start + 1 + b % 5]
        self._settled(chosen)
        for each in chosen:
            entries, size = each.consumer.unacked.settle(each.number, each.number)
            if requeue:
                self.queue.requeue(entries, size)
            else:
                self.queue.ack(entries, size)
                self.done.add(each.message)

    def _settled(self, chosen: list[Delivery]) -> None:
        self.unacked = [each for each in self.unacked if each not in chosen]

    def check_nobody_waits_in_vain(self) -> None:
        """Check that messages wait only for consumers of their keys, which have no room."""
        roomy = [each for each in self.consumers if each.room() > 0]
        if not roomy:
            return
        held = {each.key: each.consumer for each in self.unacked}
        waiting = (
            {number for _, number in self.published}
            - self.done
            - {each.message for each in self.unacked}
        )
        for key, number in self.published:
            if number in waiting:
                assert key in held and held[key] not in roomy


ACTS = ["publish", "publish", "attach", "detach", "ack", "ack", "requeue"]


@given(
    st.lists(
        st.builds(Act, st.sampled_from(ACTS), st.integers(0, 99), st.integers(0, 99)), max_size=60
    )
)
def test_a_key_is_with_one_consumer_and_nobody_waits_in_vain(acts: list[Act]) -> None:
    bench = Bench()
    bench.play(Act("attach", 1, 1))
    for act in acts:
        bench.play(act)
    for _ in range(len(bench.published) + 1):
        for consumer in [
            each for each in {each.consumer: None for each in bench.unacked} if each.detached
        ]:
            bench._settled([each for each in bench.unacked if each.consumer is consumer])
            bench.queue.release(consumer, 0)
        bench.play(Act("ack", 0, 4))
    assert bench.done == {number for _, number in bench.published}
    assert bench.queue.backlog.ready_count == bench.queue.backlog.unacked_count == 0
    assert bench.queue.dispatch.keys is not None and not len(bench.queue.dispatch.keys)


def test_one_that_asks_later_counts_what_was_handed_out_before() -> None:
    bench = Bench()
    plain = Consumer(bench.queue, None, 1, Window(1 << 20), prefetch=1)
    bench.queue.attach(plain)
    bench.publish(0, 0)
    bench.queue.deliver(0, bench, 1000)
    asking = Consumer(bench.queue, None, 2, Window(1 << 20), affinity=True)
    bench.queue.attach(asking)
    bench.publish(0, 0)  # the same key
    bench.queue.deliver(0, bench, 1000)
    assert [each.consumer for each in bench.unacked] == [plain]
    bench.publish(1, 0)
    bench.queue.deliver(0, bench, 1000)
    assert [each.consumer for each in bench.unacked] == [plain, asking, asking]


def test_a_stuck_key_is_passed_as_far_as_one_looks() -> None:
    bench = Bench()
    stuck = Consumer(bench.queue, None, 1, Window(1 << 20), prefetch=1, affinity=True)
    other = Consumer(bench.queue, None, 2, Window(1 << 20), affinity=True)
    bench.queue.attach(stuck)
    bench.publish(0, 0)
    bench.queue.deliver(0, bench, 1000)
    bench.queue.attach(other)
    for _ in range(LOOK_MESSAGES):
        bench.publish(0, 0)  # the same key
    bench.publish(1, 0)  # two of another
    bench.queue.deliver(0, bench, 1 << 20)
    assert [each.consumer for each in bench.unacked] == [stuck]
    bench.ack(0, 0)
    while bench.queue.deliver(0, bench, 1 << 20):
        pass
    assert other in [each.consumer for each in bench.unacked]
