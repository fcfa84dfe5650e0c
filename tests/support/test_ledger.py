"""The ledger finds what it is there to find, and takes no kill for a fault."""

from __future__ import annotations

import pytest

from tests.support.history import make_body
from tests.support.ledger import ACK_LASTS_S, ACKED, NACKED, Ledger

Q = "q"


def told(published: int = 3, confirmed: int = 0) -> Ledger:
    ledger = Ledger()
    ledger.consumer_came(Q)
    for _ in range(published):
        ledger.was_published("k", (Q,))
    ledger.was_answered("k", range(1, confirmed + 1), ACKED)
    return ledger


def deliver(
    ledger: Ledger, number: int, redelivered: bool = False, now: float = 0.0, queue: str = Q
) -> None:
    ledger.was_delivered(queue, make_body("k", number), redelivered, now)


def test_what_kills_explain_is_no_fault() -> None:
    ledger = told(confirmed=3)
    deliver(ledger, 1, now=1.0)
    deliver(ledger, 2, now=1.0)
    ledger.was_settled(Q, [("k", 1, 1.0)], 2.0)
    ledger.was_killed(2.5, shards=True)
    for number, redelivered in ((1, True), (2, True), (3, False)):
        deliver(ledger, number, redelivered, now=4.0)
    ledger.check_all()
    assert ledger.waiting(Q) == 0


@pytest.mark.parametrize(
    ("deliveries", "complaint"),
    [
        ([(1, False), (1, False)], "again without a mark"),
        ([(1, True), (1, False)], "again without a mark"),
        ([(2, False), (1, False)], "as new behind"),
        ([(4, False)], "never published"),
        ([(0, False)], "never published"),
        ([(1, False), (2, False), (1, True), (2, True), (1, True)], "do not explain 2 falls"),
    ],
)
def test_a_delivery_that_may_not_be_is_named(
    deliveries: list[tuple[int, bool]], complaint: str
) -> None:
    ledger = told()
    for number, redelivered in deliveries:
        deliver(ledger, number, redelivered)
    with pytest.raises(AssertionError, match=complaint):
        ledger.check()


def test_a_message_in_a_queue_it_was_not_sent_to_is_named() -> None:
    ledger = told()
    deliver(ledger, 1, queue="other")
    with pytest.raises(AssertionError, match="but sent to"):
        ledger.check()


@pytest.mark.parametrize(
    "answers", [(ACKED, NACKED), (NACKED, ACKED), (ACKED, ACKED), (NACKED, NACKED)]
)
def test_a_publish_answered_twice_is_named(answers: tuple[int, int]) -> None:
    ledger = told()
    for answer in answers:
        ledger.was_answered("k", [2], answer)
    with pytest.raises(AssertionError, match="answered twice"):
        ledger.check()


def test_an_answer_to_no_publish_is_named() -> None:
    ledger = told()
    ledger.was_answered("k", [4], ACKED)
    with pytest.raises(AssertionError, match="4 was answered, but never published"):
        ledger.check()


def test_a_confirmed_message_that_is_not_delivered_is_named_for_each_queue() -> None:
    ledger = told(confirmed=2)
    deliver(ledger, 1)
    ledger.was_published("both", (Q, "r"))
    ledger.was_answered("both", [1], ACKED)
    ledger.was_delivered(Q, make_body("both", 1), False, 0.0)
    assert ledger.missing() == ["q: 1 of k, first [2]", "r: 1 of both, first [1]"]
    with pytest.raises(AssertionError, match="never delivered"):
        ledger.check_all()


@pytest.mark.parametrize("killed_at", [None, 0.5, 2.0 + ACK_LASTS_S + 0.1])
def test_an_acknowledged_message_that_comes_again_without_reason_is_named(
    killed_at: float | None,
) -> None:
    """Killed before it was handed out, or when the acknowledgement was long on disk: no reason."""
    ledger = told()
    if killed_at == 0.5:
        ledger.was_killed(killed_at, shards=True)
    deliver(ledger, 1, now=1.0)
    ledger.was_settled(Q, [("k", 1, 1.0)], 2.0)
    if killed_at is not None and killed_at > 2.0:
        ledger.was_killed(killed_at, shards=True)
    deliver(ledger, 1, redelivered=True, now=9.0)
    with pytest.raises(AssertionError, match="came again"):
        ledger.check()


def test_the_death_of_a_front_door_does_not_bring_back_what_a_shard_has_settled() -> None:
    ledger = told()
    deliver(ledger, 1, now=1.0)
    ledger.was_settled(Q, [("k", 1, 1.0)], 2.0)
    ledger.was_killed(2.1, shards=False)
    deliver(ledger, 1, redelivered=True, now=3.0)
    with pytest.raises(AssertionError, match="came again"):
        ledger.check()


def test_with_several_consumers_order_is_not_looked_at_but_repeats_are() -> None:
    ledger = told()
    ledger.may_fall(Q)
    for number, redelivered in ((3, False), (2, False), (1, True), (1, False)):
        deliver(ledger, number, redelivered)
    ledger.check()
    deliver(ledger, 3)
    with pytest.raises(AssertionError, match="3 was delivered again without a mark"):
        ledger.check()


