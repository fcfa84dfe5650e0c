"""Test the queues of one virtual consumer at one shard.

Messages are handed out in the order of the log. Each queue keeps its own order, and no queue is
forgotten, however much room there is at whatever time. Entries are those of a store whose messages
take 64 KiB of the log.
"""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.queues import Allotment, Consumer, LogOrder, Queue, Window, limits_of
from shardmq.shardd.queues.log_order import LEEWAY, PASSES_MAX, STAY_MS, STRETCH
from tests.support.dict_store import DictArrival, DictStore

ROOM = 1 << 30
MESSAGE = (1).to_bytes(4, "little") + bytes(4) + b"\0\0x"
STEP = STRETCH // 16


class SpacedStore(DictStore):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def put(self, queue_ids: object, message: bytes) -> int:
        self.last += self.step - 16
        return super().put(queue_ids, message)  # type: ignore[arg-type]


class Bench:
    """Queues of one consumer. `prefetch` is that of all together; 0: without acks."""

    def __init__(
        self, queues: int, prefetch: int = 0, window: int = ROOM, step: int = STEP
    ) -> None:
        self.store = SpacedStore(step)
        self.dirty: dict[Queue, None] = {}
        self.order = LogOrder(lambda queue: self.dirty.update({queue: None}))
        self.allotment = Allotment(100, None, self.order, is_limited=prefetch > 0)
        self.prefetch = max(1, prefetch // queues) * queues if prefetch else 0
        self.window = Window(window)
        self.queues: list[Queue] = []
        self.parts: list[Consumer] = []
        self.got: list[tuple[int, int]] = []  # queue, entry
        self.held: list[tuple[Consumer, int]] = []
        self.entries: dict[int, list[int]] = {}
        self.now = 0
        for number in range(1, queues + 1):
            queue = Queue(number, self.store, limits_of({}))
            part = Consumer(
                queue, None, number, self.window, no_ack=not prefetch, allotment=self.allotment
            )
            queue.attach(part)
            self.queues.append(queue)
            self.parts.append(part)
            self.entries[number] = []
        self.allow()

    def allow(self) -> None:
        """Give the credit that there is, as acks free it."""
        allowed = self.allotment.used + self.prefetch - len(self.held)
        if self.prefetch and allowed > self.allotment.allowed:
            self.allotment.allow(allowed, drains=False)
            self.order.go_on(self.now)

    def publish(self, number: int, count: int = 1) -> None:
        entries = array("Q", [self.store.put([number], MESSAGE) for _ in range(count)])
        self.entries[number] += entries
        self.queues[number - 1].publish(DictArrival(number, entries, count), 0)
        self.dirty[self.queues[number - 1]] = None

    def serve(self, most: int = 1 << 30, bytes_max: int = ROOM) -> None:
        for _ in range(most):
            if not self.dirty:
                return
            queue = next(iter(self.dirty))
            del self.dirty[queue]
            if queue.deliver(self.now, self, bytes_max):  # type: ignore[arg-type]
                self.dirty[queue] = None

    def deliver(
        self, part: Consumer, first: int, redelivered: bool, count: int, blob: bytes
    ) -> None:
        number = part.queue.id
        if part.no_ack:
            self.got += [(number, self.entries[number][first - 1 + i]) for i in range(count)]
        else:
            held = part.unacked.held()
            self.got += [(number, entry & ~15) for entry in held[len(held) - count :]]
            self.held += [(part, first + i) for i in range(count)]

    def report(self, allotment: Allotment) -> None:
        return None

    def settle(self, count: int, requeue: bool = False) -> None:
        for part, number in self.held[:count]:
            entries, size = part.unacked.settle(number, number)
            (part.queue.requeue if requeue else part.queue.ack)(entries, size)
            if requeue:
                self.dirty[part.queue] = None
        del self.held[:count]
        self.allow()

    def credit(self, count: int) -> None:
        self.window.free(count)
        for queue in self.window.unblocked():
            self.dirty[queue] = None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "publish", "serve", "settle", "requeue", "credit", "wait"]),
        st.integers(0, 40),
    ),
    max_size=60,
)


@given(st.integers(1, 5), st.sampled_from([0, 1, 7, 50]), st.integers(1, 200), STEPS)
def test_all_comes_once_settled_and_each_queue_in_its_order(
    queues: int, prefetch: int, window: int, steps: list[tuple[str, int]]
) -> None:
    bench = Bench(queues, prefetch, window)
    came_back = False
    for step, n in steps:
        if step == "publish":
            bench.publish(1 + n % queues, n)
        elif step == "serve":
            bench.serve(1 + n % 4, 1 + 20 * n)
        elif step == "credit":
            bench.credit(n)
        elif step == "wait":
            bench.now += n
        else:
            came_back |= step == "requeue" and bool(bench.held[:n])
            bench.settle(n, requeue=step == "requeue")
    for _ in range(10_000):
        bench.serve()
        if not bench.held and not any(queue.backlog.ready_count for queue in bench.queues):
            break
        bench.settle(ROOM)
        bench.credit(ROOM)
    for number, entries in bench.entries.items():
        own = [entry for queue, entry in bench.got if queue == number]
        assert own == entries if not came_back else set(own) == set(entries)


