"""A dead letter stays in its shard's store until its copy is stored."""

from __future__ import annotations

from typing import Any

import pytest

from shardmq.shardd import dead_letters
from shardmq.shardd.queues import entry
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as m
from shardmq.shardd.wire.lane import joined
from tests.shard.test_shard import MESSAGE, Bench

DLX = {"x-dead-letter-exchange": "dlx"}
NOW = 1000


class Dying(Bench):
    """A queue that dead-letters; all that is published leaves at once, for want of room."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**{"x-max-length": 0} | DLX | more)

    def letters(self, peer: int = 0, now: int = NOW) -> list[m.DeadLetters]:
        said = [
            envelope.read_control(joined(o.message))
            for o in self.shard.turn_end(now)
            if self._is_control(o, peer)
        ]
        return [what for what in said if isinstance(what, m.DeadLetters)]

    @staticmethod
    def _is_control(outgoing: Any, peer: int) -> bool:
        return (
            outgoing.endpoint == f"peer-{peer}"
            and envelope.read(joined(outgoing.message)).kind == m.CONTROL
        )

    @property
    def stored(self) -> int:
        return len(self.store.live.get(1, ()))


@pytest.mark.parametrize(
    ("arguments", "routing_key", "insist"),
    [
        ({}, None, False),
        ({"x-dead-letter-routing-key": "dead"}, "dead", False),
        ({"x-dead-letter-strategy": "at-least-once"}, None, True),
    ],
)
def test_a_batch_says_all_a_front_door_must_know(
    arguments: Any, routing_key: str | None, insist: bool
) -> None:
    bench = Dying(**arguments)
    bench.publish(3)
    assert bench.letters() == [
        m.DeadLetters(1, "/", "q", "maxlen", "dlx", routing_key, insist, 3, 3 * MESSAGE),
    ]


def test_messages_are_settled_when_their_copies_last_and_not_before() -> None:
    bench = Dying()
    bench.publish(3)
    (batch,) = bench.letters()
    assert bench.shard.queues[1].backlog.ready_count == 0 and bench.stored == 3
    bench.tell(m.DeadLettersPublished(batch.number))
    assert bench.stored == 0
    assert not bench.letters()


def test_what_was_not_taken_is_handed_over_again_after_a_while_and_only_that() -> None:
    bench = Dying()
    bench.publish(4)
    (batch,) = bench.letters()
    bench.tell(m.DeadLettersPublished(batch.number, [(0, 0), (2, 3)]))
    assert bench.stored == 3
    assert not bench.letters()
    due = NOW + dead_letters.RETRY_MS
    assert bench.shard.next_due() == due
    assert not bench.letters(now=due - 1)
    (again,) = bench.letters(now=due)
    assert again.count == 3
    bench.tell(m.DeadLettersPublished(again.number))
    assert bench.stored == 0


def test_the_next_front_door_gets_what_the_one_that_went_had_not_answered_for() -> None:
    bench = Dying()
    bench.join(1, 6)
    bench.publish(2)
    (first,) = bench.letters()
    bench.publish(1)
    (second,) = bench.letters()
    bench.tell(m.DeadLettersPublished(first.number))
    bench.tell(m.FrontDoorGone(0, 5), m.CONTROLLER, 3)
    (again,) = bench.letters(peer=1)
    assert (again.count, again.messages) == (1, second.messages)
    bench.tell(m.DeadLettersPublished(second.number))  # of one that is gone: a word from the grave
    assert bench.stored == 1
    bench.tell(m.DeadLettersPublished(again.number), 1, 6)
    assert bench.stored == 0


def test_without_a_front_door_they_wait() -> None:
    bench = Dying()
    bench.publish(2)
    bench.tell(m.FrontDoorGone(0, 5), m.CONTROLLER, 3)
    assert not bench.letters()
    bench.join(0, 9)
    (batch,) = bench.letters()
    assert batch.count == 2


def test_no_more_is_on_its_way_than_the_window_and_all_of_it_goes_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dead_letters, "WINDOW_BYTES", 10 * len(MESSAGE))
    monkeypatch.setattr(dead_letters, "BATCH_BYTES", 4 * len(MESSAGE))
    bench = Dying()
    bench.publish(100)
    arrived = 0
    while letters := bench.letters():
        assert sum(len(batch.messages) for batch in letters) <= (10 + 4) * len(MESSAGE)
        for batch in letters:
            arrived += batch.count
            bench.tell(m.DeadLettersPublished(batch.number))
    assert arrived == 100 and bench.stored == 0


def test_what_departs_from_a_deleted_queue_still_arrives() -> None:
    bench = Dying()
    bench.publish(3)
    (batch,) = bench.letters()
    bench.publish(2)
    (second,) = bench.letters()
    bench.tell(m.DeleteQueue(4, 1), m.CONTROLLER, 3)
    bench.tell(m.DeadLettersPublished(batch.number, [(1, 1)]))
    assert not bench.letters()
    (again,) = bench.letters(now=NOW + dead_letters.RETRY_MS)
    for each in (second, again):
        bench.tell(m.DeadLettersPublished(each.number))
    assert bench.stored == 0
    assert bench.shard.dead_letters.count() == 0


def test_a_vhost_that_goes_takes_its_dead_letters_along() -> None:
    bench = Dying()
    bench.publish(3)
    (batch,) = bench.letters()
    bench.tell(m.DropVhost(4, "/"), m.CONTROLLER, 3)
    bench.tell(m.DeadLettersPublished(batch.number, [(0, 1)]))
    assert not bench.letters(now=NOW + dead_letters.RETRY_MS)


def test_a_clean_stop_keeps_what_is_on_its_way() -> None:
    bench = Dying()
    bench.publish(2)
    bench.letters()
    bench.shard.close()
    assert bench.store.closed is not None and len(bench.store.closed[1]) == 2


def test_while_there_is_no_room_they_wait_for_copies_take_some() -> None:
    bench = Dying()
    bench.shard.set_alarm("low on disk")
    bench.publish(2)
    assert not bench.letters() and bench.shard.next_due() is None
    bench.shard.set_alarm("")
    (batch,) = bench.letters()
    assert batch.count == 2


def test_what_waits_is_dropped_when_a_policy_takes_the_exchange_away() -> None:
    bench = Dying()
    bench.tell(m.FrontDoorGone(0, 5), m.CONTROLLER, 3)
    bench.publish(3)
    bench.tell(
        m.CreateQueues(9, [m.QueueSpec(1, "/", "q", True, arguments={"x-max-length": 0})]),
        m.CONTROLLER,
        3,
    )
    bench.join(0, 6)
    assert not bench.letters() and bench.stored == 0


def test_of_a_queue_without_the_exchange_nothing_is_handed_over() -> None:
    bench = Bench(**{"x-max-length": 0})
    bench.publish(2)
    assert not any(isinstance(what, m.DeadLetters) for what in bench.turn())
    assert not bench.store.live[1]


@pytest.mark.parametrize(
    ("overflow", "dies"), [("reject-publish", False), ("reject-publish-dlx", True)]
)
def test_a_refused_publish_dies_only_if_asked_to(overflow: str, dies: bool) -> None:
    bench = Dying(**{"x-overflow": overflow})
    bench.publish(1)
    bench.sync()
    assert [batch.reason for batch in bench.letters()] == ["maxlen"] * dies


def test_of_a_queue_without_an_exchange_only_what_may_say_where_it_goes_is_handed_over() -> None:
    """By the queue's id: its name was of no use until then."""
    bench = Bench(**{"x-max-length": 0})
    bench.publish(1)
    bench.publish(2, marks=entry.OWN_LETTERS)
    bench.publish(3)
    said = [
        envelope.read_control(joined(o.message))
        for o in bench.shard.turn_end(NOW)
        if Dying._is_control(o, 0)
    ]
    (batch,) = [what for what in said if isinstance(what, m.DeadLetters)]
    assert (batch.queue, batch.exchange, batch.routing_key, batch.insist) == (1, None, None, False)
    assert batch.count in (5, 6)  # it does not look into them
    bench.tell(m.DeadLettersPublished(batch.number))
    assert not bench.store.live.get(1)
    bench.publish(1)  # it was empty: what was before is forgotten
    bench.turn()
    assert not bench.shard.queues[1].backlog.letters_differ and not bench.store.live.get(1)
