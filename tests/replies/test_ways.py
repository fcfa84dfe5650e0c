"""Direct replies come in order, straight or by the queue of their consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.front_door.publish.replies import (
    FOUND_EMPTY,
    REPLIES_BYTES_MAX,
    ReplyPath,
    Requester,
)
from shardmq.broker.model.changes import QueuePut

NONE, MUCH = 0, REPLIES_BYTES_MAX + 1


class Broker:
    """One publisher, one consumer and the shard between them.

    Messages on their way lie in deques. The answers of a shard leave before the deliveries of the
    same pass.
    """

    def __init__(self) -> None:
        self.path = ReplyPath()
        self.published = 0
        self.taken: list[int] = []  # by the consumer
        self.to_shard: deque[int | None] = deque()  # None: how many are there
        self.queue: deque[int] = deque()
        self.to_door: deque[tuple[str, int]] = deque()
        self.looking = 0  # looks that are left

    def publish(self, unsent_bytes: int, wanted: bool = True) -> None:
        if not wanted:
            self.path.go_far()
        near = wanted and self.path.choose(unsent_bytes)
        if near:
            self.taken.append(self.published)
        else:
            self.to_shard.append(self.published)
            if not self.looking and unsent_bytes == NONE:
                self.looking = FOUND_EMPTY
                self.look()
        self.published += 1

    def look(self) -> None:
        self.path.begin_count()
        self.to_shard.append(None)

    def turn(self, room: int) -> None:
        """Play one pass of the shard.

        It takes in some messages, and hands out as many as there is room for.
        """
        answers: list[int] = []
        deliveries: list[int] = []
        for _ in range(room):
            if not self.to_shard:
                break
            what = self.to_shard.popleft()
            if what is None:
                while self.queue and len(deliveries) < room:
                    deliveries.append(self.queue.popleft())
                answers.append(len(self.queue))
            else:
                self.queue.append(what)
        while self.queue and len(deliveries) < room:
            deliveries.append(self.queue.popleft())
        self.to_door.extend(("answer", count) for count in answers)
        self.to_door.extend(("delivery", number) for number in deliveries)

    def hear(self) -> None:
        if not self.to_door:
            return
        what, number = self.to_door.popleft()
        if what == "delivery":
            self.taken.append(number)
            return
        self.path.counted(number)
        self.looking -= 1
        if self.looking:
            self.look()


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("publish"),
            st.sampled_from([NONE, NONE, MUCH]),
            st.sampled_from([True, True, True, False]),
        ),
        st.tuples(st.just("turn"), st.integers(0, 5)),
        st.tuples(st.just("hear")),
    ),
    max_size=80,
)


@given(STEPS)
def test_replies_stay_in_order_and_go_straight_again_when_the_queue_is_empty(
    steps: list[tuple[Any, ...]],
) -> None:
    broker = Broker()
    for step, *arguments in steps:
        getattr(broker, step)(*arguments)
        assert broker.taken == sorted(broker.taken)
    for _ in range(4):
        broker.publish(NONE)
        while broker.to_shard or broker.queue or broker.to_door:
            broker.turn(3)
            broker.hear()
    assert broker.taken == list(range(broker.published))
    assert not broker.path.far


class Shards:
    """Whose queue has so many messages, one look after the other."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        self.up = True

    def is_up(self, shard: int) -> bool:
        return self.up

    async def count(self, queue: QueuePut) -> tuple[int, int]:
        await asyncio.sleep(0)
        return self.counts.pop(0), 1


class Consumer:
    """As far as a requester looks at it: how much its client has not taken."""

    def __init__(self) -> None:
        self.client = self.output = self
        self.pending = 0


def requester(shards: Shards) -> tuple[Requester, Any]:
    consumer: Any = Consumer()
    return Requester(consumer, QueuePut("/", "amq.rabbitmq.reply-to.1", 7, 0), shards), consumer


async def test_a_consumer_that_takes_nothing_gets_replies_by_its_queue_until_that_is_empty() -> (
    None
):
    shards = Shards([2, 0, 0, 0])
    who, consumer = requester(shards)
    assert who.takes()
    consumer.pending = MUCH
    assert not who.takes() and not who.takes()
    await asyncio.sleep(0)
    assert shards.counts == [2, 0, 0, 0]  # nobody looks while it takes nothing
    consumer.pending = 0
    for expected in ([0, 0], []):  # two messages were there; then there were none, twice
        assert not who.takes()
        while who._counting is not None:
            await asyncio.sleep(0)
        assert shards.counts == expected
    assert who.takes()


async def test_while_its_shard_is_away_a_consumer_keeps_the_way_it_had() -> None:
    shards = Shards([0, 0])
    shards.up = False
    who, _ = requester(shards)
    assert who.takes()
    assert not who.takes(wanted=False)
    assert not who.takes()
    assert who._counting is None
    shards.up = True
    assert not who.takes()
    shards.up = False  # by the time it is asked
    while who._counting is not None:
        await asyncio.sleep(0)
    assert shards.counts == [0, 0]
    assert not who.takes()
    who.close()
