"""Add up what a front door says of the publishes of a call."""

from __future__ import annotations

from shardmq.shardd.reader.door import Outcome
from shardmq.supervisor.amqp_client import RETURN, Confirmed, Event, Known, Message, Received


def outcome(*events: Event) -> Outcome:
    made = Outcome()
    for event in events:
        made.add(event)
    return made


def test_confirms_settle_all_up_to_their_tag() -> None:
    assert outcome(Confirmed(2, True, True), Confirmed(3, False, True)) == Outcome(settled=3)


def test_refused_publishes_are_counted_one_by_one() -> None:
    one, several = Confirmed(2, False, False), Confirmed(5, True, False)
    assert outcome(Confirmed(1, False, True), one, several).nacked == [2, 3, 4, 5]
    assert outcome(one).settled == 2


def test_what_queues_had_before_is_known_once() -> None:
    made = outcome(Known(1, 3, False), Known(3, 4, True), Received(0))
    assert (made.known, made.altered, made.settled) == ({1, 2, 3, 4}, {3, 4}, 0)


def test_returned_messages_stay_in_order() -> None:
    messages = [Message(RETURN, 0, False, "x", key, 0) for key in ("b", "a")]
    assert outcome(*messages).returned == messages