def test_in_unrest_messages_come_again_but_with_a_mark_and_new_ones_in_order() -> None:
    ledger = told()
    ledger.unrest_begins(1.0)
    for number in (1, 2):
        deliver(ledger, number, now=2.0)
    for number in (1, 2, 1, 2):
        deliver(ledger, number, True, now=3.0)
    ledger.unrest_ends(9.0)
    ledger.check()
    deliver(ledger, 1, now=4.0)
    with pytest.raises(AssertionError, match="again without a mark"):
        ledger.check()


def test_when_the_unrest_is_over_messages_do_not_come_again() -> None:
    ledger = told()
    ledger.unrest_begins(1.0)
    ledger.unrest_ends(3.0)
    for number in (1, 2):
        deliver(ledger, number, now=4.0)
    for number in (1, 2, 1, 2, 1):
        deliver(ledger, number, True, now=4.0)
    with pytest.raises(AssertionError, match="do not explain 3 falls"):
        ledger.check()


@pytest.mark.parametrize(("since", "complains"), [(1.5, False), (4.0, True)])
def test_unrest_explains_the_loss_of_an_ack_only_until_the_shard_has_answered(
    since: float, complains: bool
) -> None:
    ledger = told()
    ledger.unrest_begins(1.0)
    ledger.unrest_ends(3.0)
    deliver(ledger, 1, now=since)
    ledger.was_settled(Q, [("k", 1, since)], since + 1.0)
    deliver(ledger, 1, True, now=9.0)
    assert bool(ledger.complaints) == complains


def test_what_may_repeat_is_only_looked_at_for_loss() -> None:
    ledger = told(confirmed=3)
    ledger.may_repeat(Q)
    for number in (3, 1, 1):
        deliver(ledger, number)
    ledger.check()
    assert ledger.missing() == ["q: 1 of k, first [2]"]


def test_a_damaged_body_is_found() -> None:
    with pytest.raises(AssertionError, match="nobody published"):
        told().was_delivered(Q, make_body("k", 1)[:-1] + b"?", False, 0.0)


def moved(killed_at: float | None) -> Ledger:
    """Return what is known of a queue that moved from 1.0 to 5.0, was killed in it, and took 1."""
    ledger = told()
    ledger.move_begins(Q, 1.0)
    ledger.handed_over(Q, 2.0)
    if killed_at is not None:
        ledger.was_killed(killed_at, shards=True)
    deliver(ledger, 1, now=3.0)
    ledger.was_settled(Q, [("k", 1, 3.0)], 3.5)
    ledger.move_ends(Q, 5.0)
    return ledger


def test_a_shard_that_dies_in_a_move_explains_one_repeat_of_what_was_there() -> None:
    ledger = moved(killed_at=2.5)
    deliver(ledger, 1, redelivered=True, now=30.0)
    ledger.check()
    ledger.was_settled(Q, [("k", 1, 30.0)], 30.1)
    deliver(ledger, 1, redelivered=True, now=31.0)
    with pytest.raises(AssertionError, match="1 came again"):
        ledger.check()


def test_a_move_in_which_no_shard_dies_explains_no_repeat() -> None:
    ledger = moved(killed_at=None)
    deliver(ledger, 1, redelivered=True, now=6.0)
    with pytest.raises(AssertionError, match="1 came again"):
        ledger.check()


@pytest.mark.parametrize("late", ["published", "settled", "another queue"])
def test_a_death_in_a_move_explains_no_repeat_of_what_cannot_have_gone_over(late: str) -> None:
    """Published after the death, settled before the move, or of a queue that did not move."""
    queue, number = "other" if late == "another queue" else Q, 4 if late == "published" else 1
    ledger = told()
    if late == "settled":
        deliver(ledger, number, now=0.1)
        ledger.was_settled(Q, [("k", number, 0.1)], 0.2)
    ledger.move_begins(queue, 10.0)
    ledger.handed_over(queue, 10.5)
    ledger.was_killed(11.0, shards=True)
    if late == "published":
        ledger.was_published("k", (Q,))
    if late != "settled":
        deliver(ledger, number, now=12.0)
        ledger.was_settled(Q, [("k", number, 12.0)], 12.5)
    deliver(ledger, number, redelivered=True, now=13.0)
    with pytest.raises(AssertionError, match="came again"):
        ledger.check()


@pytest.mark.parametrize(("handed_out_at", "complains"), [(1.5, False), (2.5, True)])
def test_a_move_explains_the_loss_of_acks_of_what_the_old_shard_has_handed_out(
    handed_out_at: float, complains: bool
) -> None:
    ledger = told()
    ledger.move_begins(Q, 1.0)
    ledger.handed_over(Q, 2.0)
    deliver(ledger, 1, now=handed_out_at)
    ledger.was_settled(Q, [("k", 1, handed_out_at)], 3.0)
    deliver(ledger, 1, redelivered=True, now=4.0)
    assert bool(ledger.complaints) == complains
