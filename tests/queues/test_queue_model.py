"""Random histories of one queue against lists."""

from __future__ import annotations

import struct
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.queues import Allotment, Consumer, Queue, Window, limits_of
from tests.support.dict_store import DictArrival, DictStore


class Outlet:
    def __init__(self) -> None:
        self.given: list[tuple[int, int, bool, int]] = []

    def deliver(
        self,
        consumer: Consumer,
        first: int,
        redelivered: bool,
        count: int,
        blob: bytes | memoryview,
    ) -> None:
        step = len(blob) // count
        for i in range(count):
            (body,) = struct.unpack_from("<I", blob, i * step + 10)
            self.given.append((consumer.number, first + i, redelivered, body))

    def deliver_again(
        self, consumer: Consumer, first: int, times: int, count: int, blob: bytes | memoryview
    ) -> None:
        raise AssertionError("nobody counts here")

    def passed(self, consumer: Consumer, offset: int) -> None:
        raise AssertionError("no stream")

    def report(self, allotment: Allotment) -> None:
        raise AssertionError("nobody has an allotment here")


def publish(queue: Queue, store: DictStore, bodies: list[int], now: int = 0) -> None:
    entries = array(
        "Q", [store.put([queue.id], struct.pack("<IIBBI", 4, 0, 0, 0, body)) for body in bodies]
    )
    queue.publish(DictArrival(queue.id, entries, 4 * len(bodies)), now)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "deliver", "ack", "requeue", "back", "release"]),
        st.integers(1, 9),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(STEPS, st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_each_message_is_with_one_holder_in_order_and_never_above_prefetch(
    steps: list[tuple[str, int]], prefetches: list[int]
) -> None:
    store, outlet = DictStore(), Outlet()
    queue = Queue(1, store, limits_of({}))
    consumers = {
        n: Consumer(queue, None, n, Window(1 << 20), prefetch=p) for n, p in enumerate(prefetches)
    }
    for consumer in consumers.values():
        queue.attach(consumer)
    ready: list[int] = []
    seen: set[int] = set()
    held: dict[tuple[int, int], int] = {}
    last = 0
    for step, n in steps:
        if step == "publish":
            more = list(range(last, last + n))
            last += n
            publish(queue, store, more)
            ready += more
        elif step == "deliver":
            outlet.given.clear()
            queue.deliver(0, outlet, 1 << 20)
            bodies = [body for *_, body in outlet.given]
            assert sorted(bodies) == ready[: len(bodies)]
            ready = ready[len(bodies) :]
            for number, at, redelivered, body in outlet.given:
                assert redelivered == (body in seen)
                held[number, at] = body
            for number, prefetch in enumerate(prefetches):
                mine = [body for who, _, _, body in outlet.given if who == number]
                assert mine == sorted(mine)
                assert not prefetch or sum(who == number for who, _ in held) <= prefetch
            if ready:
                assert all(
                    p and sum(who == k for who, _ in held) == p for k, p in enumerate(prefetches)
                )
        elif held:
            key = sorted(held)[n % len(held)]
            entries, size = consumers[key[0]].unacked.settle(key[1], key[1])
            body = held.pop(key)
            if step == "ack":
                queue.ack(entries, size)
                continue
            if step == "back":
                queue.give_back(entries, size)
            else:
                queue.requeue(entries, size)
                seen.add(body)
            ready = sorted([*ready, body])
        assert queue.backlog.ready_count == len(ready)
        assert queue.backlog.ready_bytes == 4 * len(ready)
        assert queue.backlog.unacked_count == len(held)
        assert len(store.live.get(1, ())) == len(ready) + len(held)


def test_several_consumers_share_a_burst_evenly() -> None:
    store, outlet = DictStore(), Outlet()
    queue = Queue(1, store, limits_of({}))
    for n in range(3):
        queue.attach(Consumer(queue, None, n, Window(1 << 20), no_ack=True))
    publish(queue, store, list(range(9)))
    queue.deliver(0, outlet, 1 << 20)
    assert [[body for who, _, _, body in outlet.given if who == n] for n in range(3)] == [
        [0, 3, 6],
        [1, 4, 7],
        [2, 5, 8],
    ]
    assert not store.live[1]


def test_the_head_is_dropped_above_max_length_and_expired_after_ttl() -> None:
    store = DictStore()
    queue = Queue(1, store, limits_of({"x-max-length": 3, "x-message-ttl": 100}))
    publish(queue, store, list(range(5)), now=1000)
    queue.deliver(1000, Outlet(), 1 << 20)
    assert queue.backlog.ready_count == 3
    assert queue.next_due() == 1100
    queue.backlog.expire(1099)
    assert queue.backlog.ready_count == 3
    queue.backlog.expire(1100)
    assert queue.backlog.ready_count == 0 and queue.backlog.ready_bytes == 0 and not store.live[1]


def test_publishes_above_the_limit_are_refused_by_name() -> None:
    store = DictStore()
    queue = Queue(1, store, limits_of({"x-max-length": 2, "x-overflow": "reject-publish"}))
    entries = array("Q", [store.put([1], struct.pack("<IIBBI", 4, 0, 0, 0, n)) for n in range(4)])
    assert queue.publish(DictArrival(1, entries, 16, None, array("I", [5, 6, 7, 8])), 0) == [7, 8]
    assert (queue.backlog.ready_count, queue.backlog.ready_bytes) == (2, 8)


def test_higher_priorities_leave_first() -> None:
    store, outlet = DictStore(), Outlet()
    queue = Queue(1, store, limits_of({"x-max-priority": 3}))
    entries = array("Q", [store.put([1], struct.pack("<IIBBI", 4, 0, 0, 0, n)) for n in range(4)])
    queue.publish(DictArrival(1, entries, 16, array("Q", [0, 2 << 56, 9 << 56, 2 << 56])), 0)
    queue.attach(Consumer(queue, None, 1, Window(1 << 20)))
    queue.deliver(0, outlet, 1 << 20)
    assert [body for *_, body in outlet.given] == [2, 1, 3, 0]