@given(
    st.lists(st.permutations([1, 2, 3, 4]), min_size=1, max_size=40),
    st.sampled_from([0, 3, 40]),
    st.integers(1, 300),
)
def test_nothing_is_handed_out_long_before_what_is_older(
    order: list[list[int]], prefetch: int, window: int
) -> None:
    bench = Bench(4, prefetch, window)
    for number in [number for four in order for number in four]:
        bench.publish(number)
    while any(queue.backlog.ready_count for queue in bench.queues):
        bench.serve()
        bench.settle(ROOM)
        bench.credit(ROOM)
    left = sorted(entry for _, entry in bench.got)
    turn = STRETCH + (LEEWAY if prefetch else 0)
    for _, entry in bench.got:
        assert entry <= left[0] + 2 * turn
        left.remove(entry)
    assert not left


def test_what_there_is_room_for_is_handed_out_in_one_piece() -> None:
    """The end lies a little behind the stretch of the log for one turn.

    Then the other queue has its turn.
    """
    bench = Bench(2, 10)  # of a stretch each has 8
    for _ in range(20):
        bench.publish(1)
        bench.publish(2)
    for _ in range(4):
        bench.serve()
        bench.settle(ROOM)
    whose = [number for number, _ in bench.got]
    assert whose == [1] * 10 + [2] * 10 + [1] * 10 + [2] * 10


def test_a_turn_lasts_while_the_client_is_fast() -> None:
    """Within a stretch, though with each prefetch another could have it."""
    bench = Bench(2, 2, step=STEP // 16)
    for _ in range(40):
        bench.publish(1)
        bench.publish(2)
    for _ in range(4 * STAY_MS):
        bench.serve()
        bench.now += 1
        bench.settle(ROOM)
    whose = [number for number, _ in bench.got]
    assert whose == ([1] * 2 * STAY_MS + [2] * 2 * STAY_MS) * 2


@given(st.integers(1, 20), st.integers(2, 4), st.integers(0, 30))
def test_a_message_beside_backlogs_waits_for_a_few_turns_only(
    prefetch: int, queues: int, pause: int
) -> None:
    bench = Bench(queues, prefetch)
    for _ in range(100 * prefetch):
        for number in range(2, queues + 1):
            bench.publish(number)
    for _ in range(3):
        for _ in range(pause):
            bench.serve()
            bench.now += 1
            bench.settle(ROOM)
        bench.publish(1)
        since = bench.now
        while bench.queues[0].backlog.ready_count:
            bench.serve()
            bench.now += 1
            bench.settle(ROOM)
        # Credit comes one ms after the acks.
        assert bench.now - since <= (PASSES_MAX + 1) * (1 if queues == 2 else STAY_MS) + STAY_MS + 1


def test_messages_that_come_back_again_and_again_hold_up_nobody() -> None:
    bench = Bench(3, 3)
    bench.publish(1)
    for number in (2, 3):
        bench.publish(number, 20)
    for _ in range(200):
        bench.serve()
        poison = [held for held in bench.held if held[0].queue.id == 1]
        others = [held for held in bench.held if held[0].queue.id != 1]
        bench.held = poison
        bench.settle(len(poison), requeue=True)
        bench.held = others
        bench.settle(len(others))
    assert (
        sum(queue.backlog.ready_count + queue.backlog.unacked_count for queue in bench.queues[1:])
        == 0
    )


def test_a_queue_that_is_paused_or_gone_holds_up_nobody() -> None:
    for leave in ("pause", "detach", "drop", "purge"):
        bench = Bench(3, 6)
        for _ in range(20):
            for number in (1, 2, 3):
                bench.publish(number)
        bench.serve()
        for first in range(1, 3):
            queue = bench.queues[first - 1]
            if leave == "pause":
                queue.change(queue.backlog.limits._replace(paused=True), 0)
            elif leave == "detach":
                queue.detach(bench.parts[first - 1], 0)
            elif leave == "drop":
                queue.drop()
            else:
                queue.purge()
            bench.held = [held for held in bench.held if not held[0].queue.deleted]
            bench.settle(ROOM)
        for _ in range(100):
            bench.serve()
            bench.settle(ROOM)
        assert bench.queues[2].backlog.ready_count == 0, leave


def test_one_that_is_far_behind_goes_on_beside_the_others() -> None:
    bench = Bench(2, 4)
    bench.publish(1, 1000)
    bench.publish(2, 1000)
    for _ in range(100 * PASSES_MAX):
        bench.serve()
        bench.settle(ROOM)
    numbers = [number for number, _ in bench.got]
    assert min(numbers.count(1), numbers.count(2)) > 100
