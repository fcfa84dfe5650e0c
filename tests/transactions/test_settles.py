"""A commit is answered when what it settled is on stable storage, or may come again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardmq.broker.front_door.consume.acks import Acks, kept_by
from shardmq.broker.front_door.consume.consumers import Consumer, ConsumingChannel, Getter
from shardmq.broker.front_door.consume.unacked import Run
from shardmq.broker.front_door.links.settled_waits import SettledWaits
from shardmq.broker.front_door.publish.commit import Committed
from shardmq.broker.shared.reading import Reading
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.messages import ReadFrom

EPOCH = 7
DURABLE, TRANSIENT, UNKNOWN = 1, 2, 3
CATALOG: Any = SimpleNamespace(
    queue_by_id={
        DURABLE: SimpleNamespace(durable=True), TRANSIENT: SimpleNamespace(durable=False)
    }.get
)  # fmt: skip
CLIENT: Any = SimpleNamespace()


def consumer_of(queue: int, shard: int = 0, *, stream: bool = False) -> Consumer:
    made = Consumer(ConsumingChannel(CLIENT, 1), 5, "tag")
    made.queue_id, made.shard = queue, shard
    made.reading = Reading(ReadFrom()) if stream else None
    return made


def run_of(consumer: Consumer, first: int = 1, last: int = 1, epoch: int = EPOCH) -> Run[Consumer]:
    return Run(first, last, consumer, epoch, first, 0.0)


@pytest.mark.parametrize("kind", [wire.ACK, wire.REJECT], ids=["ack", "reject"])
def test_durable_queues_are_waited_for_by_shard_and_epoch(kind: int) -> None:
    settles = [
        (kind, [run_of(consumer_of(DURABLE)), run_of(consumer_of(UNKNOWN))]),
        (kind, [run_of(consumer_of(DURABLE, 1)), run_of(consumer_of(DURABLE), epoch=8)]),
    ]
    assert kept_by(settles, CATALOG) == {
        (0, EPOCH): {DURABLE, UNKNOWN}, (1, EPOCH): {DURABLE}, (0, 8): {DURABLE}
    }  # fmt: skip


def test_nothing_is_waited_for_where_nothing_is_kept() -> None:
    settles = [
        (wire.ACK, [run_of(consumer_of(TRANSIENT))]),
        (wire.ACK, [run_of(consumer_of(DURABLE, stream=True))]),
        (wire.REQUEUE, [run_of(consumer_of(DURABLE))]),
    ]
    assert kept_by(settles, CATALOG) == {}


def test_what_was_got_is_waited_for_in_the_queues_that_it_came_from() -> None:
    getter = Getter(ConsumingChannel(CLIENT, 1), 5, 1)
    for tag, queue in enumerate((TRANSIENT, DURABLE, UNKNOWN), 1):
        getter.took(tag, queue)
    assert kept_by([(wire.ACK, [run_of(getter, 1, 1)])], CATALOG) == {}
    assert kept_by([(wire.ACK, [run_of(getter, 1, 3)])], CATALOG) == {
        (1, EPOCH): {DURABLE, UNKNOWN}
    }


class Link:
    def __init__(self, *, up: bool = True, epoch: int = EPOCH) -> None:
        self.up, self.epoch = up, epoch
        self.settled_waits = SettledWaits()
        self.told: list[wire.Message] = []

    def tell(self, what: wire.Message) -> None:
        self.told.append(what)


def acks_of(*links: Link) -> Acks:
    # The links alone.
    return Acks(SimpleNamespace(links=links), None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "stored"),
    [(True, True, True), (True, False, False), (False, True, False), (None, True, False)],
    ids=["all", "one has no room", "the other has no room", "one is lost"],
)
async def test_a_commit_waits_for_each_shard_that_it_settled_at(
    first: bool | None, second: bool, stored: bool
) -> None:
    one, other = Link(), Link()
    committed = Committed(9, 1, shards=2)
    acks_of(one, other).make_last({(0, EPOCH): {4, 3}, (1, EPOCH): {5}}, committed)
    committed.confirmed()
    assert one.told == [wire.SyncSettled(1, [3, 4])] and other.told == [wire.SyncSettled(1, [5])]
    other.settled_waits.answered(wire.SettledSynced(1, second))
    assert not committed.future.done()
    if first is None:
        for waiting in one.settled_waits.take():
            waiting.lost()
    else:
        one.settled_waits.answered(wire.SettledSynced(1, first))
    one.settled_waits.answered(wire.SettledSynced(1, True))  # nobody waits any more
    assert committed.future.result() == stored


@pytest.mark.parametrize(
    "link", [Link(up=False), Link(epoch=EPOCH + 1)], ids=["away", "another process"]
)
async def test_a_shard_that_has_requeued_the_deliveries_is_not_asked(link: Link) -> None:
    acks, committed = acks_of(link), Committed(9, 1, shards=1)
    kept = {(0, EPOCH): {DURABLE}}
    assert not acks.are_outstanding(kept) and acks.are_outstanding({})
    acks.make_last(kept, committed)
    committed.confirmed()
    assert not committed.future.result() and not link.told


async def test_a_commit_that_settled_nothing_that_is_kept_waits_for_nobody() -> None:
    committed = Committed(9, 1, shards=0)
    acks_of().make_last({}, committed)
    committed.confirmed()
    assert committed.future.result()


async def test_a_commit_gives_up_a_shard_that_does_not_answer() -> None:
    link, committed = Link(), Committed(9, 1, shards=1)
    acks_of(link).make_last({(0, EPOCH): {DURABLE}}, committed)
    committed.confirmed()
    assert not await committed.within(0.0)
    link.settled_waits.answered(wire.SettledSynced(1, True))  # late
    assert await committed.within(0.0)
