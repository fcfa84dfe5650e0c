"""The checker finds what it is there to find."""

import pytest

from tests.support.history import History, make_body


def played(deliveries: list[tuple[int, bool]], confirmed: int = 0, published: int = 3) -> History:
    history = History()
    for number in range(1, published + 1):
        history.was_published("k", number)
    for number in range(1, confirmed + 1):
        history.was_confirmed("k", number)
    for number, redelivered in deliveries:
        history.was_delivered(make_body("k", number), redelivered)
    return history


def test_a_good_history_passes() -> None:
    played([(1, False), (2, False), (1, True), (2, True), (3, False)], confirmed=3).check()


@pytest.mark.parametrize(
    ("deliveries", "complaint"),
    [
        ([(1, False), (3, False)], "never delivered"),
        ([(1, False), (3, False), (2, False)], "out of order"),
        ([(1, False), (1, False), (2, False), (3, False)], "twice without a mark"),
        ([(1, False), (2, False), (3, False), (4, False)], "never published"),
    ],
)
def test_a_bad_history_is_named(deliveries: list[tuple[int, bool]], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        played(deliveries, confirmed=3).check()


def test_a_changed_body_is_found() -> None:
    with pytest.raises(AssertionError, match="nobody published"):
        History().was_delivered(make_body("k", 1).replace(b"1", b"2", 1), False)
